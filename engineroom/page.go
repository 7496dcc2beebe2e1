package engineroom

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"html/template"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/gzhttp"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/principals"
)

// page is a page of the Engine Room.
type page struct {
	path  string // as http.ServeMux has it; "/" is the overview
	name  string // of its templates: <name> arranges the parts, <name>/<part> is a part
	nav   string // label in the navigation; empty for a subpage
	title string // used when open returns no title
	// open loads the page's subject and returns its title; nil for a page without a subject. An error becomes the response
	// (not found, invalid filter).
	open  func(ctx context.Context, v *visit) (title string, err error)
	parts []part
	// follows marks a page that reads from the primary, to follow a running turn.
	follows bool
	// parallel marks a page whose parts do not change the visit. The server reads such parts two at a time.
	parallel bool
}

// part is a part of a page.
type part struct {
	name  string        // also the id of its element
	every time.Duration // least refresh interval while a viewer is present; 0 for never
	// refreshOnActivity limits refreshes to one after activity, and one every half minute.
	refreshOnActivity bool
	about             changes // changes that refresh it at once; 0: any change, if every is short
	shared            bool    // shared by all pages, with a template of its own name
	load              func(ctx context.Context, v *visit) (any, error)
}

// visit is a request for a page, also for its stream.
type visit struct {
	path  func(name string) string // value of a path wildcard
	Query url.Values               // of the URL
	URL   string                   // canonical path and query
	About any                      // the subject that open found
	fresh bool                     // read from the primary, after a write
	live  bool                     // of a stream
	memo  *visitMemo               // shared by the parts of a page
	zone  *time.Location           // of the reader
	texts bool                     // the viewer may read threads and their quotes
	lacks string                   // scopes of linked pages that the viewer lacks, each after a space
}

// show is the data of a page's template.
type show struct {
	*visit
	Agent string
	Title string
	Waits waits
	Page  page
	Nav   []page
	Flash *flash // message of the last action; shown once
	// Live is the URL of the stream, empty for none; Seen names the state of the parts.
	Live, Seen string
	Who        *principals.Caller // the viewer; nil for parts that all viewers share
	Replicated bool               // the page may come from a replica
	// Arrangement is the page's executed template.
	Arrangement template.HTML
	parts       map[string][]byte
	mark        string // stands before the name of a part in its place
	zoneCookie  string
}

// keys are the letters after g that open a page.
var keys = map[string]string{
	"/": "o", "/activity": "a", "/traces": "t", "/executions": "e", "/flows": "f", "/threads": "h", "/approvals": "p",
	"/skills": "s", "/agents": "n",
	"/automations": "u", "/objectives": "b", "/memory": "m", "/deliveries": "d", "/spend": "c",
	"/lanes": "l", "/operate": "r", "/charts": "v", "/evals": "x",
}

// NavWord is the page's label in the navigation; empty for none.
func (p page) NavWord() string { return p.nav }

// Path is the page's path.
func (p page) Path() string { return p.path }

// Key is the letter that opens the page; empty for none.
func (p page) Key() string { return keys[p.path] }

// thumbs are the signs of the pages at the lower edge of a phone.
var thumbs = map[string]string{"/": "⌂", "/approvals": "✓", "/traces": "≋", "/executions": "▷", "/operate": "›_"}

// Thumb is the page's sign at the lower edge of a phone; empty for a page under More.
func (p page) Thumb() string { return thumbs[p.path] }

// live lists the parts that change while viewed.
func (p page) live() []part {
	var all []part
	for _, one := range p.parts {
		if one.every > 0 {
			all = append(all, one)
		}
	}
	return all
}

// Here reports whether the shown page is other or its subpage.
func (s show) Here(other page) bool {
	return s.Page.path == other.path || other.path != "/" && strings.HasPrefix(s.Page.path, other.path+"/")
}

// Now is the server's time in milliseconds, for browsers with a wrong clock.
func (s show) Now() int64 { return time.Now().UnixMilli() }

// Has reports whether the page has a part.
func (s show) Has(name string) bool {
	_, has := s.parts[name]
	return has
}

// Part returns the placeholder of a rendered part: its name behind the room's secret mark.
func (s show) Part(name string) (template.HTML, error) {
	if !s.Has(name) {
		return "", fmt.Errorf("page %s has no part %q", s.Page.name, name)
	}
	return template.HTML(s.mark + name + ";"), nil // the name is a constant of this package
}

