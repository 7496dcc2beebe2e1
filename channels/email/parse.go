package email

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/mail"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/emersion/go-message"
	"github.com/emersion/go-message/charset"

	"github.com/lanekeeper/lanekeeper/channels"
)

// Bounds of a mail. Parts beyond maxParts or maxDepth are dropped. Text beyond maxText is dropped, with a line that
// says so. A larger header is an error. The inbox bounds the files.
const (
	maxHeader    = 256 << 10
	maxDepth     = 10
	maxParts     = 100
	maxIDs       = 50      // Message-IDs of a header
	maxAddresses = 100     // of a header
	maxText      = 60_000  // bytes of the text
	maxSource    = 1 << 20 // bytes of HTML that become text
)

// longerNote is the last line of a text that was cut.
const longerNote = "\n[The mail is longer.]"

// errUnreadable reports a mail that no attempt can read.
var errUnreadable = errors.New("the mail cannot be read")

// addressParser keeps the bytes of a name whose charset is unknown. An error would drop all addresses of the header.
var addressParser = mail.AddressParser{WordDecoder: &mime.WordDecoder{
	CharsetReader: func(name string, encoded io.Reader) (io.Reader, error) {
		if decoded, err := charset.Reader(name, encoded); err == nil {
			return decoded, nil
		}
		return encoded, nil
	},
}}

// received is a parsed mail.
type received struct {
	from       string // in lower case; "" unless From holds one valid address
	name       string
	recipients []string // in lower case, of To, Cc and the headers that servers add
	id         string
	references []string // from the first message of the thread to the parent
	subject    string
	text       string
	files      []channels.File
	results    []string // headers Authentication-Results, the newest first
	automatic  string   // reason why it counts as automatic mail; "" if it does not
	report     bool     // it has a delivery status
	failure    string   // the status's reason why a message was not delivered; "" if it was
	returnPath string   // "<>" if a header says so
}

// read parses a mail.
func read(raw []byte) (received, error) {
	entity, err := entityOf(raw)
	if err != nil {
		return received{}, err
	}
	h := &entity.Header
	m := received{
		id: firstID(h.Get("Message-Id")), subject: line(text(h, "Subject"), 200),
		returnPath: strings.TrimSpace(h.Get("Return-Path")), results: h.Values("Authentication-Results"),
	}
	m.readFrom(h)
	for _, name := range []string{"Delivered-To", "X-Original-To", "Envelope-To", "To", "Cc"} {
		for _, value := range h.Values(name) {
			m.recipients = append(m.recipients, addresses(value)...)
		}
	}
	m.references = append(ids(h.Get("References")), ids(h.Get("In-Reply-To"))...)
	m.automatic = automatic(h, m.returnPath)
	c := content{}
	walk(entity, c.add)
	m.text, m.files, m.report, m.failure = c.body(), c.files, c.report, c.failure
	return m, nil
}

// entityOf parses the header of a mail. A body in an unknown charset or encoding is read undecoded.
func entityOf(raw []byte) (*message.Entity, error) {
	entity, err := message.ReadWithOptions(bytes.NewReader(raw), &message.ReadOptions{MaxHeaderBytes: maxHeader})
	if entity == nil || err != nil && !decodable(err) {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	return entity, nil
}

func (m *received) readFrom(h *message.Header) {
	values := h.Values("From")
	if len(values) != 1 {
		return
	}
	list, err := addressParser.ParseList(values[0])
	if err != nil || len(list) != 1 || !plainAddress(list[0].Address) {
		return
	}
	m.from, m.name = strings.ToLower(list[0].Address), line(list[0].Name, 100)
}

// decodable reports an error after which the entity can be read undecoded.
func decodable(err error) bool {
	return message.IsUnknownCharset(err) || message.IsUnknownEncoding(err)
}

func text(h *message.Header, name string) string {
	value, _ := h.Text(name) // undecoded if the charset is unknown
	return value
}

// line returns foreign text as one line of at most n bytes. It drops control characters, and format characters such as
// bidirectional marks, except for the joiners of emoji and Persian.
func line(s string, n int) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.Is(unicode.Cc, r), unicode.Is(unicode.Cf, r) && r != '\u200d' && r != '\u200c', r == utf8.RuneError:
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	return strings.TrimSpace(cut(strings.Join(strings.Fields(s), " "), n))
}

