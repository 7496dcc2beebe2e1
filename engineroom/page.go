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
	path     string // in the form of http.ServeMux; "/" is the overview
	name     string // of its templates: <name> arranges the parts, <name>/<part> is a part
	navLabel string // label in the navigation; empty for a subpage
	title    string // used when open returns no title
	// open loads the page's subject and returns its title; nil for a page without a subject. An error becomes the response
	// (not found, invalid filter).
	open  func(ctx context.Context, req *pageRequest) (title string, err error)
	parts []part
	// follows marks a page that reads from the primary, to follow a running turn.
	fromPrimary bool
	// parallel marks a page whose parts do not change the request. The server reads such parts two at a time.
	parallel bool
}

// part is a part of a page.
type part struct {
	name     string        // also the id of its element
	interval time.Duration // least refresh interval while a viewer is present; 0 for never
	// refreshOnActivity limits refreshes to one after activity, and one every half minute.
	refreshOnActivity bool
	triggers          changes // changes that refresh it at once; 0: any change, if interval is short
	sharedTemplate    bool    // shared by all pages, with a template of its own name
	load              func(ctx context.Context, req *pageRequest) (any, error)
}

// pageRequest is a request for a page, also for its stream.
type pageRequest struct {
	path           func(name string) string // value of a path wildcard
	Query          url.Values               // of the URL
	URL            string                   // canonical path and query
	Subject        any                      // the subject that open found
	fromPrimary    bool                     // read from the primary, after a write
	streaming      bool                     // of a stream
	cache          *pageCache               // shared by the parts of a page
	zone           *time.Location           // of the reader
	mayReadThreads bool                     // the viewer may read threads and their quotes
	missingScopes  string                   // scopes of linked pages that the viewer lacks, each after a space
}

// pageData is the data of a page's template.
type pageData struct {
	*pageRequest
	Agent string
	Title string
	Waits pendingCounts
	Page  page
	Nav   []page
	Flash *flash // message of the last action; shown once
	// Live is the URL of the stream, empty for none; Seen names the state of the parts.
	Live, Seen string
	Viewer     *principals.Caller // the viewer; nil for parts that all viewers share
	Replicated bool               // the page may come from a replica
	// Content is the page's executed template.
	Content     template.HTML
	parts       map[string][]byte
	placeholder string // stands before the name of a part in its place
	zoneCookie  string
}

// shortcutKeys has the key that opens a page after the key g.
var shortcutKeys = map[string]string{
	"/": "o", "/activity": "a", "/traces": "t", "/executions": "e", "/flows": "f", "/threads": "h", "/approvals": "p",
	"/skills": "s", "/agents": "n",
	"/automations": "u", "/objectives": "b", "/memory": "m", "/deliveries": "d", "/spend": "c",
	"/lanes": "l", "/operate": "r", "/charts": "v", "/evals": "x",
}

// NavLabel is the page's label in the navigation; empty for none.
func (p page) NavLabel() string { return p.navLabel }

// Path is the page's path.
func (p page) Path() string { return p.path }

// Key is the letter that opens the page; empty for none.
func (p page) Key() string { return shortcutKeys[p.path] }

// phoneIcons has the icons of the pages in the bottom navigation of a phone.
var phoneIcons = map[string]string{"/": "⌂", "/approvals": "✓", "/traces": "≋", "/executions": "▷", "/operate": "›_"}

// PhoneIcon is the page's icon in the bottom navigation of a phone; empty for a page in the menu More.
func (p page) PhoneIcon() string { return phoneIcons[p.path] }

// liveParts lists the parts that change while viewed.
func (p page) liveParts() []part {
	var all []part
	for _, one := range p.parts {
		if one.interval > 0 {
			all = append(all, one)
		}
	}
	return all
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

// withParts puts the rendered parts into their places. A part may have a megabyte, so no template copies it.
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
		if to := ""; err != nil {
			if to = room.resolvePartialID(r.Context(), p, d.pageRequest, err); to == "" {
				room.Refuse(w, r, err)
				return
			}
			setSecurityHeaders(w.Header())
			http.Redirect(w, r, to, http.StatusSeeOther)
			return
		}
		source.SetHeader(w.Header())
		room.writePage(w, r, http.StatusOK, body)
	})
}

// partParam is the parameter that requests one part of a page. A script puts the part into the page.
const partParam = "part"

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

