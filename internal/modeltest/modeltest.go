// Package modeltest is a scripted model for tests.
//
// [New] starts an HTTP server on the loopback that speaks the OpenAI chat completions protocol. So tests run the real
// client, also in child processes. Request n gets reply n of the script, or after [Server.Handle] the reply of a
// function. [Server.Requests] returns the received requests.
//
//	model := modeltest.New(t,
//		modeltest.ToolCall("table_sizes", `{"limit":3}`),
//		modeltest.Status(429, time.Second),
//		modeltest.Text("All is well.").WithUsage(120, 4, 0),
//	)
//	client, err := models.New(models.Config{BaseURL: model.URL(), Model: "scripted"})
//
// A reply describes an answer or a fault: a refusal, an error within a stream, a cut connection, silence, an odd
// encoding. By default a reply's usage follows from the length of the text. The same script gives the same bytes.
//
// A request beyond the script gets status 500. It also fails the test at its end, because code under test may ignore
// the error. The package is safe for concurrent use.
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

// Model is the listed name of the server. The server accepts every name.
const Model = "scripted"

// Server is a running scripted model.
type Server struct {
	http       *httptest.Server
	done       chan struct{} // closed when the test ends; releases hanging replies
	refuse     func(Request) (Reply, bool)
	addMembers func(call, Reply) Reply // adds the provider's members; nil for none

	mu       sync.Mutex
	script   []Reply
	handle   func(n int, req openai.ChatCompletionRequest) Reply
	received []Request
	refused  []Request // requests refused by the provider's rules; not in the script
	extra    int       // requests beyond the script
	broken   []string
}

// Request is one chat completion as the server received it.
type Request struct {
	openai.ChatCompletionRequest
	Header http.Header
	Body   string // verbatim
	Path   string // /v1/chat/completions or /v1/responses
	Query  url.Values
}

// IdempotencyKey returns the header Idempotency-Key.
func (r Request) IdempotencyKey() string { return r.Header.Get("Idempotency-Key") }

// New starts a server with a script of replies. It stops with the test.
func New(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := &Server{script: replies, done: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", s.complete)
	mux.HandleFunc("POST /v1/responses", s.respond)
	mux.HandleFunc("GET /v1/models", s.models)
	s.http = httptest.NewServer(mux)
	tb.Cleanup(func() {
		close(s.done)
		s.http.CloseClientConnections()
		s.http.Close()
		s.report(tb)
	})
	return s
}

// URL returns the base URL for clients.
func (s *Server) URL() string { return s.http.URL + "/v1" }

// Handle makes f return the replies instead of the script. n counts all requests from 0. Concurrent requests call f
// concurrently.
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

// Refused returns the requests that the provider's rules refused, oldest first.
func (s *Server) Refused() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.refused...)
}

// Requests returns the received requests, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Request(nil), s.received...)
}

func (s *Server) complete(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client disconnected
	}
	req := Request{Header: r.Header.Clone(), Body: string(body), Path: r.URL.Path, Query: r.URL.Query()}
	if err := json.Unmarshal(body, &req.ChatCompletionRequest); err != nil {
		s.note("undecodable request: " + err.Error())
		s.failure(w, http.StatusBadRequest, "invalid_request_error", "decode request: "+err.Error())
		return
	}
	s.reply(w, r, req)
}

// reply sends the script's reply, unless the provider refuses the request.
func (s *Server) reply(w http.ResponseWriter, r *http.Request, req Request) {
	if s.refuse != nil {
		if refusal, refused := s.refuse(req); refused {
			s.mu.Lock()
			s.refused = append(s.refused, req)
			s.mu.Unlock()
			refusal.serve(call{w: w, r: r, req: req, quit: s.done})
			return
		}
	}
	n, reply, found := s.next(req)
	if !found {
		s.failure(w, http.StatusInternalServerError, "server_error",
			fmt.Sprintf("modeltest: script exhausted: request %d has no reply; it ends with %q", n, lastWords(req)))
		return
	}
	made := call{w: w, r: r, req: req, n: n, quit: s.done}
	if s.addMembers != nil {
		reply = s.addMembers(made, reply)
	}
	reply.serve(made)
}

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

// report fails the test for requests beyond the script and for broken requests.
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

// Said returns the text of a message without the runtime's preface.
func Said(m openai.ChatCompletionMessage) string {
	if _, after, found := strings.Cut(m.Content, "\n[End of context]\n\n"); found {
		return after
	}
	return m.Content
}

// Turn returns the last words of the user, and the number of the model's answers after them.
func Turn(req openai.ChatCompletionRequest) (words string, answers int) {
	last := len(req.Messages) - 1
	for last > 0 && req.Messages[last].Role != openai.ChatMessageRoleUser {
		last--
	}
	for _, m := range req.Messages[last+1:] {
		if m.Role == openai.ChatMessageRoleAssistant {
			answers++
		}
	}
	return Said(req.Messages[last]), answers
}

// lastWords returns the end of the last message, which identifies a request.
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
