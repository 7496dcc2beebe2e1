package admission_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// mustAcquire acquires a hold.
func mustAcquire(t *testing.T, b *admission.Budget, n int64, shares ...admission.Share) *admission.Hold {
	t.Helper()
	h, err := b.Acquire(n, shares...)
	if err != nil {
		t.Fatalf("%d of %d acquired: %v", n, b.Used(), err)
	}
	return h
}

// mustBeFull checks that a hold is rejected.
func mustBeFull(t *testing.T, b *admission.Budget, n int64, shares ...admission.Share) {
	t.Helper()
	if _, err := b.Acquire(n, shares...); !errors.Is(err, admission.ErrFull) {
		t.Errorf("%d more than %d: %v", n, b.Used(), err)
	}
}

func TestShareBoundsName(t *testing.T) {
	t.Parallel()
	b := admission.New(10)
	a := admission.Share{Name: "a", Limit: 4}
	first := mustAcquire(t, b, 4, a)
	mustBeFull(t, b, 1, a)
	other := mustAcquire(t, b, 6, admission.Share{Name: "b", Limit: 6})
	mustBeFull(t, b, 1, admission.Share{Name: "c", Limit: 6})
	first.Release()
	first.Release() // a second Release does nothing
	assert.Equal(t, 6, b.Used())
	mustAcquire(t, b, 4, a).Release()
	other.Release()
	assert.Equal(t, 0, b.Used())
}

func TestFirstHoldMayExceedShare(t *testing.T) {
	t.Parallel()
	b := admission.New(10)
	a := admission.Share{Name: "a", Limit: 4}
	large := mustAcquire(t, b, 8, a)
	mustBeFull(t, b, 1, a)
	assert.NoError(t, large.Add(2), "its own growth")
	mustBeFull(t, b, 1, admission.Share{Name: "b", Limit: 4})
	large.Release()
	mustAcquire(t, b, 11, a).Release() // a single hold may exceed the budget
}

// One body may be larger than a share. The holds of others, and their reserve, stay available.
func TestExceedingHoldLeavesOtherShares(t *testing.T) {
	t.Parallel()
	b := admission.New(100)
	a := admission.Share{Name: "a", Limit: 10}
	large := mustAcquire(t, b, 30, a)
	mustBeFull(t, b, 1, a)
	rest := mustAcquire(t, b, 70, admission.Share{Name: "b", Limit: 80})
	large.Return(25)
	mustAcquire(t, b, 5, a).Release()
	rest.Release()
	large.Release()
	assert.Equal(t, 0, b.Used())
}

func TestHoldLastsUntilLastRelease(t *testing.T) {
	t.Parallel()
	b := admission.New(1)
	h := mustAcquire(t, b, 1)
	h.Keep()
	h.Release()
	mustBeFull(t, b, 1)
	h.Release()
	mustAcquire(t, b, 1).Release()
}

func TestConcurrentHoldsStayWithinBudget(t *testing.T) {
	t.Parallel()
	b := admission.New(8)
	var group sync.WaitGroup
	for i := range 32 {
		group.Go(func() {
			for range 200 {
				h, err := b.Acquire(1, admission.Share{Name: string(rune('a' + i%4)), Limit: 3})
				if err != nil {
					continue
				}
				used := b.Used()
				assert.Truef(t, used <= 8, "%d of 8 are acquired", used)
				h.Release()
			}
		})
	}
	group.Wait()
	assert.Equal(t, 0, b.Used())
}

// serve returns the address of a server with a bounded number of connections.
func serve(t *testing.T, most int, handler http.HandlerFunc) (address string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{
		ConnContext: admission.ConnContext, ReadHeaderTimeout: time.Minute, Handler: admission.Handler(handler),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(admission.Listen(l, most))
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	return l.Addr().String()
}

func dial(t *testing.T, address string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(90*time.Second)))
	return c, bufio.NewReader(c)
}

// request checks that a connection gets a response.
func request(t *testing.T, c net.Conn, in *bufio.Reader) {
	t.Helper()
	fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	w, err := http.ReadResponse(in, nil)
	require.NoError(t, err, "no answer")
	_ = w.Body.Close()
}

// Strangers may hold any number of connections open. The server serves a new client, and active requests continue.
func TestNewConnectionClosesIdleOne(t *testing.T) {
	t.Parallel()
	slow, end := make(chan struct{}), make(chan struct{})
	address := serve(t, 4, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			slow <- struct{}{}
			<-end
		}
	})
	busy, answer := dial(t, address)
	fmt.Fprint(busy, "GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
	<-slow
	silent, nothing := dial(t, address)
	for range 8 {
		c, _ := dial(t, address)
		fmt.Fprint(c, "GET / HT") // an incomplete header
	}
	for range 3 {
		c, in := dial(t, address)
		request(t, c, in)
		request(t, c, in) // over the same connection
	}
	if _, err := nothing.ReadByte(); err == nil {
		t.Errorf("the connection that was idle for longest, %s, is open", silent.LocalAddr())
	}
	close(end)
	w, err := http.ReadResponse(answer, nil)
	require.NoError(t, err, "what was in work")
	_ = w.Body.Close()
}

// A connection with an unsent body closes when others need one. A connection with an arriving body stays.
func TestNewConnectionClosesSilentBody(t *testing.T) {
	t.Parallel()
	got := make(chan error, 16)
	address := serve(t, 2, func(w http.ResponseWriter, r *http.Request) {
		got <- admission.Read(w, r, admission.Limits{MaxBytes: 1000})
	})
	begin := func() (net.Conn, *bufio.Reader) {
		c, in := dial(t, address)
		fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n")
		line, err := in.ReadString('\n')
		require.Truef(t, err == nil && line == "HTTP/1.1 100 Continue\r\n", "%q, %v", line, err)
		return c, in
	}
	_, _ = begin() // no further data
	sending, answer := begin()
	_, _ = begin()
	assert.Error(t, <-got, "a body that was not sent was read")
	fmt.Fprint(sending, "0123456789")
	assert.NoError(t, <-got, "a body that was sent")
	for {
		line, err := answer.ReadString('\n')
		require.NoError(t, err)
		if line == "HTTP/1.1 200 OK\r\n" {
			return
		}
	}
}

// Active requests may hold more connections than the bound. Once they are idle, the next connection closes the surplus.
func TestNewConnectionClosesSurplus(t *testing.T) {
	t.Parallel()
	begun, end := make(chan struct{}), make(chan struct{})
	address := serve(t, 2, func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			begun <- struct{}{}
			<-end
		}
	})
	answers := make([]*bufio.Reader, 5)
	for i := range answers {
		var c net.Conn
		c, answers[i] = dial(t, address)
		fmt.Fprint(c, "GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
		<-begun
	}
	close(end)
	for _, in := range answers {
		w, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		_ = w.Body.Close()
	}
	c, in := dial(t, address)
	request(t, c, in)
	closed := make(chan error, len(answers))
	for _, in := range answers {
		go func() {
			_, err := in.ReadByte()
			closed <- err
		}()
	}
	for range 4 { // two connections stay open: the new one and one of the five
		err := <-closed
		assert.Truef(t, err != nil && !errors.Is(err, os.ErrDeadlineExceeded), "a surplus connection stays open: %v", err)
	}
}
