package api

import (
	"context"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/principals"
)

// timeouts are the time limits of a request.
type timeouts struct {
	request time.Duration // of a request other than a stream
	body    time.Duration // to receive a body
	send    time.Duration // to send a response, or a part of a stream
}

// defaultTimeouts returns the time limits of production.
func defaultTimeouts() timeouts {
	return timeouts{request: 40 * time.Second, body: 30 * time.Second, send: 30 * time.Second}
}

// withDeadline bounds the duration of a request, or prepares it as a stream. The disconnect of its client does not end
// a request with an Idempotency-Key, so the next request with the key gets the response.
func (s *server) withDeadline(rt route, next http.Handler) http.Handler {
	if !rt.stream {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx := r.Context()
			if rt.acceptsKey && r.Header.Get(keyHeader) != "" {
				ctx = context.WithoutCancel(ctx)
			}
			ctx, cancel := context.WithTimeout(ctx, s.timeouts.request)
			defer cancel()
			next.ServeHTTP(w, r.WithContext(ctx))
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead && !rt.page { // a stream has no end, so HEAD cannot wait for it; a page answers HEAD
			w.Header().Set("Content-Type", rt.contentType)
			return
		}
		stop := s.stopping
		if rt.finite {
			stop = s.forceStop
		}
		ctx, release := withStop(r.Context(), stop)
		defer release()
		ctx, end := s.auth.sessions.watch(ctx, principals.From(ctx))
		defer end()
		next.ServeHTTP(&streamWriter{w, http.NewResponseController(w), s.timeouts.send}, r.WithContext(ctx))
	})
}

// setDeadline sets a connection deadline; zero clears it. Errors are ignored: httptest recorders do not support
// deadlines, and on a closed connection the next read or write fails too.
func setDeadline(set func(time.Time) error, d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = set(at)
}

// withStop returns a context that also ends when stop closes. The caller must call release.
func withStop(parent context.Context, stop <-chan struct{}) (ctx context.Context, release func()) {
	ctx, cancel := context.WithCancelCause(parent)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-stop:
			cancel(executions.ErrDraining)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-stopped
	}
}

// streamWriter has no total deadline, but a timeout for each write.
type streamWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration // per write
}

func (w *streamWriter) Write(b []byte) (int, error) {
	setDeadline(w.control.SetWriteDeadline, w.timeout)
	return w.ResponseWriter.Write(b)
}

// Flush implements http.Flusher.
func (w *streamWriter) Flush() { _ = w.FlushError() } // the next write reports a disconnected client

func (w *streamWriter) FlushError() error {
	setDeadline(w.control.SetWriteDeadline, w.timeout)
	return w.control.Flush()
}

// Unwrap supports http.ResponseController.
func (w *streamWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
