package api

import (
	"errors"
	"mime"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

type requestClasses struct{ webhook, public, login, chat, admin requestClass }

// requestClass groups requests with a shared budget. No class can use the budget of another class. waiting limits the
// requests that wait for a slot; the zero value lets none wait.
type requestClass struct{ requests, bytes, waiting limits }

// A request waits for a slot of its class at most slotWait, and tries every slotPoll.
const (
	slotWait = 2 * time.Second
	slotPoll = 20 * time.Millisecond
)

// limits limit a class of requests: in total, and per chat key, webhook endpoint and address. 0 disables that limit.
type limits struct {
	all, key, endpoint, address int64
	budget                      *admission.Budget
}

// newClasses returns the limits of a process, sized for a few hundred MB of memory. Normal load stays far below them.
func newClasses() requestClasses {
	newClass := func(requests, bytes limits) requestClass {
		requests.budget, bytes.budget = admission.New(requests.all), admission.NewBytes(bytes.all)
		return requestClass{requests: requests, bytes: bytes}
	}
	webhook := newClass(limits{all: 256, endpoint: 128, address: 128},
		limits{all: 32 << 20, endpoint: 16 << 20, address: 8 << 20})
	webhook.waiting = limits{all: 1024, endpoint: 512, address: 512, budget: admission.New(1024)}
	chatBytes := limits{all: 24 << 20, key: 16 << 20, address: 4 << 20}
	return requestClasses{
		webhook: webhook,
		public:  newClass(limits{all: 256, address: 128}, limits{all: 4 << 20, address: 1 << 20}),
		login:   newClass(limits{all: 64, address: 16}, limits{all: 1 << 20, address: 256 << 10}),
		chat:    newClass(limits{all: 3072, key: 2304, address: 1536}, chatBytes),
		admin:   newClass(limits{all: 2048}, limits{all: 64 << 20}),
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
		return r, nil, tooManyRequests(w, r, rt, err)
	}
	hold, err := c.acquireSlot(r)
	if err != nil {
		_ = r.Body.Close()
		return r, nil, tooManyRequests(w, r, rt, err)
	}
	return r, func() {
		defer hold.Release()
		_ = r.Body.Close()
	}, nil
}

// precheck rejects a request if its class has no free slot or its route does not expect it. It returns the body limit.
func (s *server) precheck(r *http.Request, rt route, c *requestClass) (*http.Request, int64, error) {
	hold, err := c.acquireSlot(r)
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

// acquireSlot acquires a slot of the class. It waits if the class lets requests wait. Webhooks do, because some senders
// never repeat a rejected request.
func (c *requestClass) acquireSlot(r *http.Request) (*admission.Hold, error) {
	hold, err := c.requests.budget.Acquire(1, c.requests.subLimits(r)...)
	if err == nil || c.waiting.budget == nil {
		return hold, err
	}
	waiting, err := c.waiting.budget.Acquire(1, c.waiting.subLimits(r)...)
	if err != nil {
		return nil, err
	}
	defer waiting.Release()
	for i := time.Duration(0); i < slotWait && sleep.For(r.Context(), slotPoll); i += slotPoll {
		if hold, err = c.requests.budget.Acquire(1, c.requests.subLimits(r)...); err == nil {
			return hold, nil
		}
	}
	return nil, err
}

// expectation checks a request before the server reads its body. It returns the request and its body limit in bytes.
type expectation func(r *http.Request) (*http.Request, int64, error)

// tooManyRequests adds Retry-After when a budget is exhausted, and reports that to the route.
func tooManyRequests(w http.ResponseWriter, r *http.Request, rt route, err error) error {
	if !errors.Is(err, admission.ErrFull) {
		return tooManyTries(w, err) // throttled credentials
	}
	if rt.busy != nil {
		rt.busy(r)
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
		return problem.New(http.StatusRequestTimeout, "the body arrived too slowly: send it evenly, within %s",
			s.timeouts.body)
	}
	if errors.Is(err, admission.ErrFull) {
		return err
	}
	return problem.BadBody("the body is incomplete")
}