// cut returns at most n bytes of s, in whole characters.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// ids returns the Message-IDs in a header, without brackets.
func ids(value string) (all []string) {
	for len(all) < maxIDs {
		_, rest, ok := strings.Cut(value, "<")
		id, after, closed := strings.Cut(rest, ">")
		if !ok || !closed {
			return all
		}
		if id != "" && len(id) <= 250 && strings.IndexFunc(id, func(r rune) bool { return r <= ' ' || r >= 0x7f }) < 0 {
			all = append(all, id)
		}
		value = after
	}
	return all
}

func firstID(value string) string {
	if all := ids(value); len(all) > 0 {
		return all[0]
	}
	return ""
}

func addresses(value string) (all []string) {
	list, err := addressParser.ParseList(value)
	if err != nil {
		list = nil
		if bare := strings.Trim(strings.TrimSpace(value), "<>"); plainAddress(bare) {
			list = []*mail.Address{{Address: bare}}
		}
	}
	for _, a := range list[:min(len(list), maxAddresses)] {
		all = append(all, strings.ToLower(a.Address))
	}
	return all
}

// automatic returns the reason why a mail counts as automatic; "" if it does not.
func automatic(h *message.Header, returnPath string) string {
	if v := strings.ToLower(strings.TrimSpace(h.Get("Auto-Submitted"))); v != "" && v != "no" {
		return "it is an automatic mail (Auto-Submitted)"
	}
	if returnPath == "<>" {
		return "it has no return path"
	}
	for _, name := range []string{"X-Autoreply", "X-Autorespond", "X-Auto-Response-Suppress"} {
		if h.Has(name) {
			return "it is an automatic mail (" + name + ")"
		}
	}
	switch strings.ToLower(strings.TrimSpace(h.Get("Precedence"))) {
	case "bulk", "junk", "list", "auto_reply":
		return "it is bulk mail (Precedence)"
	}
	for fields := h.Fields(); fields.Next(); {
		if strings.HasPrefix(strings.ToLower(fields.Key()), "list-") {
			return "it came by a list (" + line(fields.Key(), 40) + ")"
		}
	}
	return ""
}

// walk visits the parts of a mail that contain no other parts, within maxParts and maxDepth. The path of a part counts
// from 1 at each level, such as 2.1; that of a mail without parts is 0.
func walk(root *message.Entity, visit func(part *message.Entity, path, kind string)) {
	count := 0
	var descend func(e *message.Entity, path string, depth int)
	descend = func(e *message.Entity, path string, depth int) {
		if count++; count > maxParts || depth > maxDepth {
			return
		}
		kind, _, err := e.Header.ContentType()
		if err != nil {
			kind = "text/plain"
		}
		parts := e.MultipartReader()
		if parts == nil {
			visit(e, cmp.Or(path, "0"), kind)
			return
		}
		for i := 1; count <= maxParts; i++ {
			part, err := parts.NextPart()
			if part == nil || err != nil && !decodable(err) {
				return
			}
			descend(part, strings.TrimPrefix(fmt.Sprintf("%s.%d", path, i), "."), depth+1)
		}
	}
	descend(root, "", 0)
}

// content collects the texts and files of a mail.
type content struct {
	plain, html partText
	files       []channels.File
	report      bool
	failure     string
}

