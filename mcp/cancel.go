package mcp

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"

	"github.com/lanekeeper/lanekeeper/activity"
)

const (
	// firstWithoutSessions is the first version of MCP whose clients cancel a call by closing its connection. Older ones
	// send a notification, in a request of its own.
	firstWithoutSessions = "2026-07-28"

	versionHeader = "Mcp-Protocol-Version"
	sessionHeader = "Mcp-Session-Id"
)

// callKey names a call over HTTP. Clients number their requests themselves, so the session is part of the name.
type callKey struct{ actor, session, request string }

// callKeyKey is the context key of a request's callKey.
type callKeyKey struct{}

// identify gives a client a session id, names its call, or cancels the call that it names. The session id is
// random and not stored, so every process accepts it.
func (s *Server) identify(w http.ResponseWriter, r *http.Request) *http.Request {
	if r.Header.Get(versionHeader) >= firstWithoutSessions || r.Method != http.MethodPost {
		return r
	}
	body, _ := io.ReadAll(io.LimitReader(r.Body, maxRequestBody)) // the SDK gets the error again
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(body), r.Body), r.Body}
	var message struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params struct {
			RequestID json.RawMessage `json:"requestId"`
		} `json:"params"`
	}
	if json.Unmarshal(body, &message) != nil { // a batch, or invalid
		return r
	}
	key := callKey{activity.ActorFrom(r.Context()).Name, r.Header.Get(sessionHeader), string(message.ID)}
	switch {
	case message.Method == "initialize":
		w.Header().Set(sessionHeader, rand.Text())
	case key.session == "":
	case message.Method == "tools/call":
		return r.WithContext(context.WithValue(r.Context(), callKeyKey{}, key))
	case message.Method == "notifications/cancelled":
		key.request = string(message.Params.RequestID)
		if cancel, ok := s.calls.Load(key); ok {
			cancel.(context.CancelFunc)()
		}
	}
	return r
}

// cancellable returns the context of a call that its client can cancel. The caller must call end.
func (s *Server) cancellable(ctx context.Context) (_ context.Context, end func()) {
	key, ok := ctx.Value(callKeyKey{}).(callKey)
	if !ok {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	if _, exists := s.calls.LoadOrStore(key, cancel); exists { // the client used the id twice
		return ctx, cancel
	}
	return ctx, func() {
		s.calls.Delete(key)
		cancel()
	}
}
