package api

import (
	"cmp"
	"encoding/json"
	"net/http"
	"reflect"
	"slices"

	"github.com/lanekeeper/lanekeeper/principals"
)

// route declares one HTTP route: its handler, access and limits, and its entry in the OpenAPI document.
type route struct {
	method, path string
	about        string
	access       Access                          // default Admin
	scopes       []principals.Scope              // of Admin routes, from scopes.go; one suffices
	secret       string                          // the response has a secret and is not stored: what to do if it got lost
	params       []param                         // of the query; the server rejects others
	headers      map[string]string               // of the request, with their descriptions
	sends        map[string]string               // headers of a successful response
	errors       []int                           // error statuses of a public route
	body         any                             // zero value of the request body; nil for none
	response     any                             // zero value of the response body
	status       int                             // of the response; 200 when 0
	contentType  string                          // of the response; JSON when empty
	unready      bool                            // may respond with 503
	alreadyDone  bool                            // responds with 200 if already done
	safeToRetry  bool                            // an idempotent POST: it needs no key, and invoke retries it
	derivesKey   bool                            // the Idempotency-Key is the row's dedupe key, so a retry is safe
	conflicts    bool                            // may respond with 409
	notFound     bool                            // may respond with 404 for an id in the body
	optionalBody bool                            // the body may be absent, and its type is not checked
	deferred     bool                            // may respond with 202
	noContent    string                          // why it may respond with 204; empty if it does not
	hasETag      bool                            // the response has an ETag, the object's revision
	ifMatch      bool                            // supports If-Match, may respond with 412
	stream       bool                            // no deadline
	finite       bool                            // a stream; a shutdown waits for its end
	openAI       bool                            // errors in OpenAI's format
	crossOrigin  bool                            // accepts cross-origin requests
	replica      bool                            // may read from the replica
	csv          bool                            // a listing that can be a table
	page         bool                            // not in the OpenAPI document; errors are HTML pages
	acceptsKey   bool                            // supports Idempotency-Key
	maxBody      int64                           // bytes
	expect       expectation                     // runs before the server reads the body; may be nil
	busy         func(*http.Request)             // learns of a request that admission rejects; may be nil
	probe        bool                            // bypasses admission
	handle       func(request) (response, error) // of this package's routes
	httpHandler  http.Handler                    // of streams and of endpoints
}

// wantsJSON reports whether the route requires Content-Type: application/json.
func (rt route) wantsJSON() bool {
	kind := reflect.TypeOf(rt.body)
	return rt.body != nil && !rt.optionalBody &&
		kind != reflect.TypeFor[json.RawMessage]() && kind != reflect.TypeFor[FileForm]()
}

// response is the result of a handler.
type response struct {
	status int // 200 when 0
	body   any
	trace  string
	// revision becomes the ETag; 0 for none.
	revision int
}

// routes returns the package's routes and the endpoints. It completes the package's routes: access and scopes, the CSV
// parameter, the limit of the body, and support of Idempotency-Key.
func (s *server) routes(endpoints []Endpoint) ([]route, error) {
	table := slices.Concat(
		s.probeRoutes(), s.loginRoutes(), s.oidcRoutes(), s.principalRoutes(),
		s.traceRoutes(), s.reportRoutes(), s.monitorRoutes(), s.pauseRoutes(),
		s.executionRoutes(), s.forkRoutes(), s.workerRoutes(), s.eventRoutes(), s.laneRoutes(),
		s.agentRoutes(), s.skillRoutes(), s.flowRoutes(), s.objectiveRoutes(), s.automationRoutes(),
		s.approvalRoutes(), s.memoryRoutes(), s.documentRoutes(), s.threadRoutes(), s.accessRoutes(),
		s.webhookRoutes(), s.channelRoutes(), s.evalRoutes(), s.retentionRoutes(),
	)
	for i := range table {
		if table[i].access == 0 {
			table[i].access, table[i].scopes = Admin, scopesOf(table[i].method, table[i].path)
		}
		if table[i].csv {
			table[i].params = append(slices.Clip(table[i].params), csvParam)
		}
		table[i].maxBody = cmp.Or(table[i].maxBody, maxBody)
		table[i].acceptsKey = table[i].acceptsKey ||
			table[i].method == http.MethodPost && !table[i].safeToRetry && !table[i].page
	}
	for _, e := range endpoints {
		rt, err := e.route()
		if err != nil {
			return nil, err
		}
		if rt.page && rt.path == loginPath {
			rt.httpHandler = s.redirectLoggedIn(rt.httpHandler)
		}
		table = append(table, rt)
	}
	return table, nil
}

func (s *server) probeRoutes() []route {
	return []route{
		{
			method: "GET", path: "/healthz", access: Public, probe: true, response: health{}, handle: s.healthz,
			about: "Whether the process is alive, without any check.",
		}, {
			method: "GET", path: "/readyz", access: Public, probe: true, response: readiness{}, unready: true, handle: s.readyz,
			about: "Whether this process accepts work: database, schema, writes, worker, not shutting down.",
		},
	}
}
