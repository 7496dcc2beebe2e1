package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
)

// Access says who may call a route. A row of the table that leaves it out is refused or, among this
// package's own, the admin's.
type Access int

// The kinds of access, the most guarded last.
const (
	Public  Access = iota + 1 // everybody; the handler checks what it has to
	Visitor                   // whoever has a chat key
	Admin                     // whoever has the admin token
)

// Endpoint is a route that a surface brings. Its handler is called for requests that have passed the
// checks of this package; the body it reads is in memory, complete, and within MaxBody.
type Endpoint struct {
	Method, Path string // as http.ServeMux has them; GET also answers HEAD
	About        string // for the document
	Access       Access
	// Body and Answer are zero values for the document, nil for none. With a Body other than
	// json.RawMessage the request has to be application/json.
	Body, Answer any
	// Query names the query parameters and says what they do; it is only documented.
	Query map[string]string
	// Status is that of an answer when all is well, 200 when 0. It is only documented.
	Status int
	// Again says that what was done before is answered with 200 and the same; it is only documented.
	Again bool
	// ContentType is that of the answer, application/json when empty; it is only documented.
	ContentType string
	// Stream lifts the request's deadline. Each write has to get through within half a minute. The request's
	// context ends when the client goes away, and at shutdown, with the cause executions.ErrDraining; the
	// handler has to return then.
	Stream bool
	// Ends marks a stream that is the answer to a request and comes to an end by itself: a shutdown waits for it for a while,
	// because a client may not know whether it can ask again.
	Ends bool
	// OpenAIErrors makes refusals (401, 403, 404, 405, 408, 413, 415, 429) OpenAI's error objects.
	OpenAIErrors bool
	// MaxBody is in bytes, 1 MiB when 0.
	MaxBody int64
	// Expect is called before the body is read. It refuses the request, or returns it and how many bytes its body may have, at most
	// MaxBody. Nil expects MaxBody. Such routes share bounds that no other route has.
	Expect func(r *http.Request) (*http.Request, int64, error)
	// Idempotent honours Idempotency-Key. It needs a caller that is known, so not Public.
	Idempotent bool
	// Page is for people: it is left out of the document, refusals are pages (see Options.Pages), and who has not
	// logged in is led to the login and back. A stream of a page is refused as other streams are.
	Page    bool
	Handler http.Handler
}

// webhooks is where other systems post to, and browsers too if they like: a signature says who it is.
const webhooks = "/webhooks/"

// route is the row of the table.
func (e Endpoint) route() (route, error) {
	name := e.Method + " " + e.Path
	switch {
	case e.Method == "" || e.Method != strings.ToUpper(e.Method) || !strings.HasPrefix(e.Path, "/"):
		return route{}, fmt.Errorf("endpoint %s: method and path are required", name)
	case e.Handler == nil || e.About == "":
		return route{}, fmt.Errorf("endpoint %s: a handler and a description are required", name)
	case e.Access < Public || e.Access > Admin:
		return route{}, fmt.Errorf("endpoint %s: say who may call it", name)
	case e.Idempotent && e.Access == Public:
		return route{}, fmt.Errorf("endpoint %s: a stored answer would be shown to strangers; it cannot be public and idempotent", name)
	}
	rt := route{
		method: e.Method, path: e.Path, about: e.About, access: e.Access, body: e.Body, answer: e.Answer, status: e.Status,
		again: e.Again, contentType: e.ContentType, stream: e.Stream, ends: e.Ends, openAI: e.OpenAIErrors, maxBody: e.MaxBody, idempotent: e.Idempotent,
		foreign: strings.HasPrefix(e.Path, webhooks), page: e.Page, handler: e.Handler, expect: e.Expect,
	}
	for _, name := range slices.Sorted(maps.Keys(e.Query)) {
		rt.params = append(rt.params, text(name, e.Query[name]))
	}
	if rt.maxBody <= 0 {
		rt.maxBody = maxBody
	}
	return rt, nil
}

// wantsJSON reports that a request has to say that it brings JSON.
func (rt route) wantsJSON() bool {
	return rt.body != nil && reflect.TypeOf(rt.body) != reflect.TypeFor[json.RawMessage]()
}
