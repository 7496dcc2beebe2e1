package api

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/credentials"
)

func TestALoginLastsTwelveHours(t *testing.T) {
	t.Parallel()
	s, err := newSessions(Options{AdminToken: "token"}, credentials.NewGuard(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Unix(1_800_000_000, 0)
	s.now = func() time.Time { return began }
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	r.AddCookie(s.begin(r))
	for after, want := range map[time.Duration]bool{0: true, sessionLasts - time.Second: true, sessionLasts: false, 24 * time.Hour: false} {
		s.now = func() time.Time { return began.Add(after) }
		l, err := s.signed(r)
		if err != nil || (l != nil) != want || l != nil && !l.until.Equal(began.Add(12*time.Hour)) {
			t.Errorf("after %s: %v, %v", after, l, err)
		}
	}
}