// withParts puts the rendered parts into their places. A part may have a megabyte, so no template copies it.
func (s show) withParts(layout []byte) []byte {
	size := len(layout)
	for _, text := range s.parts {
		size += len(text)
	}
	page := make([]byte, 0, size)
	for {
		before, after, found := bytes.Cut(layout, []byte(s.mark))
		if page = append(page, before...); !found {
			return page
		}
		name, rest, _ := bytes.Cut(after, []byte(";"))
		page, layout = append(page, s.parts[string(name)]...), rest
	}
}

// pattern returns the path for http.ServeMux. The overview matches "/" alone.
func (p page) pattern() string {
	if p.path == "/" {
		return "/{$}"
	}
	return p.path
}

// serve serves a page.
func (room *Room) serve(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayView(r); err != nil {
			room.Refuse(w, r, err)
			return
		}
		s := show{
			visit: newVisit(r, p, ""), Flash: room.takeFlash(w, r), zoneCookie: origin.CookieName(r, zoneCookie),
		}
		var body []byte
		from, err := room.Read.Do(r.Context(), p.follows || s.fresh, func(ctx context.Context) (err error) {
			if part := r.URL.Query().Get(partField); part != "" {
				body, err = room.renderAlone(ctx, p, part, s)
				return err
			}
			body, err = room.render(ctx, p, s)
			return err
		})
		if to := ""; err != nil {
			if to = room.elsewhere(r.Context(), p, s.visit, err); to == "" {
				room.Refuse(w, r, err)
				return
			}
			guard(w.Header())
			http.Redirect(w, r, to, http.StatusSeeOther)
			return
		}
		from.SetHeader(w.Header())
		room.send(w, r, http.StatusOK, body)
	})
}

// partField is the parameter that requests one part of a page. A script puts the part into the page.
const partField = "part"

// renderAlone renders one part of a page.
func (room *Room) renderAlone(ctx context.Context, p page, name string, s show) ([]byte, error) {
	i := slices.IndexFunc(p.parts, func(one part) bool { return one.name == name })
	if i < 0 {
		return nil, missing("page %s has no part %.60q", p.path, name)
	}
	if err := s.find(ctx, p); err != nil {
		return nil, err
	}
	return room.renderPart(ctx, p, p.parts[i], s.visit)
}

// newVisit parses a request below prefix.
func newVisit(r *http.Request, p page, prefix string) *visit {
	wild := map[string]string{}
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		wild[m[1]] = r.PathValue(m[1])
	}
	v := &visit{
		path: func(name string) string { return wild[name] }, Query: r.URL.Query(), fresh: replica.Fresh(r), zone: zoneOf(r),
		memo: &visitMemo{}, live: prefix != "",
	}
	v.Query.Del(partField)
	if prefix != "" {
		v.Query.Del("seen")
		v.fresh = replica.JustWrote(r)
	}
	who := principals.From(r.Context())
	for _, scope := range linkedScopes {
		if who != nil && !who.May(scope) {
			v.lacks += " " + string(scope)
		}
	}
	v.texts = !strings.Contains(v.lacks, string(principals.ThreadsRead))
	v.resolveTimes()
	address := url.URL{
		Path: strings.TrimPrefix(r.URL.Path, prefix), RawPath: strings.TrimPrefix(r.URL.RawPath, prefix),
		RawQuery: v.Query.Encode(),
	}
	v.URL = address.RequestURI()
	return v
}

// linkedScopes are the scopes of pages that other pages link to. Only pages of principals link to pages of principals.
var linkedScopes = []principals.Scope{
	principals.RunsRead, principals.ThreadsRead, principals.Operate, principals.ApprovalsRead,
}

// unlink removes the addresses that the viewer may not open, so their links become text. Templates escape > in
// attributes.
func (v *visit) unlink(body []byte) []byte {
	if v.lacks == "" {
		return body
	}
	kept := make([]byte, 0, len(body))
	for {
		text, rest, found := bytes.Cut(body, []byte("<a "))
		if kept = append(kept, text...); !found {
			return kept
		}
		tag, rest, _ := bytes.Cut(rest, []byte(">"))
		before, value, has := bytes.Cut(tag, []byte(`href="`))
		address, after, _ := bytes.Cut(value, []byte(`"`))
		if has && !v.opens(html.UnescapeString(string(address))) {
			tag = slices.Concat(before, after)
		}
		kept = append(append(append(kept, "<a "...), tag...), '>')
		body = rest
	}
}

