package email

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
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

// maxReference bounds a reference in bytes, like the inbox.
const maxReference = 512

// reference identifies the message that an answer replies to: its id, the id of the thread's first message, and the
// subject.
type reference struct{ id, root, subject string }

// String encodes r. It omits the root if the ids leave too little room for the subject.
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

// writeBody writes the text twice, as plain text and as HTML: multipart/alternative, quoted-printable, with CRLF.
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

// subject returns the subject of an answer: that of the answered message. For any other mail it returns the first line
// of the text.
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

// safeHTML renders Markdown. It omits HTML, and turns an image into a link: a program that shows the mail loads
// nothing, so a text from outside cannot report that the mail was read.
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
		if image, ok := n.(*ast.Image); ok && entering {
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