// add reads a part as text, as a delivery status, or as a file. The content of a broken encoding ends at the error.
func (c *content) add(e *message.Entity, path, kind string) {
	disposition, params, _ := e.Header.ContentDisposition()
	name := fileName(&e.Header, params)
	inline := disposition != "attachment" && name == ""
	switch {
	case kind == "message/delivery-status":
		status, _ := io.ReadAll(io.LimitReader(e.Body, maxText))
		c.report, c.failure = true, cmp.Or(c.failure, failure(string(status)))
	case inline && kind == "text/plain":
		c.plain.add(e.Body, maxText)
	case inline && kind == "text/html":
		c.html.add(e.Body, maxSource)
	default:
		size, _ := io.Copy(io.Discard, e.Body)
		name = cmp.Or(name, "part-"+path)
		c.files = append(c.files, channels.File{ID: path, Name: name, Type: line(kind, 100), Size: size})
	}
}

// body returns the plain text, or the text of the HTML if there is none.
func (c *content) body() string {
	body, longer := strings.TrimSpace(strings.ReplaceAll(c.plain.String(), "\r\n", "\n")), c.plain.longer
	if body == "" {
		body, longer = plainText(c.html.String()), c.html.longer
	}
	if longer || len(body) > maxText {
		body = strings.TrimSpace(cut(body, maxText) + longerNote)
	}
	return body
}

// partText joins the texts of parts, each on lines of its own.
type partText struct {
	strings.Builder
	longer bool // add dropped text
}

// add appends the text of a part, up to limit bytes of all parts.
func (t *partText) add(from io.Reader, limit int) {
	separator := ""
	if t.Len() > 0 {
		separator = "\n"
	}
	room := max(limit-t.Len()-len(separator), 0)
	raw, _ := io.ReadAll(io.LimitReader(from, int64(room)+1))
	text := strings.ToValidUTF8(string(raw), "\ufffd")
	t.longer = t.longer || len(raw) > room || len(text) > room
	t.WriteString(separator + cut(text, room))
}

func fileName(h *message.Header, disposition map[string]string) string {
	name := disposition["filename"]
	if name == "" {
		_, params, _ := h.ContentType() // without a name if it is malformed
		name = params["name"]
	}
	decoder := mime.WordDecoder{CharsetReader: charset.Reader}
	if decoded, err := decoder.DecodeHeader(name); err == nil {
		name = decoded
	}
	name = line(name, 200)
	return name[strings.LastIndexAny(name, `/\`)+1:]
}

// failure returns the reason of the first failed delivery in a delivery status; "" if none failed.
func failure(status string) string {
	unfolded := strings.NewReplacer("\n ", " ", "\n\t", " ").Replace(strings.ReplaceAll(status, "\r\n", "\n"))
	for recipient := range strings.SplitSeq(unfolded, "\n\n") { // the first has the fields of the message
		fields := map[string]string{}
		for l := range strings.SplitSeq(recipient, "\n") {
			if key, value, ok := strings.Cut(l, ":"); ok {
				fields[strings.ToLower(strings.TrimSpace(key))] = strings.TrimSpace(value)
			}
		}
		if strings.EqualFold(fields["action"], "failed") {
			reason := cmp.Or(fields["diagnostic-code"], fields["status"], "it was not delivered")
			return line("the mail came back: "+reason, 500)
		}
	}
	return ""
}

// Extract implements [channels.Extractor].
func (t *transport) Extract(raw []byte, f channels.File, limit int64) ([]byte, error) {
	entity, err := entityOf(raw)
	if err != nil {
		return nil, err
	}
	if f.Size > limit {
		return nil, fmt.Errorf("the file has %d bytes, of %d that are read", f.Size, limit)
	}
	var found []byte
	walk(entity, func(part *message.Entity, path, _ string) {
		if path == f.ID {
			found, _ = io.ReadAll(io.LimitReader(part.Body, limit))
		}
	})
	if found == nil {
		return nil, fmt.Errorf("the mail has no part %s", f.ID)
	}
	return found, nil
}
