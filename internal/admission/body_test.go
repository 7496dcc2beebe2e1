package admission_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// serveBodies starts a server that reads bodies within limits and reports each outcome.
func serveBodies(t *testing.T, l admission.Limits) (url string, got chan error) {
	t.Helper()
	got = make(chan error, 16)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := admission.Read(w, r, l)
		if err == nil {
			var raw []byte
			if raw, err = admission.All(w, r, l.MaxBytes); err != nil {
				err = errors.New("it was read beyond its limit: " + err.Error())
			} else if !bytes.Equal(raw, bytes.Repeat([]byte("x"), len(raw))) {
				err = errors.New("the body is another")
			}
			_ = r.Body.Close()
		}
		got <- err
	}))
	t.Cleanup(server.Close)
	return server.URL, got
}

// post sends a body. It announces the length, or sends chunks.
func post(t *testing.T, url string, size int, chunked bool) {
	t.Helper()
	var body io.Reader = strings.NewReader(strings.Repeat("x", size))
	if chunked {
		body = io.MultiReader(body)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
	require.NoError(t, err)
	if w, err := http.DefaultClient.Do(r); err == nil {
		_ = w.Body.Close()
	}
}

func TestBodyLimit(t *testing.T) {
	t.Parallel()
	const most = 300_000
	budget := admission.New(most + 1)
	url, got := serveBodies(t, admission.Limits{MaxBytes: most, Time: time.Minute, Budget: budget})
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
		_, large := errors.AsType[*admission.TooLarge](err)
		assert.Truef(t, large == c.large && (err == nil || large), "%s: %v", name, err)
		assert.Equal(t, 0, budget.Used(), name)
	}
}

// An announced length acquires nothing. Received bytes acquire at most as much again.
func TestAnnouncedLengthCountsNothing(t *testing.T) {
	t.Parallel()
	budget := admission.NewBytes(1 << 20)
	url, got := serveBodies(t, admission.Limits{MaxBytes: 1 << 20, Time: time.Minute, Budget: budget})
	silent, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "http://"))
	require.NoError(t, err)
	defer silent.Close()
	const header = "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n\r\n"
	_, err = io.WriteString(silent, header)
	require.NoError(t, err)
	line, err := bufio.NewReader(silent).ReadString('\n')
	require.Truef(t, err == nil && strings.Contains(line, "100"), "%s, %v", line, err)
	assert.Equal(t, 0, budget.Used())
	sent := 0
	for _, more := range []int{1, 20_000, 100_000} {
		_, err := io.WriteString(silent, strings.Repeat("x", more))
		require.NoError(t, err)
		sent += more
		for until := time.Now().Add(time.Minute); budget.Used() < int64(sent) && time.Now().Before(until); {
			runtime.Gosched()
		}
		n := budget.Used()
		assert.Truef(t, n <= int64(2*sent+1<<10), "%d bytes are acquired for %d", n, sent)
	}
	post(t, url, 700_000, false)
	assert.NoError(t, <-got, "another body")
	_ = silent.Close()
	assert.Error(t, <-got, "the silent one was read")
	assert.Equal(t, 0, budget.Used())
}

// Large bodies leave a reserve for bodies with a small announced length.
func TestSmallBodyUsesReserve(t *testing.T) {
	t.Parallel()
	const most = 8 * admission.Small
	budget := admission.NewBytes(most)
	url, got := serveBodies(t, admission.Limits{MaxBytes: most, Time: time.Minute, Budget: budget})
	_, err := budget.Acquire(most - admission.Small)
	require.NoError(t, err)
	for _, c := range []struct {
		size    int
		chunked bool
		want    error
	}{
		{1, false, nil},
		{admission.Small, false, nil},
		{admission.Small + 1, false, admission.ErrFull},
		{1, true, admission.ErrFull},
	} {
		post(t, url, c.size, c.chunked)
		assert.ErrorIs(t, <-got, c.want, c.size, "bytes, chunked", c.chunked, c.want)
	}
}

// Bodies arrive complete, with all sizes around those of the pieces.
func TestBodyOfEverySize(t *testing.T) {
	t.Parallel()
	budget := admission.NewBytes(8 << 20)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := admission.Read(w, r, admission.Limits{MaxBytes: 1 << 20, Time: time.Minute, Budget: budget}); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		defer r.Body.Close()
		raw, err := admission.Bytes(r.Body)
		if err != nil || budget.Used() < int64(len(raw)) {
			http.Error(w, "bytes that were not taken", http.StatusBadRequest)
			return
		}
		_, _ = w.Write(raw)
	}))
	defer server.Close()
	random := rand.New(rand.NewPCG(1, 2))
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(random.Uint32())
	}
	for _, size := range []int{
		0, 1, 2, 1023, 1024, 1025, 2048, 4097, 65535, 65536, 65537, 131072, 131073, 200_000, 1<<20 - 1, 1 << 20,
	} {
		for _, chunked := range []bool{false, true} {
			var body io.Reader = bytes.NewReader(sent[:size])
			if chunked {
				body = iotest.HalfReader(io.MultiReader(body))
			}
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, body)
			require.NoError(t, err)
			w, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			got, err := io.ReadAll(w.Body)
			_ = w.Body.Close()
			assert.Truef(t, err == nil && w.StatusCode == http.StatusOK && bytes.Equal(got, sent[:size]),
				"%d bytes, chunked %t: %d, %d bytes, %v", size, chunked, w.StatusCode, len(got), err)
		}
	}
	assert.Equal(t, 0, budget.Used())
}

// A body acquires its bytes as they arrive, with or without an announced length.
func TestBodiesShareABudget(t *testing.T) {
	t.Parallel()
	budget := admission.New(1 << 20)
	url, got := serveBodies(t, admission.Limits{MaxBytes: 1 << 20, Time: time.Minute, Budget: budget})
	hold, err := budget.Acquire(900_000)
	require.NoError(t, err)
	for _, chunked := range []bool{false, true} {
		post(t, url, 100_000, false)
		assert.NoError(t, <-got, "a small body")
		post(t, url, 500_000, chunked)
		assert.ErrorIs(t, <-got, admission.ErrFull, "a large body, chunked", chunked)
	}
	hold.Release()
	assert.Equal(t, 0, budget.Used())
}

// The server cuts off a slow sender long before the maximum time.
func TestUnsentBodyFailsEarly(t *testing.T) {
	t.Parallel()
	budget := admission.New(1 << 20)
	url, got := serveBodies(t, admission.Limits{MaxBytes: 1 << 20, Time: 20 * time.Second, Budget: budget})
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(url, "http://"))
	require.NoError(t, err)
	defer c.Close()
	began := time.Now()
	_, err = io.WriteString(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nxxx")
	require.NoError(t, err)
	err = <-got
	took := time.Since(began)
	assert.Truef(t, errors.Is(err, os.ErrDeadlineExceeded) && took >= 4*time.Second && took <= 15*time.Second,
		"after %s: %v", took, err)
	assert.Equal(t, 0, budget.Used())
}
