package api

import (
	"cmp"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// withMiddleware adds security headers, the log line, and panic handling.
func (s *server) withMiddleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		rec := &statusRecorder{ResponseWriter: w}
		defer func() {
			s.log.DebugContext(r.Context(), "request", "method", r.Method, "path", problem.Path(r), "status", rec.status,
				"bytes", rec.bytes, "duration", time.Since(began))
		}()
		defer func() {
			if value := recover(); value != nil {
				s.handlePanic(rec, r, value)
			}
		}()
		setSecurityHeaders(w.Header())
		if s.isDraining() {
			w.Header().Set("Connection", "close") // makes the client reconnect to another process
		}
		next.ServeHTTP(rec, r)
	})
}

// setSecurityHeaders sets strict defaults. Page handlers override them.
func setSecurityHeaders(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// handlePanic writes a 500 unless the handler already wrote.
func (s *server) handlePanic(w *statusRecorder, r *http.Request, value any) {
	if value == http.ErrAbortHandler { //nolint:errorlint // net/http compares the value
		panic(value)
	}
	s.log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", problem.Path(r), "panic", value,
		"stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // abort the partial response
	}
	s.writeError(w, r, w.route, problem.New(http.StatusInternalServerError, "internal server error"), "")
}

// statusRecorder stores status and size for the log, and the route for the response to a panic.
type statusRecorder struct {
	http.ResponseWriter
	status, bytes int
	route         route // set by authenticateAndAdmit
}

func (w *statusRecorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusRecorder) Write(b []byte) (int, error) {
	w.status = cmp.Or(w.status, http.StatusOK)
	n, err := w.ResponseWriter.Write(b)
	w.bytes += n
	return n, err
}

// Unwrap supports http.ResponseController.
func (w *statusRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }
