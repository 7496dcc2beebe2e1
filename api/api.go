// Package api serves the agent over HTTP: health, history, admin actions, and the endpoints of the surfaces.
//
// All routes form one table: the routes of this package (routes.go) and the endpoints of the surfaces (see Endpoint).
// A row names method, path, access, query parameters, body and response. Routing, validation, limits and the OpenAPI
// 3.1 document at /openapi.json follow from it. So every route except pages is documented, and a route of this
// package with credentials accepts only documented input. Its handler parses the request, calls the package that owns
// the subject, and returns a value.
//
// Guarantees:
//
//   - Access is a column of the table. Admin routes require a principal with the route's scope (scopes.go, package
//     principals): an API token or AGENT_ADMIN_TOKEN. Visitor routes require a chat key. The client sends both as
//     "Authorization: Bearer". A chat key opens no admin route, and an admin credential no visitor route. Under /v1
//     even a 404 requires credentials. A missing scope is a 403 that names the scope. Package internal/credentials
//     throttles (429) and logs wrong credentials, including those of the login.
//   - A browser login (login.go) is a session of a principal, in a cookie. Scripts cannot read the cookie, and browsers
//     do not send it from other sites. The session ends after twelve hours, at logout, at its revocation, when its
//     principal is disabled, or when the admin token of the login changes.
//   - The server rejects cross-origin writes of browsers, except at webhooks. With a login cookie it also rejects
//     cross-origin reads, except links to pages.
//   - Pages follow the same rules, but they are undocumented, and their errors are pages.
//   - Admission limits each client before its request uses resources (admission.go, internal/admission). It limits
//     concurrent requests by class, chat key, webhook endpoint and address, bytes of buffered bodies, and connections.
//     A request over a limit gets 429 with Retry-After: a webhook after waits of up to two seconds before and after
//     its body, others at once. A body over its route's limit gets 413. Public requests, login, visitors and admins
//     have separate limits.
//   - The server reads a body completely, within its size and time limits, before the route runs. It does not read the
//     body of a request that Endpoint.Expect rejects. A deadline ends every ordinary request. A stream lasts as long as
//     its client reads, and ends at shutdown with the cause executions.ErrDraining.
//   - An error is application/problem+json (RFC 9457, see internal/problem) or, for OpenAI clients, OpenAI's error
//     object. Endpoints that other protocols define, such as MCP and the hooks of channels, have those errors. Internal
//     causes go to the log.
//   - The routes of this package reject unknown parameters, body fields and values by name, because a misspelt filter
//     would list everything. Public routes ignore unknown parameters.
//   - A listing is {"items": […], "next_cursor": "…" or null}; most are newest first. Most cursors name the last row of
//     their page by a key that does not change, so new rows do not shift pages: a listing has each row that existed at
//     the start, and was not deleted meanwhile, once. A report is computed for each page, and its cursor is an offset.
//     The key of conversations is the last message, so the later pages miss a conversation that gets a message during
//     the listing.
//   - A POST with an Idempotency-Key runs once, in the sense of idempotency.go.
//   - Another client's transaction may lock a row, such as an event id, an idempotency key or a thread's lane. The
//     server waits for a second, mostly without a connection. Then the response is 503 with Retry-After and names that
//     transaction.
//   - An admin's change commits together with its activity under an op_ trace. The record of a broken lane is under the
//     holder's trace.
//   - Log queries may read from a replica (see internal/replica); X-Replica-Lag-Seconds marks them. The server reads
//     other rows from the primary.
//   - Times are RFC 3339 in UTC, ids are strings, names are snake_case.
//
// /healthz reports that the process is alive, without any check. /readyz reports whether the process accepts work: it
// checks database, schema, writes, the worker's lease and the shutdown. A model outage does not make a process unready,
// because other work continues. Concurrent probes share one result.
package api