// newPageRequest parses a request below prefix.
func newPageRequest(r *http.Request, p page, prefix string) *pageRequest {
	wildcards := map[string]string{}
	for _, m := range wildcard.FindAllStringSubmatch(p.path, -1) {
		wildcards[m[1]] = r.PathValue(m[1])
	}
	req := &pageRequest{
		path: func(name string) string {
			return wildcards[name]
		}, Query: r.URL.Query(), fromPrimary: replica.Fresh(r), zone: zoneOf(r),
		cache: &pageCache{}, streaming: prefix != "",
	}
	req.Query.Del(partParam)
	if prefix != "" {
		req.Query.Del("seen")
		req.fromPrimary = replica.JustWrote(r)
	}
	principal := principals.From(r.Context())
	for _, scope := range linkedScopes {
		if principal != nil && !principal.May(scope) {
			req.missingScopes += " " + string(scope)
		}
	}
	req.mayReadThreads = !strings.Contains(req.missingScopes, string(principals.ThreadsRead))
	req.resolveTimes()
	address := url.URL{
		Path: strings.TrimPrefix(r.URL.Path, prefix), RawPath: strings.TrimPrefix(r.URL.RawPath, prefix),
		RawQuery: req.Query.Encode(),
	}
	req.URL = address.RequestURI()
	return req
}

// linkedScopes are the scopes of pages that other pages link to. Only pages of principals link to pages of principals.
var linkedScopes = []principals.Scope{
	principals.RunsRead, principals.ThreadsRead, principals.Operate, principals.ApprovalsRead,
}

// unlink removes the addresses that the viewer may not open, so their links become text. Templates escape > in
// attributes.
func (req *pageRequest) unlink(body []byte) []byte {
	if req.missingScopes == "" {
		return body
	}
	result := make([]byte, 0, len(body))
	for {
		text, rest, found := bytes.Cut(body, []byte("<a "))
		if result = append(result, text...); !found {
			return result
		}
		tag, rest, _ := bytes.Cut(rest, []byte(">"))
		before, value, ok := bytes.Cut(tag, []byte(`href="`))
		address, after, _ := bytes.Cut(value, []byte(`"`))
		if ok && !req.mayOpen(html.UnescapeString(string(address))) {
			tag = slices.Concat(before, after)
		}
		result = append(append(append(result, "<a "...), tag...), '>')
		body = rest
	}
}

// mayOpen reports whether the viewer may open the page or route of an address.
func (req *pageRequest) mayOpen(address string) bool {
	at, err := url.Parse(address)
	if err != nil || at.Query().Get("tab") == "prompt" && !req.mayReadThreads {
		return false
	}
	required := page{path: strings.TrimPrefix(at.Path, "/v1")}.scope()
	return at.Path == "" || !strings.Contains(req.missingScopes, string(required))
}

// wildcard matches the names in a path.
var wildcard = regexp.MustCompile(`\{(\w+)(?:\.\.\.)?\}`)

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
	if d.Waits, err = room.countPending(ctx); err != nil { // the part shows the error
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

// loadSubject loads the page's subject.
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

// digest returns a digest of rendered HTML.
func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:9])
}

// bufferPool holds buffers for reuse, because a large buffer costs more to grow than to fill.
var bufferPool = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// maxPooledBuffer bounds a buffer that execute keeps for reuse.
const maxPooledBuffer = 4 << 20

// execute runs a template and makes control characters visible.
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

// customPlan makes the server plan a query for its arguments. An unset filter then costs nothing, and a set filter uses
// its index. A generic plan could do neither.
const customPlan = pgx.QueryExecModeCacheDescribe

