package chat

import (
	"fmt"
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
		if c.allow(r, "site", string(rune('A'+i)), "") == nil {
			taken++
		}
	}
	if n := c.limits.recent.Len(); taken == 100 || n != taken+1 || len(c.limits.known) != n {
		t.Errorf("%d of 100 were taken, %d are remembered", taken, n)
	}
}

// Visitors with a token are counted by it, whatever address they share; what an address may make up is bounded all the
// same.
func TestVisitorsWithATokenOfTheirOwnAreCountedByIt(t *testing.T) {
	t.Parallel()
	c := at(1, 16)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	if err := c.allow(r, "site", "", ""); err != nil {
		t.Fatal(err)
	}
	if c.allow(r, "site", "", "") == nil {
		t.Error("a second message without a token was taken")
	}
	for _, token := range []string{"vis_one", "vis_other"} {
		if err := c.allow(r, "site", "", token); err != nil {
			t.Errorf("a visitor of that address: %v", err)
		}
		if c.allow(r, "site", "", token) == nil {
			t.Error("a second message of a visitor was taken")
		}
		if c.allow(r, "site", "somebody else", token) == nil {
			t.Error("a second message of a visitor was taken by another name")
		}
	}
	refused := false
	for i := range guests {
		refused = refused || c.allow(r, "site", "", fmt.Sprint("vis_made_up_", i)) != nil
	}
	if !refused {
		t.Error("an address may make up any number of tokens")
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
