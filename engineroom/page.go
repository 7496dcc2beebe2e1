package engineroom

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// page is a page of the Engine Room.
type page struct {
	path     string // in the form of http.ServeMux; "/" is the overview
	name     string // of its templates: <name> arranges the parts, <name>/<part> is a part
	navLabel string // label in the navigation; empty for a subpage
	title    string // used when open returns no title
	// open loads the page's subject and returns its title; nil for a page without a subject. An error becomes the
	// response (not found, invalid filter).
	open  func(ctx context.Context, req *pageRequest) (title string, err error)
	parts []part
	// fromPrimary marks a page that reads from the primary, to follow a running turn.
	fromPrimary bool
	// perViewer marks a page whose parts depend on the viewer, so viewers of different names share no topic.
	perViewer bool
	// parallel marks a page whose parts do not change the request. The server reads such parts two at a time.
	parallel bool
}

// part is a part of a page.
type part struct {
	name string // also the id of its element
	// interval is the refresh interval while the page has a viewer; 0 for never. Some changes refresh the part earlier:
	// see partState.dueAt.
	interval time.Duration
	// refreshOnActivity limits refreshes to one after activity, and one every half minute.
	refreshOnActivity bool
	triggers          changes // changes that refresh it at once; 0: any change, if interval <= maxEagerInterval
	sharedTemplate    bool    // its template is named like the part, not <page>/<part>
	load              func(ctx context.Context, req *pageRequest) (any, error)
}

// shortcutKeys maps a page's path to the key that opens the page after the key g.
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

// phoneIcons maps a page's path to its icon in the bottom navigation of a phone.
var phoneIcons = map[string]string{"/": "⌂", "/approvals": "✓", "/traces": "≋", "/executions": "▷", "/operate": "›_"}

// PhoneIcon is the page's icon in the bottom navigation of a phone; empty for a page in the menu More.
func (p page) PhoneIcon() string { return phoneIcons[p.path] }

// liveParts lists the parts that change while viewed.
func (p page) liveParts() []part {
	var live []part
	for _, one := range p.parts {
		if one.interval > 0 {
			live = append(live, one)
		}
	}
	return live
}

// pattern returns the path for http.ServeMux. The overview matches "/" alone.
func (p page) pattern() string {
	if p.path == "/" {
		return "/{$}"
	}
	return p.path
}

// openByID returns a page's open function, which finds a row by the uuid in the path. The subject is the id. query
// selects the text after title.
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

// notFound returns the error for an unknown id.
func notFound(format string, args ...any) error {
	return problem.New(http.StatusNotFound, format, args...)
}
