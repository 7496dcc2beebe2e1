package engineroom

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// pageData is the data of a page's template.
type pageData struct {
	*pageRequest
	Agent string
	Title string
	Waits pendingCounts
	Page  page
	Nav   []page
	Flash *flash // message of the last action; shown once
	// Live is the URL of the stream, empty for none. Seen has the digests of the live parts: see parseDigests.
	Live, Seen string
	Viewer     *principals.Caller // nil without a login
	Replicated bool               // the page may come from a replica
	// Content is the page's executed template.
	Content     template.HTML
	parts       map[string][]byte
	placeholder string // the prefix of a part's placeholder
	zoneCookie  string
}

// IsCurrent reports whether the shown page is other or its subpage.
func (d pageData) IsCurrent(other page) bool {
	return d.Page.path == other.path || other.path != "/" && strings.HasPrefix(d.Page.path, other.path+"/")
}

// Now is the server's time in milliseconds, for browsers with a wrong clock.
func (d pageData) Now() int64 { return time.Now().UnixMilli() }

// HasPart reports whether the page has a part.
func (d pageData) HasPart(name string) bool {
	_, ok := d.parts[name]
	return ok
}

// Part returns the placeholder of a rendered part: its name after a secret prefix, which no text of a page can contain.
func (d pageData) Part(name string) (template.HTML, error) {
	if !d.HasPart(name) {
		return "", fmt.Errorf("page %s has no part %q", d.Page.name, name)
	}
	return template.HTML(d.placeholder + name + ";"), nil // the name is a constant of this package
}

// withParts replaces the placeholders by the rendered parts. A part may have a megabyte, so no template copies it.
func (d pageData) withParts(layout []byte) []byte {
	size := len(layout)
	for _, text := range d.parts {
		size += len(text)
	}
	page := make([]byte, 0, size)
	for {
		before, after, found := bytes.Cut(layout, []byte(d.placeholder))
		if page = append(page, before...); !found {
			return page
		}
		name, rest, _ := bytes.Cut(after, []byte(";"))
		page, layout = append(page, d.parts[string(name)]...), rest
	}
}

// serve returns the handler of a page. An address with a part of an id or name redirects to the match.
func (room *Room) serve(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayView(r); err != nil {
			room.Refuse(w, r, err)
			return
		}
		d := pageData{
			pageRequest: newPageRequest(r, p, ""), Flash: room.popFlash(w, r), zoneCookie: origin.CookieName(r, zoneCookie),
		}
		var body []byte
		source, err := room.Read.Do(r.Context(), p.fromPrimary || d.fromPrimary, func(ctx context.Context) (err error) {
			if part := r.URL.Query().Get(partParam); part != "" {
				body, err = room.renderAlone(ctx, p, part, d)
				return err
			}
			body, err = room.render(ctx, p, d)
			return err
		})
		if err != nil {
			target := room.resolvePartialID(r.Context(), p, d.pageRequest, err)
			if target == "" {
				room.Refuse(w, r, err)
				return
			}
			setSecurityHeaders(w.Header())
			http.Redirect(w, r, target, http.StatusSeeOther)
			return
		}
		source.SetHeader(w.Header())
		room.writePage(w, r, http.StatusOK, body)
	})
}

// render renders a whole page.
func (room *Room) render(ctx context.Context, p page, d pageData) ([]byte, error) {
	d.Viewer = principals.From(ctx)
	d.Agent, d.Title, d.Page, d.Nav, d.parts = room.Agent, p.title, p, room.pages, map[string][]byte{}
	d.placeholder = room.placeholder
	d.Replicated = room.Read.Configured()
	if err := d.loadSubject(ctx, p); err != nil {
		return nil, err
	}
	var err error
	if d.Waits, err = room.countPending(ctx); err != nil { // the part waits shows the error
		room.Logger.DebugContext(ctx, "waits not read", "error", err)
	}
	texts, err := room.renderParts(ctx, p, d.pageRequest)
	if err != nil {
		return nil, err
	}
	var seen []string
	for i, one := range p.parts {
		text := texts[i]
		d.parts[one.name] = text
		if one.interval > 0 {
			mark := digest(text)
			room.hub.rows.remember(mark, text)
			seen = append(seen, mark)
		}
	}
	if len(seen) > 0 {
		d.Live, d.Seen = "/live"+d.URL, strings.Join(seen, ".")
	}
	content, err := room.execute(p.name, d)
	if err != nil {
		return nil, err
	}
	d.Content = template.HTML(content) // a template of this package made it
	layout, err := room.execute("layout", d)
	return d.withParts(d.unlink(layout)), err
}

// renderAlone renders one part of a page.
func (room *Room) renderAlone(ctx context.Context, p page, name string, d pageData) ([]byte, error) {
	i := slices.IndexFunc(p.parts, func(one part) bool { return one.name == name })
	if i < 0 {
		return nil, notFound("page %s has no part %.60q", p.path, name)
	}
	if err := d.loadSubject(ctx, p); err != nil {
		return nil, err
	}
	return room.renderPart(ctx, p, p.parts[i], d.pageRequest)
}

