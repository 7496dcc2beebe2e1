package api

import (
	"cmp"
	"context"
	"net/http"
	"strconv"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/trace"
)

// request is a validated request.
type request struct {
	*http.Request
	query query
	body  any
	csv   bool // CSV omits raw JSON columns
}

// serve chains authentication, admission, deadlines, idempotency and the handler.
func (s *server) serve(rt route) http.Handler {
	next := rt.httpHandler
	if next == nil {
		next = s.apiHandler(rt)
	}
	if rt.acceptsKey {
		next = s.withIdempotency(rt, next)
	}
	return s.authenticateAndAdmit(rt, s.withDeadline(rt, next))
}

// authenticateAndAdmit authenticates the caller and admits the request with its complete body.
func (s *server) authenticateAndAdmit(rt route, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rec, ok := w.(*statusRecorder); ok {
			rec.route = rt
		}
		setDeadline(http.NewResponseController(w).SetWriteDeadline, s.timeouts.request+s.timeouts.send)
		r, err := s.auth.authenticate(w, r, rt)
		if err == nil {
			var release func()
			if r, release, err = s.admit(w, r, rt); err == nil {
				defer release()
			}
		}
		if err != nil {
			if r.ContentLength != 0 { // the server did not read the body
				w.Header().Set("Connection", "close")
			}
			s.writeError(w, r, rt, err, "")
			return
		}
		if s.read.Configured() && r.Method != http.MethodGet && r.Method != http.MethodHead {
			if caller := principals.From(r.Context()); caller != nil && caller.SessionID != "" {
				replica.Wrote(w, r) // this browser's next pages must show the change
			}
		}
		if traceparent := r.Header.Get("Traceparent"); traceparent != "" {
			r = r.WithContext(trace.WithCaller(r.Context(), traceparent))
		}
		next.ServeHTTP(w, r)
	})
}

// apiHandler adapts rt.handle to http.Handler. writeCSV reads several pages, so its response has no replica header.
func (s *server) apiHandler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := parseRequest(r, rt)
		if err != nil {
			s.writeError(w, r, rt, err, "")
			return
		}
		if wantsCSV(rt, req) {
			s.writeCSV(w, r, rt, req)
			return
		}
		resp, source, err := s.dispatch(rt, req)
		if err != nil {
			s.writeError(w, r, rt, err, resp.trace)
			return
		}
		source.SetHeader(w.Header())
		resp.status = cmp.Or(resp.status, rt.status, http.StatusOK)
		s.write(w, r, rt, resp)
	})
}

// dispatch calls the route's handler, possibly on the replica.
func (s *server) dispatch(rt route, req request) (resp response, source *replica.Source, err error) {
	if !rt.replica {
		resp, err = rt.invoke(req)
		return resp, nil, err
	}
	r := req.Request
	source, err = s.read.Do(r.Context(), replica.Fresh(r), func(ctx context.Context) (err error) {
		req.Request = r.WithContext(ctx)
		if replica.From(ctx).Replica() { // no retry on the replica
			resp, err = rt.handle(req)
			return err
		}
		resp, err = rt.invoke(req)
		return err
	})
	return resp, source, err
}

// invoke calls the route's handler. After a broken database connection, it retries a request that is safe to retry.
func (rt route) invoke(req request) (resp response, err error) {
	retryable := req.Method == http.MethodGet || req.Method == http.MethodHead || rt.safeToRetry ||
		rt.derivesKey && req.Header.Get(keyHeader) != ""
	if !retryable {
		return rt.handle(req)
	}
	err = postgres.RetryOnDisconnect(req.Context(), func() error {
		resp, err = rt.handle(req)
		return err
	})
	return resp, err
}

// parseRequest reads query and body. Public routes ignore unknown parameters, because probes send many.
func parseRequest(r *http.Request, rt route) (req request, err error) {
	req.Request = r
	if rt.access != Public {
		if req.query, err = readQuery(r.URL.RawQuery, rt.params); err != nil {
			return req, err
		}
	}
	// bufferBody skips the body of GET and HEAD
	if rt.body != nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
		req.body, err = readBody(r, rt.body)
	}
	return req, err
}

// writeError writes an error in the route's format.
func (s *server) writeError(w http.ResponseWriter, r *http.Request, rt route, err error, traceID string) {
	if rt.openAI {
		problem.WriteOpenAI(w, r, err, traceID, s.log)
		return
	}
	if rt.page && !rt.stream && s.pages != nil {
		s.writeErrorPage(w, r, err)
		return
	}
	problem.Write(w, r, err, traceID, s.log)
}

// write encodes the body before it sends the first byte, so an encoding error can still become a problem response.
func (s *server) write(w http.ResponseWriter, r *http.Request, rt route, resp response) {
	encoded, err := encode(resp.body)
	if err != nil {
		s.writeError(w, r, rt, err, resp.trace)
		return
	}
	if resp.trace != "" {
		w.Header().Set("X-Trace-Id", resp.trace)
	}
	if resp.revision > 0 {
		w.Header().Set("ETag", etag(resp.revision))
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(encoded)))
	w.WriteHeader(resp.status)
	if _, err := w.Write(encoded); err != nil {
		s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
	}
}
