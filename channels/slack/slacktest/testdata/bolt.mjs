// A small app of @slack/bolt. It prints a line of JSON for everything that it gets.
import bolt from '@slack/bolt'

const clientOptions = { slackApiUrl: process.env.FAKE + '/api/' }
const http = process.env.MODE === 'http'
const app = new bolt.App({
  token: process.env.TOKEN,
  clientOptions,
  logLevel: 'error',
  ...(http
    ? { receiver: new bolt.HTTPReceiver({ signingSecret: process.env.SECRET, endpoints: '/slack/events', logLevel: 'error' }) }
    : { socketMode: true, appToken: process.env.APP_TOKEN }),
})
const print = (got) => console.log(JSON.stringify(got))

app.message(async ({ message, say, context, client }) => {
  print({ got: 'message', text: message.text, retry: context.retryNum ?? 0, files: (message.files ?? []).length })
  if (message.text === 'ask') {
    await say({
      text: 'May I?',
      thread_ts: message.ts,
      metadata: { event_type: 'asked', event_payload: { id: '7' } },
      blocks: [
        { type: 'section', text: { type: 'mrkdwn', text: 'May *I*?' } },
        { type: 'actions', elements: [{ type: 'button', action_id: 'yes', value: 'nonce', text: { type: 'plain_text', text: 'Yes' } }] },
      ],
    })
    const read = await client.conversations.replies({ channel: message.channel, ts: message.ts, include_all_metadata: true })
    print({ got: 'thread', text: read.messages.map((m) => m.metadata?.event_payload?.id ?? '-').join(' ') })
  }
})
app.event('app_mention', async ({ event, context }) => print({ got: 'mention', text: event.text, retry: context.retryNum ?? 0 }))
app.action('yes', async ({ ack, action, body, client }) => {
  await ack()
  print({ got: 'click', text: `${body.user.id} ${action.value}` })
  await client.chat.update({ channel: body.channel.id, ts: body.message.ts, text: 'Allowed.', blocks: [] })
})
app.error(async (error) => print({ got: 'error', text: String(error) }))

const server = await app.start(http ? { port: 0, host: '127.0.0.1' } : undefined)
print({ got: 'ready', text: http ? `http://127.0.0.1:${server.address().port}/slack/events` : '' })
