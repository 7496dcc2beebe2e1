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

type expectation func(r *http.Request) (*http.Request, int64, error)

// bound limits a class of requests: in total, and per chat key, webhook endpoint and address. 0 means no limit of its
// own.
type bound struct {
	all, key, endpoint, address int64
	budget                      *admission.Budget
}

// class groups requests with a shared budget. No class can use the budget of another class.
type class struct{ requests, bytes bound }

type classes struct{ intake, public, login, visitor, admin class }

// newClasses returns the limits of a process with some hundred MB. Normal load stays far below them.
func newClasses() classes {
	made := func(requests, bytes bound) class {
		requests.budget, bytes.budget = admission.New(requests.all), admission.NewBytes(bytes.all)
		return class{requests, bytes}
	}
	return classes{
		intake: made(bound{all: 256, endpoint: 128, address: 128}, // webhooks
			bound{all: 32 << 20, endpoint: 16 << 20, address: 8 << 20}),
		public:  made(bound{all: 256, address: 128}, bound{all: 4 << 20, address: 1 << 20}),
		login:   made(bound{all: 64, address: 16}, bound{all: 1 << 20, address: 256 << 10}),
		visitor: made(bound{all: 3072, key: 2304, address: 1536}, bound{all: 24 << 20, key: 16 << 20, address: 4 << 20}),
		admin:   made(bound{all: 2048}, bound{all: 64 << 20}),
	}
}

// of returns the class of a route.
func (b *classes) of(rt route) *class {
	switch {
	case rt.expect != nil:
		return &b.intake
	case rt.path == loginPath || strings.HasPrefix(rt.path, oidcPath):
		return &b.login
	case rt.access == Public:
		return &b.public
	case rt.access == Visitor:
		return &b.visitor
	}
	return &b.admin
}

// shares returns the shares that a request takes of a bound.
func (b bound) shares(r *http.Request) (shares []admission.Share) {
	if name, visitor := VisitorFrom(r.Context()); visitor && b.key > 0 {
		shares = append(shares, admission.Share{Name: "key " + name, Most: b.key})
	}
	if b.endpoint > 0 {
		shares = append(shares, admission.Share{Name: "endpoint " + r.URL.Path, Most: b.endpoint})
	}
	if b.address > 0 {
		shares = append(shares, admission.Share{Name: "address " + clientip.Key(r), Most: b.address})
	}
	return shares
}

// admit reserves the request's share of its class and buffers its body. release returns the share. The request holds
// no slot while its body arrives.
func (s *server) admit(w http.ResponseWriter, r *http.Request, rt route) (_ *http.Request, release func(), err error) {
	if rt.probe {
		return r, func() {}, nil
	}
	c := s.classes.of(rt)
	r, most, err := s.checkExpected(r, rt, c)
	if err == nil {
		err = s.bufferBody(w, r, rt, c, most)
	}
	if err != nil {
		return r, nil, tooManyRequests(w, err)
	}
	hold, err := c.requests.budget.Take(1, c.requests.shares(r)...)
	if err != nil {
		_ = r.Body.Close()
		return r, nil, tooManyRequests(w, err)
	}
	return r, func() {
		defer hold.Release()
		_ = r.Body.Close()
	}, nil
}

// checkExpected rejects a request without a free slot, or a request that its route does not expect. It returns the body
// limit.
func (s *server) checkExpected(r *http.Request, rt route, c *class) (*http.Request, int64, error) {
	hold, err := c.requests.budget.Take(1, c.requests.shares(r)...)
	if err != nil {
		return r, 0, err
	}
	defer hold.Release()
	if rt.expect == nil {
		return r, rt.maxBody, nil
	}
	expected, most, err := rt.expect(r)
	if err != nil {
		return r, 0, err
	}
	return expected, min(most, rt.maxBody), nil
}