// opens reports whether the viewer may open the page or route of an address.
func (v *visit) opens(address string) bool {
	at, err := url.Parse(address)
	if err != nil || at.Query().Get("tab") == "prompt" && !v.texts {
		return false
	}
	need := page{path: strings.TrimPrefix(at.Path, "/v1")}.scope()
	return at.Path == "" || !strings.Contains(v.lacks, string(need))
}

// wildcard matches the names in a path.
var wildcard = regexp.MustCompile(`\{(\w+)(?:\.\.\.)?\}`)

// render renders a whole page.
func (room *Room) render(ctx context.Context, p page, s show) ([]byte, error) {
	s.Who = principals.From(ctx)
	s.Agent, s.Title, s.Page, s.Nav, s.parts = room.Agent, p.title, p, room.pages, map[string][]byte{}
	s.mark = room.mark
	s.Replicated = room.Read.Configured()
	if err := s.find(ctx, p); err != nil {
		return nil, err
	}
	var err error
	if s.Waits, err = room.waiting(ctx); err != nil { // the part shows the error
		room.Logger.DebugContext(ctx, "waits not read", "error", err)
	}
	texts, err := room.renderParts(ctx, p, s.visit)
	if err != nil {
		return nil, err
	}
	var seen []string
	for i, one := range p.parts {
		text := texts[i]
		s.parts[one.name] = text
		if one.every > 0 {
			mark := digest(text)
			room.hub.rows.keep(mark, text)
			seen = append(seen, mark)
		}
	}
	if len(seen) > 0 {
		s.Live, s.Seen = "/live"+s.URL, strings.Join(seen, ".")
	}
	arranged, err := room.execute(p.name, s)
	if err != nil {
		return nil, err
	}
	s.Arrangement = template.HTML(arranged) // a template of this package made it
	layout, err := room.execute("layout", s)
	return s.withParts(s.unlink(layout)), err
}

// renderParts renders the parts of a page in their order.
func (room *Room) renderParts(ctx context.Context, p page, v *visit) ([][]byte, error) {
	texts := make([][]byte, len(p.parts))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(1)
	if p.parallel {
		group.SetLimit(2)
	}
	for i, one := range p.parts {
		group.Go(func() (err error) {
			texts[i], err = room.renderPart(ctx, p, one, v)
			return err
		})
	}
	return texts, group.Wait()
}

// find loads the page's subject.
func (s *show) find(ctx context.Context, p page) error {
	if p.open == nil {
		return nil
	}
	title, err := p.open(ctx, s.visit)
	if err == nil && title != "" {
		s.Title = title
	}
	if err != nil && !s.named(p) {
		if refused, _ := problem.Of(err); refused.Status >= http.StatusInternalServerError {
			return missing("there is no page %.200q", s.URL)
		}
	}
	return err
}

// named reports whether the path values are valid text for PostgreSQL.
func (s *show) named(p page) bool {
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		if value := s.path(m[1]); !postgres.IsText(value) {
			return false
		}
	}
	return true
}

// renderPart renders one part, or its error.
func (room *Room) renderPart(ctx context.Context, p page, one part, v *visit) ([]byte, error) {
	data, err := one.read(ctx, v)
	if err != nil {
		return room.renderTrouble(ctx, p, one, err)
	}
	return room.fill(p, one, data, v)
}

// fill executes a part's template for its viewers.
func (room *Room) fill(p page, one part, data any, v *visit) ([]byte, error) {
	name := one.name
	if !one.shared {
		name = p.name + "/" + name
	}
	body, err := room.execute(name, data)
	return v.unlink(body), err
}

// renderTrouble renders a part's error.
func (room *Room) renderTrouble(ctx context.Context, p page, one part, err error) ([]byte, error) {
	refused, news := problem.Of(err)
	if news {
		room.Logger.ErrorContext(ctx, "page part not read", "page", p.name, "part", one.name, "error", err)
	}
	return room.execute("trouble", map[string]any{"Name": one.name, "Detail": refused.Detail})
}

// digest identifies a render.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:9])
}

// buffers holds buffers for reuse, because a large buffer costs more to grow than to fill.
var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// maxKeptBuffer bounds a buffer that execute keeps for reuse.
const maxKeptBuffer = 4 << 20

