// A small bot of grammY. It prints a line for everything that it gets.
import { Bot, InlineKeyboard } from 'grammy'

const bot = new Bot(process.env.TOKEN, { client: { apiRoot: process.env.FAKE } })

bot.on('message:text', async (ctx) => {
  console.log(`message ${ctx.from.id} ${ctx.message.text}`)
  if (ctx.message.text === 'ask') {
    await ctx.reply('May <b>I</b>?', { parse_mode: 'HTML', reply_markup: new InlineKeyboard().text('Yes', 'nonce') })
    return
  }
  await ctx.replyWithChatAction('typing')
  const sent = await ctx.reply('…')
  await ctx.api.editMessageText(ctx.chat.id, sent.message_id, `You said ${ctx.message.text}`)
  await ctx.reply('<b>broken', { parse_mode: 'HTML' }).catch((e) => console.log(`refused ${e.error_code} ${e.description}`))
})

bot.on('message:document', async (ctx) => {
  const file = await ctx.getFile()
  const answer = await fetch(`${process.env.FAKE}/file/bot${process.env.TOKEN}/${file.file_path}`)
  console.log(`file ${ctx.message.document.file_name} ${await answer.text()}`)
})

bot.on('callback_query:data', async (ctx) => {
  console.log(`click ${ctx.from.id} ${ctx.callbackQuery.data}`)
  await ctx.answerCallbackQuery({ text: 'Thanks' })
})

bot.catch((e) => console.log(`error ${e.error}`))
bot.start({ onStart: (me) => console.log(`started ${me.username}`) })
