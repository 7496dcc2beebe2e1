package webhook_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Bearer tokens of webhooks are slowed down as other secrets are, and what cannot be guessed passes.
func TestWrongTokensAreSlowedDown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.env["WEAK"], w.env["TINY"] = "correct-horse-17", "abc"
	action := []webhooks.Action{{Event: "EVENT_COMPLETED", Key: "{delivery}"}}
	for name, secret := range map[string]string{"strong": "${SECRET}", "weak": "${WEAK}", "tiny": "${TINY}"} {
		w.endpoint(t, webhooks.EndpointDefinition{Name: name, Scheme: signature.Bearer, Secrets: []string{secret}, Actions: action})
	}
	post := func(endpoint, token string) reply {
		return w.post(t, "/webhooks/"+endpoint, http.Header{"Authorization": {"Bearer " + token}}, strings.NewReader(`{}`))
	}
	if got := post("weak", w.env["WEAK"]); got.status != http.StatusAccepted {
		t.Errorf("a right token: %d %s", got.status, got.body)
	}
	if got := post("tiny", w.env["TINY"]); got.status != http.StatusInternalServerError {
		t.Errorf("a token that is too weak: %d %s", got.status, got.body)
	}
	statuses := map[int]int{}
	for range 200 {
		got := post("weak", "sesame-sesame-sesame")
		statuses[got.status]++
		if got.status == http.StatusTooManyRequests && got.header.Get("Retry-After") == "" {
			t.Fatal("it is not said how long to wait")
		}
	}
	if statuses[401] < 5 || statuses[401] > 20 || statuses[401]+statuses[429] != 200 {
		t.Errorf("the answers are %v", statuses)
	}
	if got := post("weak", w.env["WEAK"]); got.status != http.StatusTooManyRequests {
		t.Errorf("a weak token from an address that guesses: %d %s", got.status, got.body)
	}
	if got := post("strong", whsec); got.status != http.StatusAccepted {
		t.Errorf("a strong token from there: %d %s", got.status, got.body)
	}
}
