// Package engineroom is the admin's view in a browser: what the agent is doing right now, whether it works,
// what it costs, and what needs a person.
//
// A page is a list of parts. A part is a query and a template: the first answer, every later update and the
// page without JavaScript are the same render, so they cannot tell different stories. While somebody looks at
// a page, its parts are read again, once for all who look at the same URL, and only what came out otherwise is
// sent, over one event stream per page. What is sent is the state of a part, not a change to it, so a
// connection that broke resumes by state: nothing is missing and nothing is there twice.
//
// It promises:
//
//   - It only reads. What an admin changes goes through the routes of package api, as every other client's
//     change does, with the same checks and the same audit.
//   - No part does work that grows with the tables: each query is bounded by an index and a limit, and where a
//     number has a bound it says so ("1,000+"). Sums over the activity log are those of activity.Counted.
//   - What outsiders and models wrote is shown as text: escaped, control characters and marks that turn the
//     direction of writing made visible, long values cut, with their length told.
//   - Nothing is loaded from another host, and the Content-Security-Policy allows no inline script or style.
//   - A part that cannot be read says so in its place; the others are shown.
//   - Pages only show, so they may be read from a replica (see internal/replica), and then say how far behind it is.
//     The page that talks with the agent follows a turn, and an admin who acted sees the result: both read from
//     the primary.
//   - Every page can be read with JavaScript off, and every lever pulled.
//
// Who may enter is decided before a handler of this package is called.
package engineroom

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"html/template"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// Options are what the Engine Room stands on.
type Options struct {
	Pool *pgxpool.Pool // required
	// Read is where pages are read; the pool when nil.
	Read *replica.Reader
	// API is the handler of the /v1 routes, through which levers are pulled; nil when there are none. A request
	// that reaches a handler of this package carries what API asks for.
	API func() http.Handler
	// Logger is told what went wrong behind a part; nil for none.
	Logger *slog.Logger
	// Agent is the agent's name, shown in every title.
	Agent string
	// Agents finds the agents that there are; nil is an installation without settings.
	Agents *agents.Directory
	// Limits are the budgets of a day, as configured.
	Limits budgets.Limits
	// Key signs what the room leaves with a browser until the next page; all processes of an agent need the same. One
	// of its own when nil.
	Key []byte
}

// Room serves the pages. Its methods are safe for concurrent use.
type Room struct {
	Options
	pages     []page
	templates *template.Template
	hub       *hub
}

// Route is a handler and where it is to be reached.
type Route struct {
	Method, Path string // as http.ServeMux has them
	Stream       bool   // has no end
	Public       bool   // needs no login
	Handler      http.Handler
}

// New makes the room. It does not touch the database.
func New(o Options) (*Room, error) {
	if o.Pool == nil {
		return nil, errors.New("make the Engine Room: a pool is required")
	}
	if o.Read == nil {
		o.Read = replica.Primary(o.Pool)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Agents == nil {
		o.Agents = &agents.Directory{Settings: agents.Settings{Name: o.Agent}}
	}
	if o.Key == nil {
		o.Key = []byte(rand.Text())
	}
	room := &Room{Options: o}
	room.hub = newHub(room)
	room.pages = room.all()
	parsed, err := parseTemplates()
	if err != nil {
		return nil, fmt.Errorf("make the Engine Room: %w", err)
	}
	room.templates = parsed
	return room, nil
}

// Routes are all handlers of the room. Who pulls a lever or watches a page is let in by the same check as who reads it.
func (room *Room) Routes() []Route {
	routes := []Route{
		{Method: http.MethodGet, Path: "/assets/{file}", Public: true, Handler: http.HandlerFunc(room.asset)},
		{Method: http.MethodGet, Path: "/login", Public: true, Handler: http.HandlerFunc(room.login)},
		{Method: http.MethodPost, Path: "/act/v1/operate", Stream: true, Handler: http.HandlerFunc(room.say)},
	}
	for _, p := range room.pages {
		routes = append(routes, Route{Method: http.MethodGet, Path: p.pattern(), Handler: room.serve(p)})
		if len(p.live()) > 0 {
			routes = append(routes, Route{Method: http.MethodGet, Path: "/live" + p.pattern(), Stream: true, Handler: room.live(p)})
		}
	}
	for _, l := range levers() {
		routes = append(routes, Route{Method: http.MethodPost, Path: "/act" + l.path, Handler: room.act(l)})
	}
	return routes
}

// all are the pages, in the order of the navigation.
func (room *Room) all() []page {
	return room.withReplica(room.withPause([]page{
		room.overviewPage(), room.activityPage(), room.auditPage(),
		room.tracesPage(), room.tracePage(),
		room.executionsPage(), room.executionPage(), room.threadsPage(), room.threadPage(),
		room.approvalsPage(), room.approvalPage(),
		room.agentsPage(), room.agentPage(),
		room.skillsPage(), room.skillPage(),
		room.automationsPage(), room.automationPage(),
		room.objectivesPage(), room.objectivePage(), room.memoryPage(), room.memoryEntryPage(),
		room.deliveriesPage(), room.deliveryPage(), room.outgoingPage(), room.messagePage(),
		room.spendPage(),
		room.lanesPage(), room.operatePage(),
	}))
}

// withReplica gives every page the part that says how far behind it is, where there is a replica. A page on which
// nothing else changes by itself is not watched for it.
func (room *Room) withReplica(pages []page) []page {
	if !room.Read.Configured() {
		return pages
	}
	for i := range pages {
		one := part{name: "replica", shared: true, load: sourceOf}
		if len(pages[i].live()) > 0 {
			one.every = 2 * time.Second
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// sourceOf is where the page is read from.
func sourceOf(ctx context.Context, _ *visit) (any, error) { return replica.From(ctx), nil }
