package api

import (
	"context"
	"errors"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxConnections bounds the connections of a process. It exceeds the request limits of all classes, so the server can
// always close an idle connection for a new one.
const maxConnections = 8192

// Listen bounds the connections of [Server].
func Listen(l net.Listener) net.Listener { return admission.Listen(l, maxConnections) }

// expectation checks a request before the server reads its body. It returns the request and its body limit in bytes.
type expectation func(r *http.Request) (*http.Request, int64, error)

// limits limit a class of requests: in total, and per chat key, webhook endpoint and address. 0 disables that limit.
type limits struct {
	all, key, endpoint, address int64
	budget                      *admission.Budget
}

// requestClass groups requests with a shared budget. No class can use the budget of another class.
type requestClass struct{ requests, bytes limits }

type requestClasses struct{ webhook, public, login, chat, admin requestClass }

// newClasses returns the limits of a process, sized for a few hundred MB of memory. Normal load stays far below them.
func newClasses() requestClasses {
	newClass := func(requests, bytes limits) requestClass {
		requests.budget, bytes.budget = admission.New(requests.all), admission.NewBytes(bytes.all)
		return requestClass{requests, bytes}
	}
	return requestClasses{
		webhook: newClass(limits{all: 256, endpoint: 128, address: 128},
			limits{all: 32 << 20, endpoint: 16 << 20, address: 8 << 20}),
		public: newClass(limits{all: 256, address: 128}, limits{all: 4 << 20, address: 1 << 20}),
		login:  newClass(limits{all: 64, address: 16}, limits{all: 1 << 20, address: 256 << 10}),
		chat:   newClass(limits{all: 3072, key: 2304, address: 1536}, limits{all: 24 << 20, key: 16 << 20, address: 4 << 20}),
		admin:  newClass(limits{all: 2048}, limits{all: 64 << 20}),
	}
}

// of returns the class of a route.
func (b *requestClasses) of(rt route) *requestClass {
	switch {
	case rt.expect != nil:
		return &b.webhook
	case rt.path == loginPath || strings.HasPrefix(rt.path, oidcPath):
		return &b.login
	case rt.access == Public:
		return &b.public
	case rt.access == Visitor:
		return &b.chat
	}
	return &b.admin
}

// subLimits returns the sub-limits that apply to a request.
func (l limits) subLimits(r *http.Request) (shares []admission.Share) {
	if name, visitor := VisitorFrom(r.Context()); visitor && l.key > 0 {
		shares = append(shares, admission.Share{Name: "key " + name, Limit: l.key})
	}
	if l.endpoint > 0 {
		shares = append(shares, admission.Share{Name: "endpoint " + r.URL.Path, Limit: l.endpoint})
	}
	if l.address > 0 {
		shares = append(shares, admission.Share{Name: "address " + clientip.Key(r), Limit: l.address})
	}
	return shares
}

// admit checks for a free slot of the request's class, buffers the body without holding one, then acquires it. release
// returns it.
func (s *server) admit(w http.ResponseWriter, r *http.Request, rt route) (_ *http.Request, release func(), err error) {
	if rt.probe {
		return r, func() {}, nil
	}
	c := s.classes.of(rt)
	r, limit, err := s.precheck(r, rt, c)
	if err == nil {
		err = s.bufferBody(w, r, rt, c, limit)
	}
	if err != nil {
		return r, nil, tooManyRequests(w, err)
	}
	hold, err := c.requests.budget.Acquire(1, c.requests.subLimits(r)...)
	if err != nil {
		_ = r.Body.Close()
		return r, nil, tooManyRequests(w, err)
	}
	return r, func() {
		defer hold.Release()
		_ = r.Body.Close()
	}, nil
}

// precheck rejects a request if its class has no free slot or its route does not expect it. It returns the body limit.
func (s *server) precheck(r *http.Request, rt route, c *requestClass) (*http.Request, int64, error) {
	hold, err := c.requests.budget.Acquire(1, c.requests.subLimits(r)...)
	if err != nil {
		return r, 0, err
	}
	defer hold.Release()
	if rt.expect == nil {
		return r, rt.maxBody, nil
	}
	expected, limit, err := rt.expect(r)
	if err != nil {
		return r, 0, err
	}
	return expected, min(limit, rt.maxBody), nil
}

// tooManyRequests adds Retry-After when a budget is exhausted.
func tooManyRequests(w http.ResponseWriter, err error) error {
	if !errors.Is(err, admission.ErrFull) {
		return tooManyTries(w, err) // throttled credentials
	}
	w.Header().Set("Retry-After", admission.RetryAfter)
	return problem.New(http.StatusTooManyRequests, "too many requests; retry in %s s", admission.RetryAfter)
}

// bufferBody reads the body into memory, if the route accepts one.
func (s *server) bufferBody(w http.ResponseWriter, r *http.Request, rt route, c *requestClass, limit int64) error {
	if rt.maxBody == 0 || r.Method == http.MethodGet || r.Method == http.MethodHead {
		if r.ContentLength != 0 {
			w.Header().Set("Connection", "close") // the server does not read the body
		}
		return nil
	}
	if rt.wantsJSON() && (r.ContentLength != 0 || r.Header.Get("Content-Type") != "") {
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			return problem.New(http.StatusUnsupportedMediaType, "send JSON, with Content-Type: application/json")
		}
	}
	err := admission.Read(w, r, admission.Limits{
		MaxBytes: limit, Time: s.timeouts.body, Budget: c.bytes.budget, Shares: c.bytes.subLimits(r),
	})
	if err != nil {
		w.Header().Set("Connection", "close") // the server does not read the rest of the body
		return s.bodyError(err)
	}
	return nil
}

// bodyError maps a failed body transfer to a problem.
func (s *server) bodyError(err error) error {
	if large, ok := errors.AsType[*admission.TooLarge](err); ok {
		return problem.New(http.StatusRequestEntityTooLarge, "%s", large)
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() || errors.Is(err, os.ErrDeadlineExceeded) {
		return problem.New(http.StatusRequestTimeout, "body not received within %s", s.timeouts.body)
	}
	if errors.Is(err, admission.ErrFull) {
		return err
	}
	return problem.BadBody("the body is incomplete")
}

// timeouts are the time limits of a request.
type timeouts struct {
	request time.Duration // of a request other than a stream
	body    time.Duration // to receive a body
	send    time.Duration // to send a response, or a part of a stream
}

// defaultTimeouts returns the time limits of production. A request has 40 s; lanes.Break waits about one
// second for a fenced write.
func defaultTimeouts() timeouts {
	return timeouts{request: 40 * time.Second, body: 30 * time.Second, send: 30 * time.Second}
}

// Server returns the http.Server for the handler of New. It sets header timeouts only. The handler limits each route,
// because a ReadTimeout or WriteTimeout would cut streams.
func Server(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: admission.Handler(h), ConnContext: admission.ConnContext, ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 32 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
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

// setDeadline sets a connection deadline; zero clears it. Errors are ignored: httptest recorders do not support
// deadlines, and on a closed connection the next read or write fails too.
func setDeadline(set func(time.Time) error, d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = set(at)
}

// withDeadline bounds the duration of a request, or prepares it as a stream.
func (s *server) withDeadline(rt route, next http.Handler) http.Handler {
	if !rt.stream {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), s.timeouts.request)
			defer cancel()
			next.ServeHTTP(w, r.WithContext(ctx))
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead { // a stream has no end, so HEAD cannot wait for it
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
