package api

import (
	"errors"
	"mime"
	"net"
	"net/http"
	"os"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/problem"
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
