package chat

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/admission"
)

// at is a chat that takes so many messages a minute and turns at once.
func at(rate, turns int) *Chat {
	return &Chat{
		Turns: turns, Address: func(*http.Request) string { return "192.0.2.1" },
		limits: newLimits(rate), work: admission.New(int64(turns)),
	}
}

func TestAnAddressThatIsRefusedIsNotRememberedByItsUsers(t *testing.T) {
	t.Parallel()
	c := at(1, 16)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	taken := 0
	for i := range 100 {
		if c.allow(r, "site", string(rune('A'+i))) == nil {
			taken++
		}
	}
	if n := c.limits.recent.Len(); taken == 100 || n != taken+1 || len(c.limits.known) != n {
		t.Errorf("%d of 100 were taken, %d are remembered", taken, n)
	}
}

func TestMessagesWithoutAThreadShareNone(t *testing.T) {
	t.Parallel()
	c := at(1, 32)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	for i := range 16 { // half are an address's
		if _, err := c.enter(r, Ask{Owner: "site"}); err != nil {
			t.Fatalf("message %d: %v", i+1, err)
		}
	}
	for range 2 {
		_, _ = c.enter(r, Ask{Owner: "site", Name: "one"})
	}
	if _, err := c.enter(r, Ask{Owner: "site"}); err == nil {
		t.Error("one more of the address")
	}
}