// renderParts renders the parts of a page in their order.
func (room *Room) renderParts(ctx context.Context, p page, req *pageRequest) ([][]byte, error) {
	texts := make([][]byte, len(p.parts))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(1)
	if p.parallel {
		group.SetLimit(2)
	}
	for i, one := range p.parts {
		group.Go(func() (err error) {
			texts[i], err = room.renderPart(ctx, p, one, req)
			return err
		})
	}
	return texts, group.Wait()
}

// renderPart renders one part, or its error.
func (room *Room) renderPart(ctx context.Context, p page, one part, req *pageRequest) ([]byte, error) {
	data, err := one.read(ctx, req)
	if err != nil {
		return room.renderPartError(ctx, p, one, err)
	}
	return room.renderTemplate(p, one, data, req)
}

// renderTemplate executes a part's template for its viewers.
func (room *Room) renderTemplate(p page, one part, data any, req *pageRequest) ([]byte, error) {
	name := one.name
	if !one.sharedTemplate {
		name = p.name + "/" + name
	}
	body, err := room.execute(name, data)
	return req.unlink(body), err
}

// renderPartError renders a part's error.
func (room *Room) renderPartError(ctx context.Context, p page, one part, err error) ([]byte, error) {
	refused, unexpected := problem.Of(err)
	if unexpected {
		room.Logger.ErrorContext(ctx, "page part not read", "page", p.name, "part", one.name, "error", err)
	}
	return room.execute("trouble", map[string]any{"Name": one.name, "Detail": refused.Detail})
}

// loadSubject loads the page's subject. A path that PostgreSQL rejects as text is no server error: no row has it.
func (d *pageData) loadSubject(ctx context.Context, p page) error {
	if p.open == nil {
		return nil
	}
	title, err := p.open(ctx, d.pageRequest)
	if err == nil && title != "" {
		d.Title = title
	}
	if err != nil && !d.hasValidPath(p) {
		if refused, _ := problem.Of(err); refused.Status >= http.StatusInternalServerError {
			return notFound("there is no page %.200q", d.URL)
		}
	}
	return err
}

// hasValidPath reports whether PostgreSQL accepts the path values as text.
func (d *pageData) hasValidPath(p page) bool {
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		if value := d.path(m[1]); !postgres.IsText(value) {
			return false
		}
	}
	return true
}

// digest returns a digest of rendered HTML, in the form of digestPattern.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:9])
}

// execute runs a template and makes invisible characters visible: see escapeInvisible.
func (room *Room) execute(name string, data any) ([]byte, error) {
	b, _ := bufferPool.Get().(*bytes.Buffer)
	b.Reset()
	if err := room.templates.ExecuteTemplate(b, name, data); err != nil {
		return nil, fmt.Errorf("render %s: %w", name, err)
	}
	text := escapeInvisible(bytes.Clone(b.Bytes()))
	if b.Cap() <= maxPooledBuffer {
		bufferPool.Put(b)
	}
	return text, nil
}

// bufferPool holds buffers for reuse, because a large buffer costs more to grow than to fill.
var bufferPool = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// maxPooledBuffer bounds a buffer that execute keeps for reuse.
const maxPooledBuffer = 4 << 20

// escapeInvisible replaces the characters of isInvisible by their code points, such as ⟨U+202E⟩. The templates contain
// none, so each is from foreign text.
func escapeInvisible(text []byte) []byte {
	if isPlainText(text) {
		return text
	}
	var b bytes.Buffer
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		if isInvisible(r) {
			fmt.Fprintf(&b, "⟨U+%04X⟩", r)
		} else {
			b.Write(text[:size])
		}
		text = text[size:]
	}
	return b.Bytes()
}

// plainASCII has the bytes of ASCII that escapeInvisible keeps.
var plainASCII = func() (plain [256]bool) {
	for c := range rune(utf8.RuneSelf) {
		plain[c] = !isInvisible(c)
	}
	return plain
}()

// isPlainText reports a text without characters to make visible. A page may have a megabyte, most of it ASCII.
func isPlainText(text []byte) bool {
	for i := 0; i < len(text); {
		if plainASCII[text[i]] {
			i++
			continue
		}
		r, size := utf8.DecodeRune(text[i:])
		if isInvisible(r) {
			return false
		}
		i += size
	}
	return true
}

// isInvisible reports a control character, a direction mark or a space without width. It excludes newlines and tabs,
// and the joiners and selectors of scripts and emoji.
func isInvisible(r rune) bool {
	switch r {
	case '\n', '\t', utf8.RuneError:
		return false
	}
	return unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r) || r == '\u200b' || r == '\ufeff' || r == '\u2060'
}
