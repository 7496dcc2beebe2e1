package admission_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/admission"
)

// reading is a server that reads bodies within limits and says what came of each.
func reading(t *testing.T, l admission.Limits) (url string, got chan error) {
	t.Helper()
	got = make(chan error, 16)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := admission.Read(w, r, l)
		if err == nil {
			var raw []byte
			if raw, err = admission.All(w, r, l.Most); err == nil && !bytes.Equal(raw, bytes.Repeat([]byte("x"), len(raw))) {
				err = errors.New("the body is another")
			}
			_ = r.Body.Close()
		}
		got <- err
	}))
	t.Cleanup(server.Close)
	return server.URL, got
}

// post sends a body, whose length is told unless it is chunked.
func post(t *testing.T, url string, size int, chunked bool) {
	t.Helper()
	var body io.Reader = strings.NewReader(strings.Repeat("x", size))
	if chunked {
		body = io.MultiReader(body)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	if w, err := http.DefaultClient.Do(r); err == nil {
		_ = w.Body.Close()
	}
}

func TestABodyIsReadWithinItsLimit(t *testing.T) {
	t.Parallel()
	const most = 300_000
	budget := admission.New(most + 1)
	url, got := reading(t, admission.Limits{Most: most, Time: time.Minute, Budget: budget})
	for name, c := range map[string]struct {
		size    int
		chunked bool
		large   bool
	}{
		"empty": {0, false, false}, "whole": {most, false, false}, "larger": {most + 1, false, true},
		"chunked": {most, true, false}, "larger chunked": {most + 1, true, true},
	} {
		post(t, url, c.size, c.chunked)
		err := <-got
		if _, large := errors.AsType[*admission.TooLarge](err); large != c.large || err != nil && !large {
			t.Errorf("%s: %v", name, err)
		}
		if budget.Used() != 0 {
			t.Errorf("%s: %d bytes are not given back", name, budget.Used())
		}
	}
}

// A body takes its length before it is read; one that does not tell takes what it has grown to.
func TestBodiesShareABudget(t *testing.T) {
	t.Parallel()
	budget := admission.New(1 << 20)
	url, got := reading(t, admission.Limits{Most: 1 << 20, Time: time.Minute, Budget: budget})
	hold, err := budget.Take(900_000)
	if err != nil {
		t.Fatal(err)
	}
	for _, chunked := range []bool{false, true} {
		post(t, url, 100_000, false)
		if err := <-got; err != nil {
			t.Errorf("a small body: %v", err)
		}
		post(t, url, 500_000, chunked)
		if err := <-got; !errors.Is(err, admission.ErrFull) {
			t.Errorf("a large body, chunked %t: %v", chunked, err)
		}
	}
	hold.Release()
	if budget.Used() != 0 {
		t.Errorf("%d bytes are not given back", budget.Used())
	}
}

// A sender that falls behind the pace is given up long before the whole time is over.
func TestABodyThatIsNotSentIsGivenUpEarly(t *testing.T) {
	t.Parallel()
	budget := admission.New(1 << 20)
	url, got := reading(t, admission.Limits{Most: 1 << 20, Time: 20 * time.Second, Budget: budget})
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	began := time.Now()
	if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nxxx"); err != nil {
		t.Fatal(err)
	}
	err = <-got
	if took := time.Since(began); !errors.Is(err, os.ErrDeadlineExceeded) || took < 4*time.Second || took > 15*time.Second {
		t.Errorf("after %s: %v", took, err)
	}
	if budget.Used() != 0 {
		t.Errorf("%d bytes are not given back", budget.Used())
	}
}
