package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// request is one that has passed its route's checks.
type request struct {
	*http.Request
	query query
	body  any
}

// serve runs a route: who calls, what is sent, its handler.
func (s *server) serve(rt route) http.Handler {
	next := rt.handler
	if next == nil {
		next = s.own(rt)
	}
	if rt.idempotent {
		next = s.once(rt, next)
	}
	return s.enter(rt, s.timed(rt, next))
}

// own runs a route of this package: its query, its body, its function.
func (s *server) own(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, err := accepted(r, rt)
		if err != nil {
			s.refuse(w, r, rt, err, "")
			return
		}
		got, from, err := s.run(rt, in)
		if err != nil {
			s.refuse(w, r, rt, err, got.trace)
			return
		}
		from.Tell(w.Header())
		if got.status == 0 {
			got.status = max(rt.status, http.StatusOK)
		}
		s.write(w, r, got)
	})
}

// run calls the route's function, which may read from the replica.
func (s *server) run(rt route, in request) (got answer, from *replica.Source, err error) {
	if !rt.replica {
		got, err = rt.run(in)
		return got, nil, err
	}
	r := in.Request
	from, err = s.read.Do(r.Context(), replica.Fresh(r), func(ctx context.Context) (err error) {
		in.Request = r.WithContext(ctx)
		if replica.From(ctx).Replica() { // a connection that breaks is no reason to ask there again
			got, err = rt.handle(in)
			return err
		}
		got, err = rt.run(in)
		return err
	})
	return got, from, err
}

// run calls the route's function. What may be done twice is done again when a connection to the database broke under it, so
// that a client need not.
func (rt route) run(in request) (got answer, err error) {
	twice := in.Method == http.MethodGet || in.Method == http.MethodHead || rt.repeatable || rt.keyed && in.Header.Get(keyHeader) != ""
	if !twice {
		return rt.handle(in)
	}
	err = postgres.Again(in.Context(), func() error {
		got, err = rt.handle(in)
		return err
	})
	return got, err
}

// accepted reads query and body. Probes come with parameters of all kinds, and are not refused for them.
func accepted(r *http.Request, rt route) (in request, err error) {
	in.Request = r
	if rt.access != Public {
		if in.query, err = readQuery(r.URL.RawQuery, rt.params); err != nil {
			return in, err
		}
	}
	if rt.body != nil || r.Method != http.MethodGet && r.Method != http.MethodHead { // whose body is not read (see takeBody)
		in.body, err = readBody(r, rt.body)
	}
	return in, err
}

// refuse answers with an error, in the route's format.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, rt route, err error, traceID string) {
	if rt.openAI {
		problem.WriteOpenAI(w, r, err, traceID, s.log)
		return
	}
	if rt.page && !rt.stream && s.pages != nil {
		s.refusePage(w, r, err)
		return
	}
	problem.Write(w, r, err, traceID, s.log)
}

// write answers with a value. It is encoded before anything is sent, so an answer is whole or a problem.
func (s *server) write(w http.ResponseWriter, r *http.Request, a answer) {
	encoded, err := encode(a.body)
	if err != nil {
		problem.Write(w, r, err, a.trace, s.log)
		return
	}
	if a.trace != "" {
		w.Header().Set("X-Trace-Id", a.trace)
	}
	if a.revision > 0 {
		w.Header().Set("ETag", etag(a.revision))
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(encoded)))
	w.WriteHeader(a.status)
	if _, err := w.Write(encoded); err != nil {
		s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
	}
}

// encode is JSON with times in UTC and without HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(inUTC(v)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// wrap is what every request goes through: security headers, the log line, and panics.
func (s *server) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		seen := &recorder{ResponseWriter: w}
		defer func() {
			s.log.DebugContext(r.Context(), "request", "method", r.Method, "path", problem.Path(r), "status", seen.status,
				"bytes", seen.bytes, "duration", time.Since(began))
		}()
		defer func() {
			if value := recover(); value != nil {
				s.panicked(seen, r, value)
			}
		}()
		secure(w.Header())
		if s.leaving() {
			w.Header().Set("Connection", "close") // the client's next request goes to a process that stays
		}
		next.ServeHTTP(seen, r)
	})
}

// secure sets what a browser has to know. A handler that serves a page says otherwise for itself.
func secure(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// panicked answers for a handler that panicked, if it has not answered itself.
func (s *server) panicked(w *recorder, r *http.Request, value any) {
	if value == http.ErrAbortHandler { //nolint:errorlint // the very value that net/http asks for
		panic(value)
	}
	s.log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", problem.Path(r), "panic", value,
		"stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // half an answer is out: the connection is closed, so that it shows
	}
	problem.Write(w, r, problem.New(http.StatusInternalServerError, "something went wrong here; the log has the cause"), "", s.log)
}

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status, bytes int
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(b)
	w.bytes += n
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }
