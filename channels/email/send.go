package email

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/smtp"
	"net/textproto"
	"strings"
	"time"

	"github.com/emersion/go-message"
	"github.com/emersion/go-message/mail"
	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	gtext "github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	dialTimeout   = 10 * time.Second
	sendTimeout   = 45 * time.Second
	answerTimeout = 20 * time.Second // for the server's answer after the whole mail
)

// Send implements [channels.Transport].
func (t *transport) Send(ctx context.Context, m channels.Message) (string, error) {
	to, id, raw, err := t.compose(m, time.Now())
	if err != nil {
		return "", &channels.SendError{Err: err, Permanent: true}
	}
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	c, conn, err := t.dial(ctx)
	if err != nil {
		return "", channels.NotSent(err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := offer(c, t.bouncePath(m.ID), to); err != nil {
		return "", refused(err)
	}
	body, err := c.Data()
	if err != nil {
		return "", refused(err)
	}
	if _, err := body.Write(raw); err != nil { // the server accepts nothing before the line that ends the mail
		return "", channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	if !stop() {
		return "", channels.NotSent(ctx.Err())
	}
	_ = conn.SetDeadline(time.Now().Add(answerTimeout))
	if err := body.Close(); err != nil {
		if _, answered := errors.AsType[*textproto.Error](err); !answered {
			return "", &channels.SendError{Err: fmt.Errorf("the answer to the mail was lost: %w", err), MaybeSent: true}
		}
		return "", refused(err)
	}
	_ = c.Quit() // the mail is sent
	return id, nil
}

func offer(c *smtp.Client, from, to string) error {
	if err := mailFrom(c, from); err != nil {
		return err
	}
	return c.Rcpt(to)
}

// mailFrom begins a mail. A mail of ASCII does not request SMTPUTF8, although [smtp.Client.Mail] does if the server
// supports it: a later server without it would refuse the mail.
func mailFrom(c *smtp.Client, from string) error {
	if !plainAddress(from) {
		return c.Mail(from)
	}
	id, err := c.Text.Cmd("MAIL FROM:<%s>", from)
	if err != nil {
		return err
	}
	c.Text.StartResponse(id)
	defer c.Text.EndResponse(id)
	_, _, err = c.Text.ReadResponse(250)
	return err
}

// refused reports whether a refusal is final. Without an answer, or with one about the login, nothing was sent.
func refused(err error) error {
	answer, is := errors.AsType[*textproto.Error](err)
	if !is {
		return channels.NotSent(fmt.Errorf("send mail: %w", err))
	}
	login := answer.Code == 530 || answer.Code == 534 || answer.Code == 535 || answer.Code == 538
	return &channels.SendError{
		Err: fmt.Errorf("the SMTP server refused the mail: %w", err), Permanent: answer.Code >= 500 && !login,
	}
}

// dial connects to the SMTP server and logs in.
func (t *transport) dial(ctx context.Context) (_ *smtp.Client, _ net.Conn, err error) {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", t.smtp.address)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the SMTP server: %w", err)
	}
	if deadline, has := ctx.Deadline(); has {
		_ = conn.SetDeadline(deadline)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if t.smtp.mode == "implicit" {
		conn = tls.Client(conn, t.smtp.tls)
	}
	c, err := smtp.NewClient(conn, t.smtp.tls.ServerName)
	if err != nil {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("greet the SMTP server: %w", err)
	}
	defer func() {
		if err != nil {
			_ = c.Close()
		}
	}()
	if err := c.Hello(t.domain); err != nil {
		return nil, nil, fmt.Errorf("greet the SMTP server: %w", err)
	}
	if t.smtp.mode == "starttls" {
		if err := c.StartTLS(t.smtp.tls); err != nil {
			return nil, nil, fmt.Errorf("start TLS with the SMTP server: %w", err)
		}
	}
	if t.smtp.user != "" {
		auth := smtp.PlainAuth("", t.smtp.user, t.smtp.secret, t.smtp.tls.ServerName)
		if err := c.Auth(auth); err != nil {
			return nil, nil, fmt.Errorf("log in at the SMTP server: %w", err)
		}
	}
	return c, conn, nil
}

// probe logs in at the SMTP server and leaves.
func (t *transport) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, _, err := t.dial(ctx)
	if err != nil {
		return err
	}
	_ = c.Quit() // the server answered the login
	return nil
}

const maxReference = 512 // bytes of a message's reference that the core stores

// reference is the data for answering a message: its id, the id of the thread's first message, and the subject.
type reference struct{ id, root, subject string }

func (r reference) String() string {
	if len(r.id)+len(r.root) > maxReference-100 {
		r.root = ""
	}
	return cut(r.id+"\n"+r.root+"\n"+r.subject, maxReference)
}

func parseReference(text string) (r reference) {
	r.id, text, _ = strings.Cut(text, "\n")
	r.root, r.subject, _ = strings.Cut(text, "\n")
	return r
}

// compose writes a mail. It returns the recipient, the Message-ID and the text.
func (t *transport) compose(m channels.Message, now time.Time) (to, id string, raw []byte, err error) {
	who, root, err := parseConversation(m.Conversation)
	if err != nil {
		return "", "", nil, err
	}
	token, ref := t.token(who, root), parseReference(m.ReplyTo)
	to = strings.TrimPrefix(who, unproven)
	var h mail.Header
	h.SetDate(now)
	h.SetAddressList("From", []*mail.Address{{Name: line(t.name, 100), Address: t.address}})
	h.SetAddressList("To", []*mail.Address{{Address: to}})
	h.SetAddressList("Reply-To", []*mail.Address{
		{Name: line(t.name, 100), Address: t.local + "+" + token + "@" + t.domain},
	})
	automatic := "auto-replied"
	if m.ReplyTo == "" {
		automatic = "auto-generated"
	}
	h.SetSubject(subject(ref, m.ReplyTo != "", m.Markdown))
	id = t.messageID(m.ID, m.Part, token)
	h.SetMessageID(id)
	if ref.id != "" {
		h.SetMsgIDList("In-Reply-To", []string{ref.id})
		chain := []string{ref.id}
		if ref.root != "" && ref.root != ref.id {
			chain = []string{ref.root, ref.id}
		}
		h.SetMsgIDList("References", chain)
	}
	h.Set("Auto-Submitted", automatic)
	h.Set("X-Auto-Response-Suppress", "All")
	var out bytes.Buffer
	if err := writeBody(&out, h, m.Markdown); err != nil {
		return "", "", nil, fmt.Errorf("write mail: %w", err)
	}
	return to, id, out.Bytes(), nil
}

func writeBody(out io.Writer, h mail.Header, markdown string) error {
	page, err := safeHTML(markdown)
	if err != nil {
		return err
	}
	w, err := mail.CreateInlineWriter(out, h)
	if err != nil {
		return err
	}
	for _, part := range []struct{ kind, text string }{{"text/plain", markdown}, {"text/html", page}} {
		ph := mail.InlineHeader{Header: message.Header{}}
		ph.SetContentType(part.kind, map[string]string{"charset": "utf-8"})
		ph.Set("Content-Transfer-Encoding", "quoted-printable")
		p, err := w.CreatePart(ph)
		if err != nil {
			return err
		}
		text := strings.ReplaceAll(strings.ReplaceAll(part.text, "\r\n", "\n"), "\n", "\r\n")
		if _, err := io.WriteString(p, text); err != nil {
			return err
		}
		if err := p.Close(); err != nil {
			return err
		}
	}
	return w.Close()
}

// subject continues the subject of the answered message; otherwise it is the first line of the text.
func subject(ref reference, answers bool, markdown string) string {
	if answers {
		s := line(ref.subject, 200)
		if len(s) >= 3 && strings.EqualFold(s[:3], "re:") {
			return s
		}
		return "Re: " + cmp.Or(s, "your message")
	}
	for l := range strings.Lines(markdown) {
		if s := line(strings.Trim(l, "#*_`> \r\n"), 80); s != "" {
			return s
		}
	}
	return "A message for you"
}

// safeHTML renders Markdown. It omits HTML, and turns an image into a link: a mail loads nothing, so a text cannot send
// anything away.
func safeHTML(markdown string) (string, error) {
	var out bytes.Buffer
	md := goldmark.New(goldmark.WithExtensions(extension.GFM),
		goldmark.WithParserOptions(parser.WithASTTransformers(util.Prioritized(imageLinks{}, 100))))
	if err := md.Convert([]byte(markdown), &out); err != nil {
		return "", fmt.Errorf("render Markdown: %w", err)
	}
	return `<!doctype html><html><head><meta charset="utf-8"></head><body dir="auto">` + "\n" + out.String() +
		"</body></html>\n", nil
}

// imageLinks turns images into links.
type imageLinks struct{}

func (imageLinks) Transform(doc *ast.Document, _ gtext.Reader, _ parser.Context) {
	var images []*ast.Image
	_ = ast.Walk(doc, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if image, is := n.(*ast.Image); is && entering {
			images = append(images, image)
		}
		return ast.WalkContinue, nil
	})
	for _, image := range images {
		link := ast.NewLink()
		link.Destination, link.Title = image.Destination, image.Title
		if image.ChildCount() == 0 {
			link.AppendChild(link, ast.NewString(image.Destination))
		}
		for child := image.FirstChild(); child != nil; child = image.FirstChild() {
			link.AppendChild(link, child)
		}
		image.Parent().ReplaceChild(image.Parent(), image, link)
	}
}
