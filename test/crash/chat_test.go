//go:build unix

package crash_test

import (
	"regexp"
	"strings"
	"testing"
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
	if !got.whole || got.status != 200 {
		t.Fatalf("the answer is %+v", got)
	}
	s.answered(a, "th", map[string]said{"weather": got}, "weather")
	s.settled(snapshot{})
	if n < 20 {
		t.Errorf("an answer made %d requests; does the proxy still see them?", n)
	}
	return n
}

func killChat(t *testing.T, n int, how verdict, stream bool) {
	t.Helper()
	s := newTalk(t)
	m := message{"th", "weather", stream}
	a, _ := s.killed(asks, n, how)
	first := s.say(a, m)
	before := s.over(a)
	stored := one[int](s, `select count(*) from agent_messages where role = 'user'`)
	if stored == 0 && (first.id != "" || one[int](s, `select count(*) from agent_executions`) > 0) {
		t.Error("a turn without its message")
	}
	b := s.serve("")
	got := s.insist(b, m)
	s.answered(b, "th", map[string]said{m.words: got}, m.words)
	if first.whole && first.text != got.text {
		t.Errorf("the client was told %q, then %q", first.text, got.text)
	}
	if id := first.id; id != "" { // the client knew what to attach to
		if again := s.attach(b, id, "?stream=true"); again.id != got.id || again.text != got.text || !again.whole {
			t.Errorf("attached again: %+v, want %+v", again, got)
		}
	}
	if strings.Count(got.text, reply(m.words)) != 1 {
		t.Errorf("the answer is %q", got.text)
	}
	s.settled(before)
}
