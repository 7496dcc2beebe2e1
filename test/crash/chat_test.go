//go:build unix

package crash_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// asks is the first thing that a chat message does in the database.
var asks = regexp.MustCompile(`hashtextextended\('chat `)

// TestKillAtEveryBoundaryOfAChatAnswer kills the process that has the visitor's connection before each of its
// requests, and after each took effect. Another one finishes the answer, if the message was stored; if not, the
// visitor's client says it again.
func TestKillAtEveryBoundaryOfAChatAnswer(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]bool{"streamed": true, "whole": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			total := cleanChat(t, stream)
			t.Logf("%d boundaries", total)
			atBoundaries(t, total, 5, map[string]verdict{"before": killBefore, "after": killAfter},
				func(t *testing.T, n int, how verdict) { killChat(t, n, how, stream) })
		})
	}
}

// cleanChat answers a message undisturbed and returns how many requests that took.
func cleanChat(t *testing.T, stream bool) int {
	t.Helper()
	s := newTalk(t)
	a, c := s.killed(asks, -1, pass)
	got := s.say(a, message{"th", "weather", stream})
	n := c.count()
	require.Truef(t, got.Complete && got.Status == 200, "the answer is %+v", got)
	s.answered(a, "th", map[string]testkit.Answer{"weather": got}, "weather")
	s.settled(snapshot{})
	assert.Truef(t, n >= 20, "an answer made %d requests; does the proxy still see them?", n)
	return n
}

func killChat(t *testing.T, n int, how verdict, stream bool) {
	t.Helper()
	s := newTalk(t)
	m := message{"th", "weather", stream}
	a, _ := s.killed(asks, n, how)
	first := s.say(a, m)
	before := s.over(a)
	stored := pgtest.Value[int](s.t, s.db, `select count(*) from agent_messages where role = 'user'`)
	assert.True(t, stored != 0 || first.ID == "" &&
		pgtest.Value[int](s.t, s.db, `select count(*) from agent_executions`) <= 0, "a turn without its message")
	b := s.serve("")
	got := s.insist(b, m)
	s.answered(b, "th", map[string]testkit.Answer{m.words: got}, m.words)
	assert.Truef(t, !first.Complete || first.Text == got.Text, "the client was told %q, then %q", first.Text, got.Text)
	if id := first.ID; id != "" { // the client knew what to attach to
		if again := s.attach(b, id, "?stream=true"); again.ID != got.ID || again.Text != got.Text || !again.Complete {
			t.Errorf("attached again: %+v, want %+v", again, got)
		}
	}
	assert.Equal(t, 1, strings.Count(got.Text, reply(m.words)), got.Text)
	s.settled(before)
}
