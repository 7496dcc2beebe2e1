package monitor

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestBrokenChannelDegrades(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour');
		insert into agent_channels (name, type, state, error) values ('mail', 'email', 'failing', 'no route')`)
	assert.Equal(t, "working", currentVerdict(t, pool)) // the channel has failed only now
	for set, want := range map[string]string{
		`state = 'failing', state_at = now() - interval '5 minutes'`:                               "degraded: channel mail failing",
		`state = 'connected', seen_at = now() - interval '5 minutes'`:                              "degraded: channel mail deaf",
		`state = 'connected', seen_at = now()`:                                                     "working",
		`state = 'failing', enabled = false, disabled_by = 'ana', seen_at = now() - interval '9h'`: "working",
	} {
		pgtest.Exec(t, pool, `update agent_channels set state_at = now() - interval '5 minutes', enabled = true, disabled_by = '';
			update agent_channels set `+set)
		if want != "working" {
			want += " </channels#channel-mail>"
		}
		assert.Equal(t, want, currentVerdict(t, pool), set)
	}
	pgtest.Exec(t, pool, `
		update agent_channels set state = 'connected', seen_at = now(), enabled = true, disabled_by = '';
		insert into agent_threads (id, channel) values ('m', 'email');
		with m as (insert into agent_messages (thread_id, seq, turn, role, content, channel, status) select 'm', n, n, 'assistant', 'hi', 'email', 'sent'
		    from generate_series(1, 2) n returning id, seq)
		insert into agent_channel_sends (message_id, channel, thread_id, seq, status, error_message, finished_at)
		select id, 'mail', 'm', seq, case seq when 1 then 'sent' else 'failed' end, 'mailbox full', now() from m`)
	assert.Equal(t, "degraded: channel mail not delivering </channels#channel-mail>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `update agent_channel_sends set finished_at = now() - interval '2 days'`)
	assert.Equal(t, "working", currentVerdict(t, pool))
}
