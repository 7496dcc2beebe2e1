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

// writeLimit is how long a client may take to take an event.
const writeLimit = 30 * time.Second

// stream writes server-sent events. The headers go out with the first thing written. A client that takes nothing
// any more ends the request.
type stream struct {
	w      http.ResponseWriter
	leave  context.CancelCauseFunc
	closed chan struct{}

	mu     sync.Mutex
	open   bool
	events int
	broken bool
}

func newStream(w http.ResponseWriter, leave context.CancelCauseFunc) *stream {
	return &stream{w: w, leave: leave, closed: make(chan struct{})}
}

// opened reports whether anything was written, wrote whether an event was.
func (s *stream) opened() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

func (s *stream) wrote() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events > 0
}

// event writes one event.
func (s *stream) event(e Event) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	data := e.Data
	if data == nil {
		data = struct{}{}
	}
	if err := encoder.Encode(data); err != nil { // a tool's arguments are JSON by then, so there is nothing that cannot be
		text.Reset()
		fmt.Fprintf(&text, "%q\n", err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if start, first := data.(Start); first && !s.open {
		s.w.Header().Set("X-Trace-Id", start.TraceID)
	}
	s.events++
	s.write(sse.Event{Name: e.Name, Data: strings.TrimSuffix(text.String(), "\n")}.Append(nil))
}

// comment writes what clients pass over.
func (s *stream) comment(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(sse.Comment(nil, text))
}

// write sends bytes at once. The caller holds mu.
func (s *stream) write(text []byte) {
	if s.broken {
		return
	}
	control := http.NewResponseController(s.w)
	if !s.open {
		s.open = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // proxies must not collect it
		s.w.WriteHeader(http.StatusOK)
	}
	// A writer that knows no deadlines or cannot flush still gets the bytes.
	_ = control.SetWriteDeadline(time.Now().Add(writeLimit))
	_, err := s.w.Write(text)
	if err == nil {
		_ = control.Flush()
		return
	}
	s.broken = true
	s.leave(fmt.Errorf("write event: %w", err))
}

// keepAlive writes a comment whenever nothing was written for a while, once the stream is open. The function that it
// returns ends that.
func (s *stream) keepAlive(every time.Duration) (end func()) {
	var beating sync.WaitGroup
	beating.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if s.opened() {
					s.comment("keep-alive")
				}
			case <-s.closed:
				return
			}
		}
	})
	return func() {
		close(s.closed)
		beating.Wait()
	}
}
