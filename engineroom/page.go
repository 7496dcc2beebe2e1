package engineroom

import (
	"bytes"
	"context"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// page is what one address shows.
type page struct {
	path  string // as http.ServeMux has it; "/" is the overview
	name  string // of its templates: <name> arranges the parts, <name>/<part> is a part
	nav   string // its word in the navigation; empty for a page that is reached through another
	title string // when open gives none
	// open finds what the page is about and gives it a title; an error is the page's answer (not found, a filter
	// that does not exist). Nil when there is nothing to find.
	open  func(ctx context.Context, v *visit) (title string, err error)
	parts []part
}

// part is a piece of a page.
type part struct {
	name  string        // also the id of its element
	every time.Duration // how often at most it is read again while somebody looks; 0 for never
	// calm parts are read again when the activity log moved, and else every half minute.
	calm bool
	load func(ctx context.Context, v *visit) (any, error)
}

// visit is one request for a page, and who looks at its address later.
type visit struct {
	path  func(name string) string // value of a wildcard of the page's path
	Query url.Values               // of the URL
	URL   string                   // path and query
	About any                      // what open found
}

// show is what the template of a page is executed with.
type show struct {
	*visit
	Agent string
	Title string
	Page  page
	Nav   []page
	// Arrangement is the page's own template, executed.
	Arrangement template.HTML
	parts       map[string]template.HTML
}

// NavWord is the page's word in the navigation; empty for none.
func (p page) NavWord() string { return p.nav }

// Path is where the page is.
func (p page) Path() string { return p.path }

// Part is a rendered part.
func (s show) Part(name string) (template.HTML, error) {
	text, has := s.parts[name]
	if !has {
		return "", fmt.Errorf("page %s has no part %q", s.Page.name, name)
	}
	return text, nil
}

// pattern is the path as http.ServeMux has it: the overview is "/" alone, not everything below.
func (p page) pattern() string {
	if p.path == "/" {
		return "/{$}"
	}
	return p.path
}

// serve answers with a page.
func (room *Room) serve(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v := &visit{path: r.PathValue, Query: r.URL.Query(), URL: r.URL.RequestURI()}
		body, err := room.render(r.Context(), p, v)
		if err != nil {
			room.Refuse(w, r, err)
			return
		}
		room.send(w, r, http.StatusOK, body)
	})
}

// render is a whole page.
func (room *Room) render(ctx context.Context, p page, v *visit) ([]byte, error) {
	s := show{visit: v, Agent: room.Agent, Title: p.title, Page: p, Nav: room.pages, parts: map[string]template.HTML{}}
	if p.open != nil {
		title, err := p.open(ctx, v)
		if err != nil {
			return nil, err
		}
		s.Title = title
	}
	for _, one := range p.parts {
		text, err := room.renderPart(ctx, p, one, v)
		if err != nil {
			return nil, err
		}
		s.parts[one.name] = template.HTML(text) //nolint:gosec // made by a template of this package
	}
	arranged, err := room.execute(p.name, s)
	if err != nil {
		return nil, err
	}
	s.Arrangement = template.HTML(arranged) //nolint:gosec // made by a template of this package
	return room.execute("layout", s)
}

// renderPart is one part; what it cannot read it says in its place.
func (room *Room) renderPart(ctx context.Context, p page, one part, v *visit) ([]byte, error) {
	data, err := one.load(ctx, v)
	if err != nil {
		told, news := problem.Of(err)
		if news {
			room.Logger.ErrorContext(ctx, "part of a page not read", "page", p.name, "part", one.name, "error", err)
		}
		return room.execute("trouble", map[string]any{"Name": one.name, "Detail": told.Detail})
	}
	return room.execute(p.name+"/"+one.name, data)
}

// execute runs a template and makes visible what would change how the text around it reads.
func (room *Room) execute(name string, data any) ([]byte, error) {
	var b bytes.Buffer
	if err := room.templates.ExecuteTemplate(&b, name, data); err != nil {
		return nil, fmt.Errorf("render %s: %w", name, err)
	}
	return plain(b.Bytes()), nil
}
