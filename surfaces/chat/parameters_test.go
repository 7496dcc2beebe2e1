package chat

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// namesIn lists the JSON names of a struct's fields.
func namesIn(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			names = append(names, name)
		} else if f.Type.Kind() == reflect.Struct && f.Anonymous && !strings.Contains(f.Type.PkgPath(), "openai-go") {
			names = append(names, namesIn(f.Type)...)
		}
	}
	return names
}

// TestEveryDocumentedParameterIsHonouredRefusedOrAgents lists the parameters that the agent's settings override.
// Stock clients send several of them by default.
func TestEveryDocumentedParameterIsHonouredRefusedOrAgents(t *testing.T) {
	t.Parallel()
	ignored := []string{
		"temperature", "top_p", "parallel_tool_calls", "service_tier", "store", "prompt_cache_key", "prompt_cache_options",
		"prompt_cache_retention", "safety_identifier",
	}
	decided(t, slices.Concat(namesIn(reflect.TypeFor[request]()), ignored, []string{
		"seed", "frequency_penalty", "presence_penalty", "reasoning_effort", "verbosity", "prediction",
	}), namesIn(reflect.TypeFor[openai.ChatCompletionNewParams]()))
	decided(t, slices.Concat(namesIn(reflect.TypeFor[responseRequest]()), ignored, []string{
		"instructions", "reasoning", "truncation", "stream_options", "context_management", "access_programs",
	}), namesIn(reflect.TypeFor[responses.ResponseNewParams]()))
}

// decided checks that each parameter documented by a library is known here.
func decided(t *testing.T, known, documented []string) {
	t.Helper()
	require.Truef(t, len(documented) >= 20, "the library documents %v", documented)
	for _, name := range documented {
		assert.Truef(t, slices.Contains(known, name), "no rule covers %s", name)
	}
}

// at returns a chat with limits: messages per minute, and concurrent turns.
func at(rate, turns int) *Chat {
	return &Chat{
		Turns: turns, Address: func(*http.Request) string { return "192.0.2.1" },
		limits: newLimits(rate), turnBudget: admission.New(int64(turns)),
	}
}

func TestAddressThatIsRefusedIsNotRememberedByItsUsers(t *testing.T) {
	t.Parallel()
	c := at(1, 16)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	taken := 0
	for i := range 100 {
		if c.allow(r, "site", string(rune('A'+i)), "") == nil {
			taken++
		}
	}
	if n := c.limits.recent.Len(); taken == 100 || n != taken+1 || len(c.limits.visitors) != n {
		t.Errorf("%d of 100 were accepted, %d are remembered", taken, n)
	}
}

// Visitors with a token have their own limit, whatever address they share. Another limit bounds the tokens that an
// address may make up.
func TestVisitorsWithTokenOfTheirOwnAreCountedByIt(t *testing.T) {
	t.Parallel()
	c := at(1, 16)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	require.NoError(t, c.allow(r, "site", "", ""))
	assert.Error(t, c.allow(r, "site", "", ""), "a second message without a token was accepted")
	for _, token := range []string{"vis_one", "vis_other"} {
		assert.NoError(t, c.allow(r, "site", "", token), "a visitor of that address")
		assert.Error(t, c.allow(r, "site", "", token), "a second message of a visitor was accepted")
		assert.Error(t, c.allow(r, "site", "somebody else", token), "a second message under another name was accepted")
	}
	refused := false
	for i := range visitorsPerAddress {
		refused = refused || c.allow(r, "site", "", fmt.Sprint("vis_made_up_", i)) != nil
	}
	assert.True(t, refused, "an address may make up any number of tokens")
}

func TestMessagesWithoutThreadShareNone(t *testing.T) {
	t.Parallel()
	c := at(1, 32)
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	for i := range 16 { // an address gets half of the slots
		_, err := c.admit(r, &UserMessage{Owner: "site"})
		require.NoError(t, err, "message", i+1)
	}
	for range 2 {
		_, _ = c.admit(r, &UserMessage{Owner: "site", Name: "one"})
	}
	_, err := c.admit(r, &UserMessage{Owner: "site"})
	assert.Error(t, err, "one more of the address")
}

// TestClaimThatEndsLateDoesNotSendNextAway: after an immediate decision, a turn continues in the same process
// before the waiting run has returned. The database then has an older text, which must not replace the local one.
func TestClaimThatEndsLateDoesNotSendNextAway(t *testing.T) {
	t.Parallel()
	f := newFeed()
	f.start(1, "", 0)
	f.append("Let me look.")
	f.finishCall()
	f.start(3, "Let me look.", 0)
	f.append("It is")
	f.detach(1)
	f.setRemote("Let me look.", true)
	f.append(" done.")
	if v := f.snapshot(true); !v.runsHere || v.awaitsApproval || v.text != "Let me look.\n\nIt is done." {
		t.Errorf("local %t, awaits approval %t, text %q", v.runsHere, v.awaitsApproval, v.text)
	}
	f.detach(3)
	f.setRemote("Let me look.\n\nIt is done. And", false)
	if v := f.snapshot(true); v.runsHere || v.text != "Let me look.\n\nIt is done. And" {
		t.Errorf("after its end here: local %t, text %q", v.runsHere, v.text)
	}
}

// During an outage of the database, a turn with connected clients writes one log line, with its trace.
func TestTurnThatCannotBeReadIsLoggedOnce(t *testing.T) {
	t.Parallel()
	log := &testkit.Log{}
	c, read := &Chat{Logger: slog.New(slog.NewTextHandler(log, nil))}, newFeed()
	for range 3 {
		f := &follower{Chat: c, id: "7", traceID: "ch_7", feed: read}
		assert.NoError(t, f.logReadError(t.Context(), errors.New("away")))
	}
	assert.Truef(t, strings.Count(log.String(), "turn not read") == 1 && strings.Contains(log.String(), "trace_id=ch_7"),
		"the log says %s", log)
}
