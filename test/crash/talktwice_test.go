//go:build unix

package crash_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// TestKillTheRescuerOfAConversationToo kills the process that takes over as well, at one of its requests; a third one
// finishes.
func TestKillTheRescuerOfAConversationToo(t *testing.T) {
	t.Parallel()
	total := cleanChat(t, true)
	atBoundaries(t, total, 3, map[string]verdict{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how verdict) {
			s := newTalk(t)
			m := message{"th", "weather", true}
			a, _ := s.killed(asks, n, how)
			s.say(a, m)
			s.over(a)
			before := s.killedToo(1+(total-n)/3, how)
			c := s.serve("")
			got := s.insist(c, m)
			s.answered(c, m.thread, map[string]testkit.Answer{m.words: got}, m.words)
			s.settled(before)
		})
}

// TestKillTheRescuerOfAWebhookToo is the same for a delivery.
func TestKillTheRescuerOfAWebhookToo(t *testing.T) {
	t.Parallel()
	total := cleanHook(t, false)
	atBoundaries(t, total, 3, map[string]verdict{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how verdict) {
			s := newTalk(t)
			a, _ := s.killed(receives, n, how)
			if s.deliver(a) != 0 {
				s.handled(a)
			}
			s.over(a)
			before := s.killedToo(1+(total-n)/3, how)
			c := s.serve("")
			s.deliver(c)
			s.handled(c)
			s.delivered(before, false)
		})
}

// killedToo lets another process take over what is under way, and kills it at one of its requests, or when all is over.
func (s *scene) killedToo(n int, how verdict) snapshot {
	s.t.Helper()
	b := s.breakIn(&counter{}, n, how, "serve")
	eventually(s.t, "the second process is killed, or through before", func() bool {
		return !b.Running() || pgtest.Value[int](s.t, s.db,
			`select count(*) from agent_executions where completed_at is null`) == 0
	})
	return s.over(b)
}

// TestTheConnectionToTheDatabaseBreaksUnderAConversation: the process lives and asks again. The answer comes over the
// connection that the client has; where even its message could not be stored, the client is told so, and says it again.
func TestTheConnectionToTheDatabaseBreaksUnderAConversation(t *testing.T) {
	t.Parallel()
	atBoundaries(t, cleanChat(t, true), 4, map[string]verdict{"before": cutBefore, "after": cutAfter},
		func(t *testing.T, n int, how verdict) {
			s := newTalk(t)
			m := message{"th", "weather", true}
			a, _ := s.killed(asks, n, how)
			first := s.say(a, m)
			if !first.Complete && first.Status < 500 {
				t.Errorf("the client heard %+v", first)
			}
			got := s.insist(a, m)
			if first.Complete && first.Text != got.Text {
				t.Errorf("the client heard %q, then %q", first.Text, got.Text)
			}
			s.answered(a, m.thread, map[string]testkit.Answer{m.words: got}, m.words)
			s.settled(snapshot{})
		})
}
