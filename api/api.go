// Package api is the agent over HTTP: whether it is well, what it did, the levers an admin has, and the
// door through which the other surfaces are reached.
//
// All routes are one table: those of this package (routes.go) and the endpoints that the surfaces bring
// (see Endpoint). A row names method, path, who may call it, query parameters, body and answer, and
// everything else follows from it: the routing, what is refused, limits, and the OpenAPI 3.1 document at
// /openapi.json. So none but pages can be reached that is not documented, and a route of this package accepts nothing
// that it does not document. Its handler reads the request, calls one function of the package that owns
// the subject, and returns a value.
//
// It promises:
//
//   - Who may call a route is a column of the table. Admin asks for the admin token, Visitor for a chat
//     key, both as "Authorization: Bearer"; neither opens the other's routes. Under /v1 that holds also to
//     learn that a route does not exist. Without a configured token or key nobody enters. Wrong ones are
//     slowed down (429) and logged by package internal/credentials, also those of the login.
//   - A browser that has logged in with the admin token (see auth.go) has a cookie in its place, which scripts
//     cannot read, other sites' pages cannot make it send, and which ends after twelve hours, with the logout
//     or with the token.
//   - What a browser sends from a page of another origin is refused, except at webhooks; with the cookie of a
//     login that holds for reading too.
//   - Pages are for people, and for the rest of this promise they are routes like the others: they are not in the
//     document, and what is refused is refused with a page.
//   - Admission bounds each client before it costs (admission.go, internal/admission): requests in work by class,
//     chat key, webhook endpoint and address, bytes of bodies that have arrived, connections. What is over a bound is
//     refused at once with 429 and Retry-After. A body that is larger than its route takes is 413 for good, without
//     Retry-After. Strangers, the login, visitors and admins have bounds of their own.
//   - A body is read whole, within its limit and within time, before its route sees it, and not at all where the request is
//     refused without it (Endpoint.Expect). An ordinary request
//     and its answer end in time, whatever the client does; a stream lasts as long as its client reads, and
//     ends at shutdown with the cause executions.ErrDraining.
//   - Every error is application/problem+json (RFC 9457, see internal/problem) or, where stock OpenAI
//     clients call, OpenAI's error object. A cause that names the inside goes to the log.
//   - Unknown parameters, body fields and values are refused by name, never ignored: a misspelt filter
//     that is ignored would list everything.
//   - A listing is {"items": […], "next_cursor": "…" or null}, newest first. A cursor names the last row of
//     its page by a key that only grows, so rows that come in between shift nothing: what was there when
//     the listing began is listed exactly once.
//   - A POST with an Idempotency-Key is done once; see idempotency.go.
//   - What an open transaction of a client holds, such as an event id, an idempotency key or the lane of a thread, is waited for during a
//     second, in which the request has no connection most of the time. Then the answer is 503 with Retry-After and names that transaction.
//   - What an admin changes is an activity under an op_ trace, committed together with the change. A lane
//     that is broken is recorded under the trace of who held it.
//   - Questions about the log may be answered from a read replica (see internal/replica); X-Replica-Lag-Seconds says
//     so. Routes of what a client may write, and state that it polls, answer from the primary.
//   - Times are RFC 3339 in UTC, ids strings, names snake_case.
//
// /healthz says that the process is alive and asks nobody. /readyz says whether it would do work. It looks at the
// database, the schema, whether writes are taken, the worker's lease and the shutdown; a model that is down does not
// make a process unready, because its other work goes on. Whoever asks at the same time gets one answer.
package api

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/memory"
)

// Options are what the API stands on.
type Options struct {
	Pool   *pgxpool.Pool      // required
	Read   *replica.Reader    // for questions about the log; Pool when nil
	Ready  *pgxpool.Pool      // for /readyz; Pool when nil
	Engine *executions.Engine // required: cancels executions and says whether this process works
	// Agents finds whose memory a request is about; nil is an installation without settings.
	Agents *agents.Directory
	// Memory searches what agents remember; nil searches by words alone.
	Memory *memory.Index
	// DocumentBytes bounds an uploaded document; documents.DefaultMaxBytes when 0.
	DocumentBytes int64
	// AdminToken is what Admin routes ask for; empty refuses every request.
	AdminToken string
	// ChatKeys are what Visitor routes ask for, by the name that VisitorFrom tells; empty refuses every
	// request. No key may be empty, the admin token, or another one's.
	ChatKeys map[string]string
	// Proxies are believed when they say where a request comes from (see internal/clientip).
	Proxies clientip.Trusted
	// Endpoints are the routes of the surfaces.
	Endpoints []Endpoint
	// Listener shortens the time in which the streams of a login end that another process ended; may be nil.
	Listener *postgres.Listener
	// Pages answer people: they show the login, and what is refused. Without them nobody logs in, and all are answered
	// as programs are.
	Pages Pages
	// What follows is closed in this order when the process shuts down; nil is never. From Draining on it says that it
	// is not ready, and closes connections behind its answers; at Stopping what is only watched ends; at Cutting also
	// answers that are still being made (Endpoint.Ends).
	Draining, Stopping, Cutting <-chan struct{}
	Logger                      *slog.Logger // nil for none
}

