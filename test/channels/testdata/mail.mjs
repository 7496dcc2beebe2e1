// A mail server that receives answers, and a client that sends mail: lines of JSON come in, lines of JSON go out.
import { createInterface } from 'node:readline'
import nodemailer from 'nodemailer'
import { SMTPServer } from 'smtp-server'

const say = (x) => process.stdout.write(JSON.stringify(x) + '\n')
const seen = new Map()
const server = new SMTPServer({
  authOptional: true,
  disabledCommands: ['STARTTLS'],
  onData(stream, session, done) {
    let raw = ''
    stream.on('data', (c) => (raw += c))
    stream.on('end', () => {
      const id = raw.match(/^Message-Id: (.*)$/im)?.[1]
      const n = seen.get(id) ?? seen.size
      const first = !seen.has(id)
      seen.set(id, n)
      if (process.env.FAULTS && first && n % 3 === 1) {
        return done(Object.assign(new Error('try later'), { responseCode: 451 }))
      }
      say({ received: id, to: session.envelope.rcptTo[0].address, from: session.envelope.mailFrom.address, raw })
      if (process.env.FAULTS && n % 10 === 5) {
        for (const c of server.connections) if (c.session === session || c.id === session.id) c._socket.destroy()
        return
      }
      done()
    })
  },
})
server.on('error', () => {})
server.listen(0, '127.0.0.1', () => say({ port: server.server.address().port }))
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms))
for await (const line of createInterface({ input: process.stdin })) {
  const mail = JSON.parse(line)
  for (;;) {
    const [host, port] = mail.through.split(':')
    try {
      await nodemailer.createTransport({ host, port: Number(port), ignoreTLS: true }).sendMail(mail.message)
      break
    } catch (e) {
      if (e.responseCode >= 500) {
        say({ refused: e.message })
        break
      }
      await wait(100)
    }
  }
}