import (
	"cmp"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// Options configure New.
type Options struct {
	Pool   *pgxpool.Pool      // required
	Read   *replica.Reader    // for queries of the log; Pool when nil
	Ready  *pgxpool.Pool      // for /readyz; Pool when nil
	Engine *executions.Engine // required: cancels executions and reports whether this process is live
	// Agents resolves the owner of a memory; nil means no settings.
	Agents *agents.Directory
	// Limits are the configured budgets of a day, for the verdict.
	Limits budgets.Limits
	// Evals stores runs of suites; nil starts none.
	Evals EvalStarter
	// Memory searches memories; nil matches words only.
	Memory *memory.Index
	// DocumentBytes bounds an uploaded document; documents.DefaultMaxBytes when 0.
	DocumentBytes int64
	// AdminToken protects Admin routes; empty rejects every request.
	AdminToken string
	// ChatKeys protect Visitor routes, by the name that VisitorFrom returns; empty rejects every request. A key must
	// not be empty, the admin token, or a duplicate.
	ChatKeys map[string]string
	// OIDC offers the login at an OIDC issuer; nil for none.
	OIDC *OIDC
	// Proxies are trusted to forward client addresses (see internal/clientip).
	Proxies clientip.Trusted
	// Endpoints are the routes of the surfaces.
	Endpoints []Endpoint
	// Listener notifies open streams of logouts at other processes at once; may be nil.
	Listener *postgres.Listener
	// Pages render the login and errors for browsers. Without Pages there is no login, and every client gets problems.
	Pages Pages
	// The shutdown closes these channels in this order; nil means never. After Draining closes, the process is unready and
	// closes connections after their response. Stopping ends streams that only watch. ForceStop ends responses in progress
	// (Endpoint.Finite).
	Draining, Stopping, ForceStop <-chan struct{}
	Logger                        *slog.Logger // nil for none
}

// New returns the handler; serve it with Server. It does not use the database. An invalid endpoint or key is an
// error.
func New(o Options) (http.Handler, error) {
	if o.Pool == nil || o.Engine == nil {
		return nil, errors.New("make API: a pool and an engine are required")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	gate, err := newAuthenticator(o)
	if err != nil {
		return nil, err
	}
	s := &server{
		pool: o.Pool, read: cmp.Or(o.Read, replica.Primary(o.Pool)), engine: o.Engine,
		agents: cmp.Or(o.Agents, &agents.Directory{}), memory: o.Memory, auth: gate, draining: o.Draining,
		stopping: o.Stopping, forceStop: o.ForceStop, timeouts: defaultTimeouts(), log: o.Logger,
		ready: cmp.Or(o.Ready, o.Pool), classes: newClasses(),
		pages: o.Pages, proxies: o.Proxies,
		pending:       &pendingResults{db: o.Pool, stop: o.ForceStop, writing: make(chan struct{}, 1)},
		documentBytes: cmp.Or(o.DocumentBytes, documents.DefaultMaxBytes),
		evals:         o.Evals,
		monitor:       monitor.Monitor{Agents: cmp.Or(o.Agents, &agents.Directory{}), Limits: o.Limits},
		locks:         postgres.KeyedTx{Slots: make(chan struct{}, max(1, o.Pool.Config().MaxConns/2))},
	}
	if o.OIDC != nil {
		s.oidc = &oidcLogin{OIDC: *o.OIDC}
	}
	table, err := s.routes(o.Endpoints)
	if err != nil {
		return nil, err
	}
	return s.newMux(table)
}

// server holds the dependencies of all handlers.
type server struct {
	monitor   monitor.Monitor
	pool      *pgxpool.Pool
	read      *replica.Reader
	engine    *executions.Engine
	agents    *agents.Directory
	memory    *memory.Index
	evals     EvalStarter // nil for none
	auth      *authenticator
	oidc      *oidcLogin // nil for none
	draining  <-chan struct{}
	stopping  <-chan struct{}
	forceStop <-chan struct{}
	timeouts  timeouts
	pages     Pages // nil for none
	proxies   clientip.Trusted
	classes   requestClasses
	ready     *pgxpool.Pool
	prober    prober
	log       *slog.Logger
	notReady  logging.Failures

	pending *pendingResults
	locks   postgres.KeyedTx // of pool

	documentBytes int64
}

// Server returns the http.Server for the handler of New. It sets header timeouts only. The handler limits each route,
// because a ReadTimeout or WriteTimeout would cut streams.
func Server(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: admission.Handler(h), ConnContext: admission.ConnContext, ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 32 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// Listen bounds the connections of [Server].
func Listen(l net.Listener) net.Listener { return admission.Listen(l, maxConnections) }

// maxConnections bounds the connections of a process. It exceeds the request limits of all classes together, so with
// that many connections some are idle, and the server closes one for a new one.
const maxConnections = 8192
