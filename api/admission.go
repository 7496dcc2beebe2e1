package api

import (
	"context"
	"errors"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/trace"
)

// mostConnections is how many connections a process serves at once. It is more than all classes have requests in work,
// so that one of them is always idle and makes room for a new one.
const mostConnections = 8192

// Listen bounds the connections of [Server].
func Listen(l net.Listener) net.Listener { return admission.Listen(l, mostConnections) }

// expectation is Endpoint.Expect.
type expectation func(r *http.Request) (*http.Request, int64, error)

// bound is what a class of requests may have, and of it a chat key, a webhook endpoint and an address; 0 is no bound of
// their own.
type bound struct {
	all, key, endpoint, address int64
	budget                      *admission.Budget
}

// class is a sort of requests. None takes what another needs.
type class struct{ requests, bytes bound }

// budgets are the classes.
type budgets struct{ intake, public, login, visitor, admin class }

// newBudgets are the bounds of a process. They suit one of some hundred MB; what is far below is usual.
func newBudgets() budgets {
	made := func(requests, bytes bound) class {
		requests.budget, bytes.budget = admission.New(requests.all), admission.NewBytes(bytes.all)
		return class{requests, bytes}
	}
	return budgets{
		intake: made(bound{all: 256, endpoint: 128, address: 128}, // webhooks
			bound{all: 32 << 20, endpoint: 16 << 20, address: 8 << 20}),
		public: made(bound{all: 256, address: 128}, bound{all: 4 << 20, address: 1 << 20}),
		login:  made(bound{all: 64, address: 16}, bound{all: 1 << 20, address: 256 << 10}),
		visitor: made(bound{all: 3072, key: 2304, address: 1536},
			bound{all: 24 << 20, key: 16 << 20, address: 4 << 20}),
		admin: made(bound{all: 2048}, bound{all: 64 << 20}),
	}
}

// of is the class of a route.
func (b *budgets) of(rt route) *class {
	switch {
	case rt.expect != nil:
		return &b.intake
	case rt.path == loginPath:
		return &b.login
	case rt.access == Public:
		return &b.public
	case rt.access == Visitor:
		return &b.visitor
	}
	return &b.admin
}

// shares are those of a request in a bound.
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

// admit takes what the request needs of its class, and its body. leave gives it back. While the body arrives the
// request has no place among those in work.
func (s *server) admit(w http.ResponseWriter, r *http.Request, rt route) (_ *http.Request, leave func(), err error) {
	if rt.probe {
		return r, func() {}, nil
	}
	c := s.budgets.of(rt)
	r, most, err := s.expected(r, rt, c)
	if err == nil {
		err = s.takeBody(w, r, rt, c, most)
	}
	if err != nil {
		return r, nil, full(w, err)
	}
	hold, err := c.requests.budget.Take(1, c.requests.shares(r)...)
	if err != nil {
		_ = r.Body.Close()
		return r, nil, full(w, err)
	}
	return r, func() {
		defer hold.Release()
		_ = r.Body.Close()
	}, nil
}

// expected refuses a request for which there is no place, or that its route does not expect, and says how large its
// body may be.
func (s *server) expected(r *http.Request, rt route, c *class) (*http.Request, int64, error) {
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

// full says when to come again, where too much is under way.
func full(w http.ResponseWriter, err error) error {
	if !errors.Is(err, admission.ErrFull) {
		return refusedTry(w, err) // of a webhook's token
	}
	w.Header().Set("Retry-After", admission.RetryAfter)
	return problem.New(http.StatusTooManyRequests, "too much is under way here; try again in %s s", admission.RetryAfter)
}

// takeBody reads the body of a route that takes one into memory.
func (s *server) takeBody(w http.ResponseWriter, r *http.Request, rt route, c *class, most int64) error {
	if rt.maxBody == 0 || r.Method == http.MethodGet || r.Method == http.MethodHead {
		if r.ContentLength != 0 {
			w.Header().Set("Connection", "close") // nobody waits for a body that nobody reads
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
		w.Header().Set("Connection", "close") // the rest of the body is not read
		return s.badTransfer(err)
	}
	return nil
}

// badTransfer says why a body did not arrive.
func (s *server) badTransfer(err error) error {
	if large, is := errors.AsType[*admission.TooLarge](err); is {
		return problem.New(http.StatusRequestEntityTooLarge, "%s", large)
	}
	if timeout, is := errors.AsType[net.Error](err); is && timeout.Timeout() || errors.Is(err, os.ErrDeadlineExceeded) {
		return problem.New(http.StatusRequestTimeout, "the body did not arrive within %s, or too slowly for that", s.limits.body)
	}
	if errors.Is(err, admission.ErrFull) {
		return err
	}
	return badBody("the body did not arrive whole")
}

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
