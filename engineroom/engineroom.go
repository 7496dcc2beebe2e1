// Package engineroom is the admin's web interface: current work, health, cost, and items that need a person.
//
// A page is a list of parts. A part is a query and a template. The first response and each live update use the same
// render. While a page is open, the server refreshes its parts once for all viewers of the URL with the same scopes. It
// sends changed parts over one event stream per page. An update has the whole part, or the rows of a large part that
// differ from the viewer's, so a reconnected stream needs no replay.
//
// Guarantees:
//
//   - The package does not write to the database. Changes go through the routes of package api, with the same checks
//     and audit as other clients.
//   - The cost of a part does not grow with the tables: an index and a limit bound each query, except the search for
//     words in memory, and the lists of agents and principals. A bounded number shows its bound ("1,000+"). Sums over
//     the activity log come from the counts of package activity.
//   - The templates escape foreign text. Direction marks and control characters other than newlines and tabs are
//     visible. A cut value shows its length.
//   - A page loads nothing from another host. The Content-Security-Policy allows no inline script or style.
//   - A part that fails shows its error in place; all other parts stay.
//   - Pages may read from a replica (see internal/replica), and then show its lag. The Operate page and the result of
//     an action read from the primary.
//   - Every page works without JavaScript, including its actions. Updates, keys, local times and notifications need it.
//
// The server checks access before it calls a handler of this package.
package engineroom

import (
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
	"github.com/lanekeeper/lanekeeper/principals"
)

// Options configure the Engine Room.
type Options struct {
	Pool *pgxpool.Pool // required
	// Read is the source of pages; Pool when nil.
	Read *replica.Reader
	// API handles the /v1 routes, which actions call; nil for none. A request to this package's handlers carries the
	// API's credentials.
	API func() http.Handler
	// Logger receives the errors of parts; nil for none.
	Logger *slog.Logger
	// Agent is the agent's name, shown in titles.
	Agent string
	// Agents finds the agents; nil stands for a directory with the name Agent and no other settings.
	Agents *agents.Directory
	// Limits are the configured budgets of a day.
	Limits budgets.Limits
	// PriceOf names the source of a model's price, such as "list price of 2026-07-24: $2 in, $8 out"; nil for none.
	PriceOf func(model string) string
	// Unforkable returns, by flow, the reason why its executions cannot be forked or retried; nil for no such flow.
	Unforkable func() map[string]string
	// OIDC adds the login at an OIDC issuer to the login page.
	OIDC bool
	// Key signs flash messages in the browser; a random key when nil. All processes of an agent need the same key.
	Key []byte
}

// Room serves the pages. It is safe for concurrent use.
type Room struct {
	Options
	pages           []page
	templates       *template.Template
	placeholder     string // see pageData.Part
	hub             *hub
	suggestionCache keyedCache[string, []suggestion] // by kind of filter
	pendingCache    cached[pendingCounts]
	// traceCosts has the most expensive traces of days.
	traceCosts keyedCache[time.Time, any]
}

// Route is a handler with its path.
type Route struct {
	Method, Path string           // in http.ServeMux syntax
	Stream       bool             // an endless response
	Public       bool             // needs no login
	Scope        principals.Scope // that the viewer needs; Authenticated for actions, whose route checks
	Handler      http.Handler
}

// New returns a Room. It does not use the database.
func New(o Options) (*Room, error) {
	if o.Pool == nil {
		return nil, errors.New("create the Engine Room: a pool is required")
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
	if o.Unforkable == nil {
		o.Unforkable = func() map[string]string { return nil }
	}
	if o.Key == nil {
		o.Key = []byte(rand.Text())
	}
	room := &Room{Options: o, placeholder: "part " + rand.Text() + " "}
	room.hub = newHub(room)
	room.pages = room.allPages()
	parsed, err := parseTemplates()
	if err != nil {
		return nil, fmt.Errorf("create the Engine Room: %w", err)
	}
	room.templates = parsed
	return room, nil
}

// Routes lists all handlers. One check guards reading, streaming and actions.
func (room *Room) Routes() []Route {
	routes := []Route{
		{Method: http.MethodGet, Path: "/assets/{file}", Public: true, Handler: http.HandlerFunc(room.asset)},
		{Method: http.MethodGet, Path: "/login", Public: true, Handler: http.HandlerFunc(room.login)},
		{
			Method: http.MethodPost, Path: "/act/v1/operate", Stream: true, Scope: principals.Operate,
			Handler: http.HandlerFunc(room.runTurn),
		},
	}
	routes = append(routes,
		Route{
			Method: http.MethodGet, Path: "/find/results", Scope: principals.ThreadsRead,
			Handler: http.HandlerFunc(room.findResults),
		},
		Route{
			Method: http.MethodGet, Path: "/evals/from/{id}/case.yaml", Scope: principals.ThreadsRead,
			Handler: http.HandlerFunc(room.downloadCase),
		})
	for _, p := range room.pages {
		routes = append(routes, Route{Method: http.MethodGet, Path: p.pattern(), Scope: p.scope(), Handler: room.serve(p)})
		if len(p.liveParts()) > 0 {
			routes = append(routes, Route{
				Method: http.MethodGet, Path: "/live" + p.pattern(), Stream: true, Scope: p.scope(),
				Handler: room.live(p),
			})
		}
	}
	for i := range routes {
		if !routes[i].Stream {
			routes[i].Handler = compress(routes[i].Handler)
		}
	}
	for _, a := range actions() {
		routes = append(routes, Route{
			Method: http.MethodPost, Path: "/act" + a.path, Scope: principals.Authenticated, Handler: room.performAction(a),
		})
	}
	return routes
}

// allPages lists the pages in the order of the navigation.
func (room *Room) allPages() []page {
	return room.withReplica(room.withPause(room.withPendingCounts([]page{
		room.overviewPage(), room.activityPage(), room.auditPage(),
		room.tracesPage(), room.tracePage(),
		room.executionsPage(), room.executionPage(), room.flowsPage(), room.flowPage(), room.threadsPage(), room.threadPage(),
		room.approvalsPage(), room.approvalPage(),
		room.agentsPage(), room.agentPage(),
		room.skillsPage(), room.skillPage(),
		room.evalsPage(), room.suitePage(), room.evalRunPage(), room.evalCasePage(), room.caseFromPage(),
		room.automationsPage(), room.automationPage(),
		room.objectivesPage(), room.objectivePage(), room.memoryPage(), room.memoryEntryPage(),
		room.channelsPage(), room.deliveriesPage(), room.deliveryPage(), room.outgoingPage(), room.messagePage(),
		room.spendPage(), room.spendDayPage(), room.chartsPage(),
		room.lanesPage(), room.operatePage(), room.findPage(), room.principalsPage(), room.principalPage(),
	})))
}
