package api

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/trace"
)

// limits bound what a client may take.
type limits struct {
	request time.Duration // a request that is no stream, from its header to its answer
	body    time.Duration // sending a body
	send    time.Duration // accepting an answer, or a piece of a stream
}

// usual are the limits. A request has longer than lanes.Break may take.
func usual() limits {
	return limits{request: 40 * time.Second, body: 30 * time.Second, send: 30 * time.Second}
}

// Server is the http.Server for the handler that New returns. It bounds what comes before a request is
// known: its header. The handler bounds the rest, route by route, so there is neither a ReadTimeout nor a
// WriteTimeout, which would cut streams.
func Server(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: admission.Handler(h), ConnContext: admission.ConnContext, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 32 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// enter lets in who may call the route, with a body that is complete.
func (s *server) enter(rt route, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit(http.NewResponseController(w).SetWriteDeadline, s.limits.request+s.limits.send)
		r, err := s.gate.pass(w, r, rt)
		if err == nil {
			var leave func()
			if r, leave, err = s.admit(w, r, rt); err == nil {
				defer leave()
			}
		}
		if err != nil {
			if r.ContentLength != 0 { // a body that was not read, and is not waited for
				w.Header().Set("Connection", "close")
			}
			s.refuse(w, r, rt, err, "")
			return
		}
		if s.read.Configured() && r.Method != http.MethodGet && r.Method != http.MethodHead {
			if who, _ := r.Context().Value(callerKey{}).(caller); who.login != nil {
				replica.Wrote(w, r) // the pages that this browser asks for next show it
			}
		}
		if caller := r.Header.Get("Traceparent"); caller != "" {
			r = r.WithContext(trace.WithCaller(r.Context(), caller))
		}
		next.ServeHTTP(w, r)
	})
}

// limit sets a deadline of the connection; zero lifts it. A ResponseWriter without a connection, as in
// tests, has none to set.
func limit(set func(time.Time) error, d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = set(at) // what cannot be set is a connection that is gone: the next read or write says so
}

// timed bounds the time of a request, or makes it a stream.
func (s *server) timed(rt route, next http.Handler) http.Handler {
	if !rt.stream {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), s.limits.request)
			defer cancel()
			next.ServeHTTP(w, r.WithContext(ctx))
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead { // a stream has no end that a HEAD could wait for
			w.Header().Set("Content-Type", rt.contentType)
			return
		}
		stop := s.stopping
		if rt.ends {
			stop = s.cutting
		}
		ctx, leave := until(r.Context(), stop)
		defer leave()
		if who, _ := ctx.Value(callerKey{}).(caller); who.login != nil {
			var end func()
			ctx, end = s.gate.sessions.hold(ctx, who.login)
			defer end()
		}
		next.ServeHTTP(&flow{w, http.NewResponseController(w), s.limits.send}, r.WithContext(ctx))
	})
}

// until is a context that also ends at a point of the shutdown. leave frees what it needs, and has to be called.
func until(parent context.Context, stop <-chan struct{}) (ctx context.Context, leave func()) {
	ctx, cancel := context.WithCancelCause(parent)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-stop:
			cancel(executions.ErrDraining)
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-watched
	}
}

// flow is the answer of a stream: it may last, but each piece has to get through in time.
type flow struct {
	http.ResponseWriter
	control *http.ResponseController
	each    time.Duration // what a piece may take
}

func (w *flow) Write(b []byte) (int, error) {
	limit(w.control.SetWriteDeadline, w.each)
	return w.ResponseWriter.Write(b)
}

// Flush is for handlers that ask for an http.Flusher.
func (w *flow) Flush() { _ = w.FlushError() } // a client that is gone shows at the next write

func (w *flow) FlushError() error {
	limit(w.control.SetWriteDeadline, w.each)
	return w.control.Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *flow) Unwrap() http.ResponseWriter { return w.ResponseWriter }
