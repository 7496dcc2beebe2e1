package api

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/principals"
)

// Endpoint is a route of a surface. Its handler runs after the package's checks and reads a complete body from
// memory.
type Endpoint struct {
	Method, Path string // as http.ServeMux has them; GET also answers HEAD
	About        string // for the document
	Access       Access
	// Scope is the right that an Admin endpoint needs.
	Scope principals.Scope
	// Body and Response are zero values for the document; nil for none. A Body other than json.RawMessage and FileForm
	// requires application/json.
	Body, Response any
	// Query documents the query parameters.
	Query map[string]string
	// Headers documents the request headers, and ResponseHeaders those of a successful response.
	Headers, ResponseHeaders map[string]string
	// Errors documents the error statuses of a Public endpoint, besides those of all routes.
	Errors []int
	// Status documents the success status; 200 when 0.
	Status int
	// OptionalBody documents that the request may have no body. Its content type is not checked.
	OptionalBody bool
	// Deferred documents that a request whose work goes on returns 202 with the same content.
	Deferred bool
	// AlreadyDone documents that a repeated request returns 200 with the same content.
	AlreadyDone bool
	// ContentType documents the response; application/json when empty. A stream with a Response has both types.
	ContentType string
	// Stream removes the request's deadline; each write must succeed within half a minute. The request's context ends when
	// the client disconnects, and at shutdown with the cause executions.ErrDraining. Then the handler must return.
	Stream bool
	// Finite marks a stream with an end of its own. A shutdown waits for that end, because the client may be unable to
	// repeat the request.
	Finite bool
	// OpenAIErrors selects OpenAI's error objects (401, 403, 404, 405, 408, 413, 415, 429).
	OpenAIErrors bool
	// MaxBody bounds the body in bytes; 1 MiB when 0.
	MaxBody int64
	// Expect runs before the server reads the body. It rejects the request or returns it with its body limit, at most
	// MaxBody. Nil accepts MaxBody. Routes with Expect have their own admission class.
	Expect func(r *http.Request) (*http.Request, int64, error)
	// Busy learns of a request that gets 429 because too many are under way; may be nil.
	Busy func(r *http.Request)
	// Idempotent supports Idempotency-Key. It needs a known caller, so the route cannot be Public.
	Idempotent bool
	// Page marks a route for people. It is undocumented, its errors are pages (see Options.Pages), and it redirects
	// to the login. A page's stream gets plain errors.
	Page    bool
	Handler http.Handler
}

// FileForm is the Body of a route that takes a form (multipart/form-data) with a part named file.
type FileForm struct{}

// Access states the required credentials. The zero value is invalid for endpoints and Admin for the package's routes.
type Access int

// Access levels, the strictest last.
const (
	Public  Access = iota + 1 // everybody
	Visitor                   // a chat key
	Admin                     // a principal with the route's scope
)

// route validates the endpoint and returns its row of the table.
func (e Endpoint) route() (route, error) {
	name := e.Method + " " + e.Path
	switch {
	case e.Method == "" || e.Method != strings.ToUpper(e.Method) || !strings.HasPrefix(e.Path, "/"):
		return route{}, fmt.Errorf("endpoint %s: method and path are required", name)
	case e.Handler == nil || e.About == "":
		return route{}, fmt.Errorf("endpoint %s: a handler and a description are required", name)
	case e.Access < Public || e.Access > Admin:
		return route{}, fmt.Errorf("endpoint %s: access is required", name)
	case (e.Access == Admin) != (e.Scope != ""):
		return route{}, fmt.Errorf("endpoint %s: Admin endpoints, and only they, need a scope", name)
	case e.Idempotent && e.Access == Public:
		return route{}, fmt.Errorf("endpoint %s: a public endpoint cannot be idempotent: strangers would get the stored "+
			"response", name)
	}
	rt := route{
		method: e.Method, path: e.Path, about: e.About, access: e.Access, body: e.Body,
		response: e.Response, status: e.Status, optionalBody: e.OptionalBody, deferred: e.Deferred,
		alreadyDone: e.AlreadyDone, contentType: e.ContentType, stream: e.Stream, finite: e.Finite, openAI: e.OpenAIErrors,
		maxBody: e.MaxBody, acceptsKey: e.Idempotent,
		headers: e.Headers, sends: e.ResponseHeaders, errors: e.Errors,
		crossOrigin: strings.HasPrefix(e.Path, webhooks), page: e.Page, httpHandler: e.Handler, expect: e.Expect,
		busy: e.Busy,
	}
	if e.Access == Admin {
		rt.scopes = []principals.Scope{e.Scope}
	}
	for _, name := range slices.Sorted(maps.Keys(e.Query)) {
		rt.params = append(rt.params, textParam(name, e.Query[name]))
	}
	if rt.maxBody <= 0 {
		rt.maxBody = maxBody
	}
	return rt, nil
}

// webhooks accepts cross-origin requests, because a signature authenticates the sender.
const webhooks = "/webhooks/"
