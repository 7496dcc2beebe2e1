package credentials

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

const (
	strong = "0123456789abcdef0123456789abcdeX"
	weak   = "correct-horse-17"
)

// guardTest is a guard with its own clock and log.
type guardTest struct {
	*Guard
	clock time.Time
	log   bytes.Buffer
}

func newGuardTest() *guardTest {
	s := &guardTest{clock: time.Unix(1_800_000_000, 0)}
	s.Guard = NewGuard(slog.New(slog.NewTextHandler(&s.log, nil)))
	s.now = func() time.Time { return s.clock }
	return s
}

func requestFrom(t *testing.T, address string) *http.Request {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	r.RemoteAddr = address
	return r
}

func waitOf(err error) time.Duration {
	if w, is := errors.AsType[*Wait](err); is {
		return w.For
	}
	return 0
}

func TestWaitGrowsWithFailures(t *testing.T) {
	t.Parallel()
	s, r := newGuardTest(), requestFrom(t, "192.0.2.1:99")
	key := NewKey("", weak)
	var got []time.Duration
	for range 15 {
		if _, ok, err := s.Check(r, Admin, "wrong", key); ok || err != nil {
			t.Fatalf("%v, %v", ok, err)
		}
		_, _, err := s.Check(r, Admin, weak, key)
		got = append(got, waitOf(err))
		s.clock = s.clock.Add(waitOf(err))
	}
	want := "[0s 0s 0s 0s 1s 2s 4s 8s 16s 30s 30s 30s 30s 30s 30s]"
	assert.Equal(t, want, fmt.Sprint(got), got)
	_, ok, err := s.Check(r, Admin, weak, key)
	assert.Truef(t, ok && err == nil, "the right one after the wait: %v, %v", ok, err)
	s.clock = s.clock.Add(forgetAfter + time.Second)
	for range freeTries - 1 {
		_, _, _ = s.Check(r, Admin, "wrong", key)
	}
	_, ok, err = s.Check(r, Admin, weak, key)
	assert.Truef(t, ok && err == nil, "the address did not begin again: %v, %v", ok, err)
}

func TestValidSecretPasses(t *testing.T) {
	t.Parallel()
	s, guesser := newGuardTest(), requestFrom(t, "192.0.2.1:99")
	keys := []Key{NewKey("strong", strong), NewKey("weak", weak)}
	for range 1000 {
		_, _, _ = s.Check(guesser, Admin, "wrong", keys...)
	}
	for name, c := range map[string]struct {
		at     *http.Request
		kind   Kind
		secret string
		passes bool
	}{
		"strong, same address": {guesser, Admin, strong, true},
		"weak, same address":   {guesser, Admin, weak, false},
		"weak, another kind":   {guesser, Chat, weak, true},
		"weak, elsewhere":      {requestFrom(t, "192.0.2.2:99"), Admin, weak, true},
	} {
		name2, ok, err := s.Check(c.at, c.kind, c.secret, keys...)
		passes := ok && err == nil
		assert.Truef(t, passes == c.passes && (!passes || name2 == strings.Fields(strings.ReplaceAll(name, ",", " "))[0]),
			"%s: %s, %v, %v", name, name2, ok, err)
		assert.Equal(t, c.passes, s.Knows(c.at, c.kind, c.secret, keys...), name)
	}
}

func TestEmptySecretIsRejected(t *testing.T) {
	t.Parallel()
	s, r := newGuardTest(), requestFrom(t, "192.0.2.1:99")
	for name, keys := range map[string][]Key{"no key": nil, "an empty key": {NewKey("", "")}, "the zero value": {{}}} {
		_, ok, _ := s.Check(r, Chat, "", keys...)
		assert.Truef(t, !ok, "%s is opened by nothing", name)
	}
}

func TestHostCountsAsOneAddress(t *testing.T) {
	t.Parallel()
	s := newGuardTest()
	for i := range 100 {
		_, _, _ = s.Check(requestFrom(t, fmt.Sprintf("[2001:db8::%x]:99", i)), Admin, "wrong", NewKey("", weak))
	}
	_, _, err := s.Check(requestFrom(t, "[2001:db8::ffff]:1"), Admin, weak, NewKey("", weak))
	assert.True(t, waitOf(err) != 0, "the next address of its network does not wait")
}

func TestGuardMemoryIsBounded(t *testing.T) {
	t.Parallel()
	s := newGuardTest()
	for i := range maxAddresses + 100 {
		r := requestFrom(t, fmt.Sprintf("10.%d.%d.%d:9", i>>16, i>>8&255, i&255))
		_, _, _ = s.Check(r, Admin, "wrong", NewKey("", weak))
	}
	assert.Equal(t, maxAddresses, len(s.bySource))
	assert.Equal(t, maxAddresses, s.order.Len())
}

func TestFailuresAreLoggedRarely(t *testing.T) {
	t.Parallel()
	s := newGuardTest()
	for i := range 3000 {
		_, _, _ = s.Check(requestFrom(t, fmt.Sprintf("10.0.%d.%d:9", i>>8, i&255)), Admin, "sesame-sesame", NewKey("", weak))
		s.clock = s.clock.Add(time.Millisecond)
	}
	s.clock = s.clock.Add(logEvery)
	_, _, _ = s.Check(requestFrom(t, "10.9.9.9:9"), Admin, "sesame-sesame", NewKey("", weak))
	lines := strings.Split(strings.TrimSpace(s.log.String()), "\n")
	assert.Truef(t, len(lines) == 2 && strings.Contains(lines[0], "remote=10.0.0.0") &&
		strings.Contains(lines[1], "unlogged_before=2999"), "%d lines: %s", len(lines), s.log.String())
	assert.True(t, !strings.Contains(s.log.String(), "sesame"), "the log has the presented secret")
}

func TestWeakSecrets(t *testing.T) {
	t.Parallel()
	for secret, why := range map[string]string{
		"":                                  "fewer than 16 characters",
		"x":                                 "fewer than 16 characters",
		"123456789012345":                   "fewer than 16 characters",
		"aaaaaaaaaaaaaaaaaaaaaaaa":          "different characters",
		"abcdefgabcdefgaabcdefg":            "different characters",
		"abcdefghABCDEFGHabcdefgh":          "repeated",
		"hunter2-hunter2-hunter2":           "repeated",
		"0123456789-0123456789-01":          "repeated",
		"replace-me-with-a-long-random-one": "placeholder",
		"Change-Me-0123456789":              "placeholder",
		"<openssl-rand-hex-32>":             "placeholder",
	} {
		got := Weak(secret)
		assert.Truef(t, got != "" && strings.Contains(got, why), "%q: %q, want %q", secret, got, why)
		assert.Truef(t, !Strong(secret), "%q is strong", secret)
	}
	for range 1000 {
		for _, secret := range []string{rand.Text(), fmt.Sprintf("%x", random(16)), fmt.Sprintf("%x", random(32))} {
			if why := Weak(secret); why != "" || !Strong(secret) {
				t.Errorf("%s: weak: %s, strong: %v", secret, why, Strong(secret))
			}
		}
	}
	for _, secret := range []string{weak, "a-token-of-mine-2", "0123456789abcdef"} {
		if why := Weak(secret); why != "" || Strong(secret) {
			t.Errorf("%s: weak: %s, strong: %v", secret, why, Strong(secret))
		}
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// A browser sends an expired cookie with each request. Together they count as one wrong try. Different ones are
// guesses.