// tooManyRequests adds Retry-After when a budget is exhausted.
func tooManyRequests(w http.ResponseWriter, err error) error {
	if !errors.Is(err, admission.ErrFull) {
		return tooManyTries(w, err) // a webhook's token
	}
	w.Header().Set("Retry-After", admission.RetryAfter)
	return problem.New(http.StatusTooManyRequests, "too many requests; retry in %s s", admission.RetryAfter)
}

// bufferBody reads the body into memory, if the route accepts one.
func (s *server) bufferBody(w http.ResponseWriter, r *http.Request, rt route, c *class, most int64) error {
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
		Most: most, Time: s.limits.body, Budget: c.bytes.budget, Shares: c.bytes.shares(r),
	})
	if err != nil {
		w.Header().Set("Connection", "close") // the server does not read the rest of the body
		return s.bodyError(err)
	}
	return nil
}

// bodyError maps a failed body transfer to a problem.
func (s *server) bodyError(err error) error {
	if large, is := errors.AsType[*admission.TooLarge](err); is {
		return problem.New(http.StatusRequestEntityTooLarge, "%s", large)
	}
	if timeout, is := errors.AsType[net.Error](err); is && timeout.Timeout() || errors.Is(err, os.ErrDeadlineExceeded) {
		return problem.New(http.StatusRequestTimeout, "the body did not arrive within %s, or too slowly", s.limits.body)
	}
	if errors.Is(err, admission.ErrFull) {
		return err
	}
	return problem.BadBody("the body is incomplete")
}

// limits has the time limits of a client.
type limits struct {
	request time.Duration // of a request other than a stream
	body    time.Duration // to receive a body
	send    time.Duration // to send a response, or a part of a stream
}

// defaultLimits returns limits that leave a request more time than lanes.Break needs.
func defaultLimits() limits {
	return limits{request: 40 * time.Second, body: 30 * time.Second, send: 30 * time.Second}
}

// Server returns the http.Server for the handler of New. It limits the header only. The handler limits each route,
// because a ReadTimeout or WriteTimeout would cut streams.
func Server(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: admission.Handler(h), ConnContext: admission.ConnContext, ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 32 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// authorize authenticates the caller and admits the request with its complete body.
func (s *server) authorize(rt route, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setDeadline(http.NewResponseController(w).SetWriteDeadline, s.limits.request+s.limits.send)
		r, err := s.auth.authenticate(w, r, rt)
		if err == nil {
			var leave func()
			if r, leave, err = s.admit(w, r, rt); err == nil {
				defer leave()
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
			if who := principals.From(r.Context()); who != nil && who.SessionID != "" {
				replica.Wrote(w, r) // this browser's next pages must show the change
			}
		}
		if caller := r.Header.Get("Traceparent"); caller != "" {
			r = r.WithContext(trace.WithCaller(r.Context(), caller))
		}
		next.ServeHTTP(w, r)
	})
}

// setDeadline sets a connection deadline; zero clears it. A test's ResponseWriter has no connection and ignores it.
func setDeadline(set func(time.Time) error, d time.Duration) {
	var at time.Time
	if d > 0 {
		at = time.Now().Add(d)
	}
	_ = set(at) // fails on a closed connection, as the next read or write will
}

// withDeadline bounds the duration of a request, or prepares it as a stream.
func (s *server) withDeadline(rt route, next http.Handler) http.Handler {
	if !rt.stream {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), s.limits.request)
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
			stop = s.cutting
		}
		ctx, leave := withStop(r.Context(), stop)
		defer leave()
		ctx, end := s.auth.sessions.watch(ctx, principals.From(ctx))
		defer end()
		next.ServeHTTP(&streamWriter{w, http.NewResponseController(w), s.limits.send}, r.WithContext(ctx))
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
func (w *streamWriter) Flush() { _ = w.FlushError() } // a disconnected client shows at the next write

func (w *streamWriter) FlushError() error {
	setDeadline(w.control.SetWriteDeadline, w.timeout)
	return w.control.Flush()
}

// Unwrap supports http.ResponseController.
func (w *streamWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
