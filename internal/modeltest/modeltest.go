// Package modeltest is a model that says what a test wrote down.
//
// [New] starts a real HTTP server on the loopback that speaks the OpenAI chat completions protocol, so the
// real client runs, also in a child process or in several. Request n gets reply n of the script; or, after
// [Server.Handle], whatever a function says. What was asked is remembered and returned by [Server.Requests].
//
//	model := modeltest.New(t,
//		modeltest.ToolCall("table_sizes", `{"limit":3}`),
//		modeltest.Status(429, time.Second),
//		modeltest.Text("All is well.").WithUsage(120, 4, 0),
//	)
//	client, err := models.New(models.Config{BaseURL: model.URL(), Model: "scripted"})
//
// A reply is a value that tells how a server may behave, faults included: refusals, errors in the middle of a
// stream, cut connections, silence, odd encodings. Replies carry usage computed from the text's length unless
// they say otherwise, and the same script always gives the same bytes.
//
// A request beyond the end of the script is answered with a 500 that says so, and fails the test when it ends,
// because code under test may swallow the error. Everything here is safe for concurrent use.
package modeltest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Model is the name under which the server lists itself. It answers to every name.
const Model = "scripted"

// Server is a running scripted model.
type Server struct {
	http   *httptest.Server
	quit   chan struct{} // closed when the test ends; releases hanging replies
	refuse func(Request) (Reply, bool)
	dress  func(call, Reply) Reply // gives a reply what the provider adds; nil for none

	mu       sync.Mutex
	script   []Reply
	handle   func(n int, req openai.ChatCompletionRequest) Reply
	received []Request
	refused  []Request // by the provider's rules; no part of the script
	extra    int       // requests the script had no reply for
	broken   []string
}

// Request is one chat completion as the server received it.
type Request struct {
	openai.ChatCompletionRequest
	Header http.Header
	Body   string // exactly as it came
	Path   string // /v1/chat/completions or /v1/responses
	Query  url.Values
}

// IdempotencyKey is the header of that name; empty without one.
func (r Request) IdempotencyKey() string { return r.Header.Get("Idempotency-Key") }

// New starts a server that gives the replies in order. It stops when the test ends.
func New(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := &Server{script: replies, quit: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.complete)
	mux.HandleFunc("POST /v1/responses", s.respond)
	mux.HandleFunc("GET /v1/models", s.models)
	s.http = httptest.NewServer(mux)
	tb.Cleanup(func() {
		close(s.quit)
		s.http.CloseClientConnections()
		s.http.Close()
		s.report(tb)
	})
	return s
}

// URL is what a client takes as its base URL.
func (s *Server) URL() string { return s.http.URL + "/v1" }

// Handle lets f decide the reply to each request from now on, instead of the script; n counts all requests
// from 0. Calls of f may overlap when requests do.
func (s *Server) Handle(f func(n int, req openai.ChatCompletionRequest) Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handle = f
}

// Add appends replies to the script.
func (s *Server) Add(replies ...Reply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script = append(s.script, replies...)
}

// Refused returns what the provider's rules have refused so far, oldest first.
func (s *Server) Refused() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.refused...)
}

// Requests returns what was received so far, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.received...)
}

func (s *Server) complete(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has gone
	}
	req := Request{Header: r.Header.Clone(), Body: string(body), Path: r.URL.Path, Query: r.URL.Query()}
	if err := json.Unmarshal(body, &req.ChatCompletionRequest); err != nil {
		s.note("undecodable request: " + err.Error())
		s.failure(w, http.StatusBadRequest, "invalid_request_error", "decode request: "+err.Error())
		return
	}
	s.reply(w, r, req)
}

// reply gives the script's reply, unless the provider refuses the request.
func (s *Server) reply(w http.ResponseWriter, r *http.Request, req Request) {
	if s.refuse != nil {
		if refusal, refused := s.refuse(req); refused {
			s.mu.Lock()
			s.refused = append(s.refused, req)
			s.mu.Unlock()
			refusal.serve(call{w: w, r: r, req: req, quit: s.quit})
			return
		}
	}
	n, reply, found := s.next(req)
	if !found {
		s.failure(w, http.StatusInternalServerError, "server_error",
			fmt.Sprintf("modeltest: script exhausted: request %d has no reply; it ends with %q", n, lastWords(req)))
		return
	}
	made := call{w: w, r: r, req: req, n: n, quit: s.quit}
	if s.dress != nil {
		reply = s.dress(made, reply)
	}
	reply.serve(made)
}

// next remembers the request and picks its reply.
func (s *Server) next(req Request) (n int, reply Reply, found bool) {
	s.mu.Lock()
	n = len(s.received)
	s.received = append(s.received, req)
	handle := s.handle
	if handle == nil && n < len(s.script) {
		reply, found = s.script[n], true
	}
	if handle == nil && !found {
		s.extra++
	}
	s.mu.Unlock()
	if handle != nil {
		return n, handle(n, req.ChatCompletionRequest), true
	}
	return n, reply, found
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	if err := chatwire.WriteModels(w, created, "modeltest", chatwire.Model{ID: Model}); err != nil {
		s.note(err.Error())
	}
}

func (s *Server) failure(w http.ResponseWriter, status int, kind, message string) {
	if err := chatwire.WriteFailure(w, status, chatwire.Failure{Message: message, Type: kind}); err != nil {
		s.note(err.Error())
	}
}

func (s *Server) note(problem string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = append(s.broken, problem)
}

// report fails the test for what went wrong unseen.
func (s *Server) report(tb testing.TB) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.extra > 0 {
		tb.Errorf("modeltest: %d requests came after the script's %d replies", s.extra, len(s.script))
	}
	for _, problem := range s.broken {
		tb.Errorf("modeltest: %s", problem)
	}
}

// Said is what somebody said in a message: its text without what the runtime says before it.
func Said(m openai.ChatCompletionMessage) string {
	if _, after, found := strings.Cut(m.Content, "\n[End of context]\n\n"); found {
		return after
	}
	return m.Content
}

// lastWords is the end of the last message, to know a request by.
func lastWords(req Request) string {
	if len(req.Messages) == 0 {
		return ""
	}
	text := strings.TrimSpace(req.Messages[len(req.Messages)-1].Content)
	if r := []rune(text); len(r) > 80 {
		return "…" + string(r[len(r)-80:])
	}
	return text
}