// New returns the handler; serve it with Server. It does not touch the database, and it is safe for
// concurrent use. An endpoint or a key that cannot be is an error.
func New(o Options) (http.Handler, error) {
	if o.Pool == nil || o.Engine == nil {
		return nil, errors.New("make API: a pool and an engine are required")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	gate, err := newGate(o)
	if err != nil {
		return nil, err
	}
	s := &server{
		pool: o.Pool, read: cmp.Or(o.Read, replica.Primary(o.Pool)), engine: o.Engine, agents: cmp.Or(o.Agents, &agents.Directory{}), memory: o.Memory, gate: gate, draining: o.Draining, stopping: o.Stopping, cutting: o.Cutting, limits: usual(), log: o.Logger,
		ready: cmp.Or(o.Ready, o.Pool), budgets: newBudgets(), watch: &watch{db: o.Pool, log: o.Logger}, pages: o.Pages, proxies: o.Proxies,
		unsettled: newUnsettled(o.Pool, o.Cutting), documentBytes: cmp.Or(o.DocumentBytes, documents.DefaultMaxBytes),
		locks: postgres.KeyedTx{Slots: make(chan struct{}, max(1, o.Pool.Config().MaxConns/2))},
	}
	table, err := s.table(o.Endpoints)
	if err != nil {
		return nil, err
	}
	return s.handler(table)
}

// server is what the handlers share.
type server struct {
	pool     *pgxpool.Pool
	read     *replica.Reader
	engine   *executions.Engine
	agents   *agents.Directory
	memory   *memory.Index
	gate     *gate
	draining <-chan struct{}
	stopping <-chan struct{}
	cutting  <-chan struct{}
	limits   limits
	watch    *watch
	pages    Pages // nil for none
	proxies  clientip.Trusted
	budgets  budgets
	ready    *pgxpool.Pool
	prober   prober
	log      *slog.Logger

	unsettled *unsettled
	locks     postgres.KeyedTx // of pool

	documentBytes int64
}

// handler routes by the table. What the table does not have is a problem too: 404, or 405 with Allow.
func (s *server) handler(table []route) (http.Handler, error) {
	document := route{
		method: http.MethodGet, path: "/openapi.json", access: Public, answer: map[string]any{},
		about: "This document: every route, what it takes and what it answers.",
	}
	table = append(slices.Clip(table), document)
	described, err := s.openAPI(table)
	if err != nil {
		return nil, err
	}
	table[len(table)-1].handler = described
	mux := http.NewServeMux()
	paths := map[string][]route{}
	for _, rt := range table {
		if err := register(mux, rt.method+" "+rt.path, s.serve(rt)); err != nil {
			return nil, err
		}
		paths[rt.path] = append(paths[rt.path], rt)
	}
	for path, rows := range paths {
		if err := s.refuseMethods(mux, path, rows); err != nil {
			return nil, err
		}
	}
	mux.Handle("/v1/", s.noRouteInV1())
	if _, taken := paths["/"]; !taken {
		mux.Handle("/", s.enter(route{access: Public}, s.noRouteAtAll()))
	}
	return s.proxies.Handler(s.wrap(mux), s.log), nil
}

// register is mux.Handle, which panics at a pattern that it cannot take.
func register(mux *http.ServeMux, pattern string, h http.Handler) (err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("route %s: %v", pattern, value)
		}
	}()
	mux.Handle(pattern, h)
	return nil
}

// refusing answers every request with an error, as rt does.
func (s *server) refusing(rt route, why func(r *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.refuse(w, r, rt, why(r), "") })
}

// refuseMethods answers for the methods that a path does not have. A path that is a case of another one's, as /a/new is
// of /a/{id}, cannot be taken for all methods: http.ServeMux sees no order between it and GET /a/{id}. Then those
// methods are refused that there are.
func (s *server) refuseMethods(mux *http.ServeMux, path string, rows []route) error {
	refusal := s.wrongMethod(rows)
	if register(mux, path, refusal) == nil {
		return nil
	}
	for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
		if slices.ContainsFunc(rows, func(rt route) bool { return rt.method == method }) {
			continue
		}
		if err := register(mux, method+" "+path, refusal); err != nil {
			return err
		}
	}
	return nil
}

// wrongMethod answers for a path that exists, to whom may call the most guarded of its rows.
func (s *server) wrongMethod(rows []route) http.Handler {
	guarded := rows[0]
	var methods []string
	for _, rt := range rows {
		methods = append(methods, rt.method)
		if rt.method == http.MethodGet {
			methods = append(methods, http.MethodHead)
		}
		if rt.access > guarded.access {
			guarded = rt
		}
	}
	allow := strings.Join(methods, ", ")
	closed := route{access: guarded.access, openAI: guarded.openAI, page: guarded.page, foreign: true}
	return s.enter(closed, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Allow", allow)
		s.refuse(w, r, closed, problem.New(http.StatusMethodNotAllowed, "%.20s is not possible here; use %s", r.Method, allow), "")
	}))
}

// noRouteInV1 tells the admin, and whoever has a chat key: stock clients try what OpenAI has and we have not.
func (s *server) noRouteInV1() http.Handler {
	visitor := route{openAI: true}
	toAdmin := s.enter(route{access: Admin, foreign: true}, s.refusing(route{}, noRoute))
	toVisitor := s.refusing(visitor, noRoute)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key, has := bearer(r)
		if has && s.gate.guard.Knows(r, credentials.Admin, key, s.gate.chat...) {
			toVisitor.ServeHTTP(w, r)
			return
		}
		toAdmin.ServeHTTP(w, r)
	})
}

// noRouteAtAll tells a person with a page, and a program with a problem.
func (s *server) noRouteAtAll() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wantsPage(r) && s.pages != nil {
			s.pages.Refuse(w, r, problem.New(http.StatusNotFound, "there is no page %.200s", r.URL.Path))
			return
		}
		s.refuse(w, r, route{}, noRoute(r), "")
	})
}

func noRoute(r *http.Request) error {
	return problem.New(http.StatusNotFound, "there is no route %.200s; /openapi.json lists them", r.URL.Path)
}
