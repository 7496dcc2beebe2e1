package modeltest

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Embeddings is a running embedding server.
type Embeddings struct {
	http *httptest.Server
	quit chan struct{}

	mu       sync.Mutex
	vector   func(text string) []float32
	refuse   func(texts []string) int
	received []EmbeddingRequest
}

// EmbeddingRequest is one request as the server received it.
type EmbeddingRequest struct {
	Model  string
	Texts  []string
	Header http.Header
}

// NewEmbeddings starts a server on the loopback that speaks OpenAI's embeddings protocol. vector returns the vector of
// a text. The server lists vectors in reverse, which the protocol allows. It stops with the test.
func NewEmbeddings(tb testing.TB, vector func(text string) []float32) *Embeddings {
	tb.Helper()
	e := &Embeddings{vector: vector, quit: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/embeddings", e.serve)
	e.http = httptest.NewServer(mux)
	tb.Cleanup(func() {
		close(e.quit)
		e.http.CloseClientConnections()
		e.http.Close()
	})
	return e
}

// URL returns the base URL for clients.
func (e *Embeddings) URL() string { return e.http.URL + "/v1" }

// Refuse makes f decide about requests. f returns an HTTP status, 0 for an answer, or a negative number for silence
// until the client disconnects.
func (e *Embeddings) Refuse(f func(texts []string) int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse = f
}

// Requests returns the received requests, oldest first.
func (e *Embeddings) Requests() []EmbeddingRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.received)
}

func (e *Embeddings) serve(w http.ResponseWriter, r *http.Request) {
	var wanted struct {
		Model string   `json:"model"`
		Input []string `json:"input"`
	}
	if err := json.NewDecoder(r.Body).Decode(&wanted); err != nil {
		e.fail(w, http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	e.received = append(e.received, EmbeddingRequest{wanted.Model, wanted.Input, r.Header.Clone()})
	vector, refuse := e.vector, e.refuse
	e.mu.Unlock()
	status := 0
	if refuse != nil {
		status = refuse(wanted.Input)
	}
	switch {
	case status > 0:
		e.fail(w, status)
		return
	case status < 0:
		select {
		case <-r.Context().Done():
		case <-e.quit:
		}
		return
	}
	answer := openai.EmbeddingResponse{Object: "list", Model: openai.EmbeddingModel(wanted.Model)}
	for i, text := range slices.Backward(wanted.Input) {
		answer.Data = append(answer.Data, openai.Embedding{Object: "embedding", Index: i, Embedding: vector(text)})
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		return // the client disconnected
	}
}

func (e *Embeddings) fail(w http.ResponseWriter, status int) {
	f := chatwire.Failure{Message: http.StatusText(status), Type: "invalid_request_error"}
	if err := chatwire.WriteFailure(w, status, f); err != nil {
		return // the client disconnected
	}
}
