package api

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

func TestALoginLastsTwelveHours(t *testing.T) {
	t.Parallel()
	s, err := newSessions("token")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Unix(1_800_000_000, 0)
	s.now = func() time.Time { return began }
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	r.AddCookie(s.begin(r))
	for after, want := range map[time.Duration]bool{0: true, sessionLasts - time.Second: true, sessionLasts: false, 24 * time.Hour: false} {
		s.now = func() time.Time { return began.Add(after) }
		if until, valid := s.of(r); valid != want || !until.Equal(began.Add(12*time.Hour)) {
			t.Errorf("after %s: valid is %v, until %s", after, valid, until)
		}
	}
}

func TestTheBrakeIsShortAndForgets(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_800_000_000, 0)
	b := newBrake()
	b.now = func() time.Time { return now }
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/login", http.NoBody)
	wrong, right := func() bool { return false }, func() bool { return true }
	var waits []time.Duration
	for range 15 {
		_, _ = b.try(r, wrong)
		_, wait := b.try(r, func() bool {
			if len(waits) >= free-1 {
				t.Error("who has to wait is asked")
			}
			return false
		})
		if wait > 0 {
			waits = append(waits, wait)
			now = now.Add(wait)
		} else {
			waits = append(waits, 0)
		}
	}
	if last := waits[len(waits)-1]; last != mostWait {
		t.Errorf("waits are %v, the longest has to be %s", waits, mostWait)
	}
	if is, wait := b.try(r, right); !is || wait != 0 {
		t.Error("the right token is refused after the wait")
	}
	for range free {
		_, _ = b.try(r, wrong)
	}
	now = now.Add(forget + time.Second)
	if _, wait := b.try(r, wrong); wait != 0 {
		t.Errorf("after %s the address has to wait %s", forget, wait)
	}
	if _, wait := b.try(r, wrong); wait != 0 {
		t.Errorf("the address did not begin anew: it has to wait %s", wait)
	}
}
