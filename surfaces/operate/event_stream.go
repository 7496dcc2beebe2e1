package operate

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// eventStream writes server-sent events. The first write sends the headers. A failed write cancels the request.
type eventStream struct {
	w      http.ResponseWriter
	cancel context.CancelCauseFunc
	closed chan struct{}

	mu          sync.Mutex
	headersSent bool
	events      int
	failed      bool
}

func newEventStream(w http.ResponseWriter, cancel context.CancelCauseFunc) *eventStream {
	return &eventStream{w: w, cancel: cancel, closed: make(chan struct{})}
}

func (s *eventStream) started() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.headersSent
}

func (s *eventStream) hasEvents() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events > 0
}

func (s *eventStream) sendEvent(e Event) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	data := e.Data
	if data == nil {
		data = struct{}{}
	}
	if err := encoder.Encode(data); err != nil { // only invalid JSON in a RawMessage fails, and newToolCall makes it valid
		text.Reset()
		fmt.Fprintf(&text, "%q\n", err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if start, ok := data.(Start); ok { // package api stores these headers even after the stream began
		s.w.Header().Set("X-Trace-Id", start.TraceID)
		s.w.Header().Set("X-Thread-Id", start.SessionID)
	}
	s.events++
	s.write(sse.Event{Name: e.Name, Data: strings.TrimSuffix(text.String(), "\n")}.Append(nil))
}

// sendComment writes a line that clients ignore.
func (s *eventStream) sendComment(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(sse.Comment(nil, text))
}

// writeTimeout bounds the write of one event.
const writeTimeout = 30 * time.Second

// write sends bytes at once. The caller holds mu.
func (s *eventStream) write(text []byte) {
	if s.failed {
		return
	}
	control := http.NewResponseController(s.w)
	if !s.headersSent {
		s.headersSent = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // proxies must not collect it
		s.w.WriteHeader(http.StatusOK)
	}
	// A writer without deadlines or flush still gets the bytes.
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.w.Write(text)
	if err == nil {
		_ = control.Flush()
		return
	}
	s.failed = true
	s.cancel(fmt.Errorf("write event: %w", err))
}

// keepAlive writes a comment at each interval once the stream is open. The caller must call stop.
func (s *eventStream) keepAlive(interval time.Duration) (stop func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if s.started() {
					s.sendComment("keep-alive")
				}
			case <-s.closed:
				return
			}
		}
	})
	return func() {
		close(s.closed)
		wg.Wait()
	}
}