// uuidPattern matches ids of rows.
var uuidPattern = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// oneOf returns the value of an enumerated filter. The default is the first known value.
func (req *pageRequest) oneOf(name string, known ...string) (string, error) {
	value := req.Query.Get(name)
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
func (req *pageRequest) uuidFilter(name string) (string, error) {
	value := req.Query.Get(name)
	if value != "" && !uuidPattern.MatchString(value) {
		return "", problem.BadParameter("%s is %.60q, which is no place in this list; begin at its top", name, value)
	}
	return value, nil
}

// withParam returns the page's URL with one parameter changed, or removed if the value is empty.
func (req *pageRequest) withParam(name, value string) string {
	path, _, _ := strings.Cut(req.URL, "?")
	query := url.Values{}
	for key, values := range req.Query {
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

// notFound returns the error for an unknown id.
func notFound(format string, args ...any) error {
	return problem.New(http.StatusNotFound, format, args...)
}

// openByID opens a page by the id in its path. The query returns the name in the title.
func (room *Room) openByID(kind, title, query string) func(ctx context.Context, req *pageRequest) (string, error) {
	return func(ctx context.Context, req *pageRequest) (string, error) {
		id := strings.ToLower(req.path("id"))
		if !uuidPattern.MatchString(id) {
			return "", notFound("there is no %s %.60q", kind, id)
		}
		var name string
		err := room.Read.QueryRow(ctx, query, postgres.Strict{"id": id}).Scan(&name)
		if errors.Is(err, pgx.ErrNoRows) {
			return "", notFound("there is no %s %s", kind, id)
		}
		req.Subject = id
		return title + cut(80, name), err
	}
}

// firstN returns the first n items, and reports whether there are more.
func firstN[T any](list []T, n int) ([]T, bool) { return list[:min(len(list), n)], len(list) > n }

// pager holds the links from a page of a list to the next page and to the first page. Each is empty for none.
type pager struct{ Older, Newest string }

// paginate returns the first n items and the links. The URL names the last item of a page, by cursor, in the parameter
// before.
func paginate[T any](req *pageRequest, list []T, n int, cursor func(T) string) ([]T, pager) {
	var links pager
	if req.Query.Get("before") != "" {
		links.Newest = req.withParam("before", "")
	}
	list, more := firstN(list, n)
	if more {
		links.Older = req.withParam("before", cursor(list[n-1]))
	}
	return list, links
}

// contentSecurityPolicy permits only files and connections of this server.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; " +
	"connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// setSecurityHeaders sets the security headers. Only this server receives the referrer, which the redirect after an
// action needs.
func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", contentSecurityPolicy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Origin-Agent-Cluster", "?1")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
}

// compress compresses pages and files. A page holds an admin's data beside input of the URL, so its size could reveal
// that data (BREACH). That attack needs requests of another site with the login's cookie, which is SameSite=Strict. No
// page holds a lasting secret, such as a token or a key.
var compress = newCompressor()

func newCompressor() func(http.Handler) http.Handler {
	wrap, err := gzhttp.NewWrapper(gzhttp.MinSize(1000), gzhttp.ContentTypes([]string{
		"text/html", "text/css", "text/javascript", "image/svg+xml",
	}))
	if err != nil {
		panic(err) // the arguments are constants
	}
	return func(h http.Handler) http.Handler { return wrap(h) }
}

// writePage writes a page.
func (room *Room) writePage(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	h := w.Header()
	setSecurityHeaders(h)
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		room.Logger.DebugContext(r.Context(), "page not sent", "error", err)
	}
}

// Refuse writes an error page.
func (room *Room) Refuse(w http.ResponseWriter, r *http.Request, err error) {
	p, unexpected := problem.Of(err)
	if unexpected {
		room.Logger.ErrorContext(r.Context(), "page not rendered", "path", problem.Path(r), "error", err)
	}
	if p.Status == http.StatusServiceUnavailable && w.Header().Get("Retry-After") == "" {
		w.Header().Set("Retry-After", "2")
	}
	body, err := room.execute("refusal", map[string]any{
		"Agent": room.Agent, "Problem": p, "Find": p.Status == http.StatusNotFound,
		"Text": lastSegment(r.URL.Path),
	})
	if err != nil {
		http.Error(w, p.Detail, p.Status)
		return
	}
	room.writePage(w, r, p.Status, body)
}

// lastSegment returns the last segment of a path, as the text of a search. It is empty if the segment is no valid text.
func lastSegment(path string) string {
	text := path[strings.LastIndexByte(path, '/')+1:]
	if len(text) > maxFilterBytes || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
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
	room.writePage(w, r, status, body)
}

// login serves the login page.
func (room *Room) login(w http.ResponseWriter, r *http.Request) {
	room.LogIn(w, r, http.StatusOK, origin.Path(r.URL.Query().Get("next")), "")
}

const (
	flashCookie = "lanekeeper_flash"
	flashTTL    = time.Minute
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
	body := strconv.FormatInt(time.Now().Add(flashTTL).Unix(), 36) + "." + base64.RawURLEncoding.EncodeToString(text)
	http.SetCookie(w, &http.Cookie{
		Name: origin.CookieName(r, flashCookie), Value: body + "." + room.sign(body), Path: "/",
		MaxAge:   int(flashTTL.Seconds()),
		HttpOnly: true, SameSite: http.SameSiteStrictMode, Secure: origin.ViaTLS(r),
	})
}

// popFlash returns and clears the stored message; nil for none.
func (room *Room) popFlash(w http.ResponseWriter, r *http.Request) *flash {
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

// readFlash reads a message from a cookie. It returns nil for an unsigned or expired message.
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

// sign returns the signature of a flash message.
func (room *Room) sign(text string) string {
	mac := hmac.New(sha256.New, room.Key)
	mac.Write([]byte("flash " + text))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
