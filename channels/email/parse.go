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
	maxHeader = 256 << 10
	maxDepth  = 10
	maxParts  = 100
	maxIDs    = 50      // of References
	maxText   = 60_000  // bytes of the text
	maxSource = 1 << 20 // bytes of HTML that become text
)

// errUnreadable reports a mail that no attempt can read.
var errUnreadable = errors.New("the mail cannot be read")

// received is a parsed mail.
type received struct {
	from       string // in lower case; "" for none, or for several
	name       string
	recipients []string // in To, Cc and the headers that servers add
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
	entity, err := message.ReadWithOptions(bytes.NewReader(raw), &message.ReadOptions{MaxHeaderBytes: maxHeader})
	if entity == nil || err != nil && !decodable(err) {
		return received{}, fmt.Errorf("%w: %w", errUnreadable, err)
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
	w := walker{}
	w.walk(entity, "", 0)
	m.text, m.files, m.report, m.failure = w.body(), w.files, w.report, w.failure
	return m, nil
}

func (m *received) readFrom(h *message.Header) {
	values := h.Values("From")
	if len(values) != 1 {
		return
	}
	parser := mail.AddressParser{WordDecoder: &mime.WordDecoder{CharsetReader: charset.Reader}}
	list, err := parser.ParseList(values[0])
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

// line returns foreign text as one line of at most n bytes, without control characters, such as bidirectional marks.
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
	list, err := mail.ParseAddressList(value)
	if err != nil {
		list = nil
		if bare := strings.Trim(strings.TrimSpace(value), "<>"); plainAddress(bare) {
			list = []*mail.Address{{Address: bare}}
		}
	}
	for _, a := range list[:min(len(list), maxParts)] {
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

// walker reads the parts of a mail within bounds.
type walker struct {
	parts   int
	plain   strings.Builder
	html    strings.Builder
	files   []channels.File
	report  bool
	failure string
	wanted  string // path of the part to read into found; "" for none
	limit   int64
	found   []byte
}

func (w *walker) walk(e *message.Entity, path string, depth int) {
	if w.parts++; w.parts > maxParts || depth > maxDepth {
		return
	}
	kind, _, err := e.Header.ContentType()
	if err != nil {
		kind = "text/plain"
	}
	parts := e.MultipartReader()
	if parts == nil {
		w.part(e, cmp.Or(path, "0"), kind)
		return
	}
	for i := 1; w.parts <= maxParts; i++ {
		part, err := parts.NextPart()
		if part == nil || err != nil && !decodable(err) {
			return
		}
		w.walk(part, strings.TrimPrefix(fmt.Sprintf("%s.%d", path, i), "."), depth+1)
	}
}

// part adds the text of a part, or lists it as a file. A part with a broken encoding ends at the error.
func (w *walker) part(e *message.Entity, path, kind string) {
	disposition, params, _ := e.Header.ContentDisposition()
	name := fileName(&e.Header, params)
	inline := disposition != "attachment" && name == ""
	switch {
	case w.wanted != "":
		if path == w.wanted {
			w.found, _ = io.ReadAll(io.LimitReader(e.Body, w.limit))
		}
	case kind == "message/delivery-status":
		status, _ := io.ReadAll(io.LimitReader(e.Body, maxText))
		w.report, w.failure = true, cmp.Or(w.failure, failure(string(status)))
	case inline && kind == "text/plain":
		add(&w.plain, e.Body, maxText+1)
	case inline && kind == "text/html":
		add(&w.html, e.Body, maxSource)
	default:
		size, _ := io.Copy(io.Discard, e.Body)
		name = cmp.Or(name, "part-"+path)
		w.files = append(w.files, channels.File{ID: path, Name: name, Type: line(kind, 100), Size: size})
	}
}

func add(to *strings.Builder, from io.Reader, limit int64) {
	raw, _ := io.ReadAll(io.LimitReader(from, limit-int64(to.Len())))
	to.WriteString(strings.ToValidUTF8(string(raw), "\ufffd"))
}

// body returns the plain text, or the text of the HTML if there is none.
func (w *walker) body() string {
	body := strings.TrimSpace(strings.ReplaceAll(w.plain.String(), "\r\n", "\n"))
	if body == "" {
		body = plainText(w.html.String())
	}
	if len(body) > maxText {
		body = cut(body, maxText) + "\n[The mail is longer.]"
	}
	return body
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

// failure returns the reason of a delivery status with a failed delivery; "" for any other status.
func failure(status string) string {
	fields := map[string]string{}
	unfolded := strings.NewReplacer("\r\n ", " ", "\r\n\t", " ", "\n ", " ", "\n\t", " ").Replace(status)
	for l := range strings.SplitSeq(unfolded, "\n") {
		if key, value, ok := strings.Cut(l, ":"); ok {
			fields[strings.ToLower(strings.TrimSpace(key))] = strings.TrimSpace(value)
		}
	}
	if !strings.EqualFold(fields["action"], "failed") {
		return ""
	}
	return line("the mail came back: "+cmp.Or(fields["diagnostic-code"], fields["status"], "it was not delivered"), 500)
}

// Extract implements [channels.Extractor].
func (t *transport) Extract(raw []byte, f channels.File, limit int64) ([]byte, error) {
	entity, err := message.ReadWithOptions(bytes.NewReader(raw), &message.ReadOptions{MaxHeaderBytes: maxHeader})
	if entity == nil || err != nil && !decodable(err) {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	if f.Size > limit {
		return nil, fmt.Errorf("the file has %d bytes, of %d that are read", f.Size, limit)
	}
	w := walker{wanted: f.ID, limit: limit}
	w.walk(entity, "", 0)
	if w.found == nil {
		return nil, fmt.Errorf("the mail has no part %s", f.ID)
	}
	return w.found, nil
}