// execute runs a template and makes control characters visible.
func (room *Room) execute(name string, data any) ([]byte, error) {
	b, _ := buffers.Get().(*bytes.Buffer)
	b.Reset()
	if err := room.templates.ExecuteTemplate(b, name, data); err != nil {
		return nil, fmt.Errorf("render %s: %w", name, err)
	}
	text := plain(bytes.Clone(b.Bytes()))
	if b.Cap() <= maxKeptBuffer {
		buffers.Put(b)
	}
	return text, nil
}

// freshPlan plans a query for its values. An unset filter costs nothing, and a set filter chooses its index. A generic
// plan could do neither.
const freshPlan = pgx.QueryExecModeCacheDescribe

// uuidShape matches ids of rows.
var uuidShape = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// oneOf reads an enumerated filter; the default is the first value.
func (v *visit) oneOf(name string, known ...string) (string, error) {
	value := v.Query.Get(name)
	switch {
	case value == "":
		return known[0], nil
	case !slices.Contains(known, value):
		return "", problem.BadParameter("%s is %.60q; it can be %s", name, value,
			strings.Join(slices.DeleteFunc(slices.Clone(known), func(s string) bool { return s == "" }), ", "))
	}
	return value, nil
}

// uuidFilter reads an id parameter; empty if absent.
func (v *visit) uuidFilter(name string) (string, error) {
	value := v.Query.Get(name)
	if value != "" && !uuidShape.MatchString(value) {
		return "", problem.BadParameter("%s is %.60q, which is no place in this list; begin at its top", name, value)
	}
	return value, nil
}

// at returns the page's URL with one parameter changed, or removed if the value is empty.
func (v *visit) at(name, value string) string {
	path, _, _ := strings.Cut(v.URL, "?")
	query := url.Values{}
	for key, values := range v.Query {
		if len(values) > 0 && values[0] != "" && key != name {
			query.Set(key, values[0])
		}
	}
	if value != "" {
		query.Set(name, value)
	}
	if len(query) == 0 {
		return path
	}
	return path + "?" + query.Encode()
}

// missing returns the error for an unknown id.
func missing(format string, args ...any) error {
	return problem.New(http.StatusNotFound, format, args...)
}

// opener opens a page by the id in its path. The query returns the name in the title.
func (room *Room) opener(kind, title, query string) func(ctx context.Context, v *visit) (string, error) {
	return func(ctx context.Context, v *visit) (string, error) {
		id := strings.ToLower(v.path("id"))
		if !uuidShape.MatchString(id) {
			return "", missing("there is no %s %.60q", kind, id)
		}
		var name string
		err := room.Read.QueryRow(ctx, query, postgres.Strict{"id": id}).Scan(&name)
		if errors.Is(err, pgx.ErrNoRows) {
			return "", missing("there is no %s %s", kind, id)
		}
		v.About = id
		return title + cut(80, name), err
	}
}

// onPage returns the first n items, and whether there are more.
func onPage[T any](list []T, n int) ([]T, bool) { return list[:min(len(list), n)], len(list) > n }

// pager holds the links from a page of a list to the next page and to the first page. Each is empty for none.
type pager struct{ Older, Newest string }

// paged returns the first n items and the links. The URL names the last item of a page, by cursor, in the parameter
// before.
func paged[T any](v *visit, list []T, n int, cursor func(T) string) ([]T, pager) {
	var links pager
	if v.Query.Get("before") != "" {
		links.Newest = v.at("before", "")
	}
	list, more := onPage(list, n)
	if more {
		links.Older = v.at("before", cursor(list[n-1]))
	}
	return list, links
}

// policy permits only files and connections of this server.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// guard sets the security headers. Only this server receives the referrer, which the redirect after an action needs.
func guard(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Origin-Agent-Cluster", "?1")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
}

// compressed compresses pages and files. A page holds an admin's data beside input of the URL, so its size could reveal
// that data (BREACH). That attack needs requests of another site with the login's cookie, which is SameSite=Strict. No
// page holds a lasting secret, such as a token or a key.
var compressed = newCompressor()

func newCompressor() func(http.Handler) http.Handler {
	wrap, err := gzhttp.NewWrapper(gzhttp.MinSize(1000), gzhttp.ContentTypes([]string{
		"text/html", "text/css", "text/javascript", "image/svg+xml",
	}))
	if err != nil {
		panic(err) // of constants
	}
	return func(h http.Handler) http.Handler { return wrap(h) }
}

// send writes a page.
func (room *Room) send(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	h := w.Header()
	guard(h)
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		room.Logger.DebugContext(r.Context(), "page not sent", "error", err)
	}
}

// Refuse writes an error page.
func (room *Room) Refuse(w http.ResponseWriter, r *http.Request, err error) {
	refused, news := problem.Of(err)
	if news {
		room.Logger.ErrorContext(r.Context(), "page not rendered", "path", problem.Path(r), "error", err)
	}
	if refused.Status == http.StatusServiceUnavailable && w.Header().Get("Retry-After") == "" {
		w.Header().Set("Retry-After", "2")
	}
	body, err := room.execute("refusal", map[string]any{
		"Agent": room.Agent, "Problem": refused, "Find": refused.Status == http.StatusNotFound,
		"Text": lastSegment(r.URL.Path),
	})
	if err != nil {
		http.Error(w, refused.Detail, refused.Status)
		return
	}
	room.send(w, r, refused.Status, body)
}

// lastSegment is the end of a path, to search for.
func lastSegment(path string) string {
	text := path[strings.LastIndexByte(path, '/')+1:]
	if len(text) > maxFilter || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
		return ""
	}
	return text
}

// LogIn writes the login page. next is the path after the login; wrong explains a rejected token, empty for none.
func (room *Room) LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string) {
	link := ""
	if r.Method != http.MethodPost {
		link = r.URL.Query().Get("link")
	}
	body, err := room.execute("login", map[string]any{
		"Agent": room.Agent, "Next": next, "Wrong": wrong, "Link": cut(100, link), "OIDC": room.OIDC,
	})
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	room.send(w, r, status, body)
}

// login serves the login page.
func (room *Room) login(w http.ResponseWriter, r *http.Request) {
	room.LogIn(w, r, http.StatusOK, origin.Path(r.URL.Query().Get("next")), "")
}

const (
	flashCookie = "lanekeeper_flash"
	flashLasts  = time.Minute
	// maxFlash bounds a message, because a cookie holds four kilobytes.
	maxFlash = 600
)

// flash is the message of an action. It travels in a signed cookie, because another process may show the page.
type flash struct {
	Text  string `json:"t"`
	Bad   bool   `json:"b,omitempty"`
	Trace string `json:"tr,omitempty"`
}

// setFlash stores a message for the next page.
func (room *Room) setFlash(w http.ResponseWriter, r *http.Request, f flash) {
	f.Text = textcut.Text(f.Text, maxFlash)
	text, err := json.Marshal(f)
	if err != nil {
		room.Logger.ErrorContext(r.Context(), "flash message not stored", "error", err)
		return
	}
	body := strconv.FormatInt(time.Now().Add(flashLasts).Unix(), 36) + "." + base64.RawURLEncoding.EncodeToString(text)
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, flashCookie), Value: body + "." + room.sign(body), Path: "/",
		MaxAge:   int(flashLasts.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: origin.ViaTLS(r),
	})
}

// takeFlash returns and clears the stored message; nil for none.
func (room *Room) takeFlash(w http.ResponseWriter, r *http.Request) *flash {
	c, err := r.Cookie(origin.CookieName(r, flashCookie))
	if err != nil || r.Method != http.MethodGet {
		return nil
	}
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, flashCookie), Path: "/", MaxAge: -1, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: origin.ViaTLS(r),
	})
	return room.readFlash(c.Value)
}

// readFlash returns nil for an unsigned or expired message.
func (room *Room) readFlash(value string) *flash {
	at := strings.LastIndexByte(value, '.')
	if at < 0 || !hmac.Equal([]byte(value[at+1:]), []byte(room.sign(value[:at]))) {
		return nil
	}
	until, encoded, _ := strings.Cut(value[:at], ".")
	seconds, err := strconv.ParseInt(until, 36, 64)
	if err != nil || time.Now().Unix() > seconds {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(encoded)
	var f flash
	if err != nil || json.Unmarshal(text, &f) != nil {
		return nil
	}
	return &f
}

// sign returns the signature of a text.
func (room *Room) sign(text string) string {
	mac := hmac.New(sha256.New, room.Key)
	mac.Write([]byte("flash " + text))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
