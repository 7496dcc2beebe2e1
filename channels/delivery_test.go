package channels

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// provider is a transport whose calls have given results. Further sends succeed, and nothing further is found.
type provider struct {
	Transport
	sends []error
	finds []found
	sent  int // calls of Send
}

type found struct {
	id  string
	err error
}

func (p *provider) Limits() Limits { return Limits{Text: 1000} }

func (p *provider) Send(context.Context, Message) (string, error) {
	if p.sent++; p.sent <= len(p.sends) {
		return "", p.sends[p.sent-1]
	}
	return "sent", nil
}

func (p *provider) Find(context.Context, Message) (string, bool, error) {
	if len(p.finds) == 0 {
		return "", false, nil
	}
	next := p.finds[0]
	p.finds = p.finds[1:]
	return next.id, next.id != "", next.err
}

// deliverReport sends a message, and repeats the attempt until none is left. It returns the status and the parts after
// each attempt.
func deliverReport(t *testing.T, pool *pgxpool.Pool, transport Transport, earlierAttempts int) (after []string) {
	t.Helper()
	_, err := Put(t.Context(), pool, Definition{
		Name: "team", Type: Slack, Agent: "shop", ReportTo: "C1",
		Secrets: map[string]string{"token": "${A}", "app_token": "${B}"},
	})
	require.NoError(t, err)
	require.NoError(t, postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := Report(t.Context(), tx, []string{"shop"}, "a report")
		return err
	}))
	pgtest.Exec(t, pool, `update agent_channel_sends set attempts = $1`, earlierAttempts)
	lease, err := lanes.NewKeeper(pool, lanes.Options{}).Acquire(t.Context(), Lane("team"), lanes.WithTTL(time.Hour))
	require.NoError(t, err)
	w := &worker{
		Runner: &Runner{Pool: pool, Logger: slog.New(slog.DiscardHandler)}, name: "team", transport: transport,
		inbox: &inbox{lease: lease},
	}
	for {
		pgtest.Exec(t, pool, `update agent_channel_sends set next_attempt_at = clock_timestamp()`)
		w.quiet.Store(0)
		due, err := w.claimSends(t.Context(), 1, []string{})
		require.NoError(t, err)
		if len(due) == 0 {
			return after
		}
		w.deliver(t.Context(), due[0])
		after = append(after, pgtest.Value[string](t, pool, `select status || ' ' || parts::text from agent_channel_sends`))
	}
}

// A part whose answer was lost is sent again only after the provider has said that it did not arrive.
func TestALostPartWaitsForTheProvider(t *testing.T) {
	t.Parallel()
	unknown := &SendError{Err: errors.New("status 503"), MaybeSent: true}
	limited := &SendError{Err: errors.New("too many calls"), RetryAfter: time.Millisecond}
	for name, test := range map[string]struct {
		provider provider
		earlier  int // attempts
		want     []string
		sent     int
	}{
		"an outage, arrived": {
			provider{sends: []error{unknown}, finds: []found{{err: unknown}, {err: limited}, {id: "found"}}},
			0,
			[]string{"sending {}", "sending {}", "sending {}", "sent {found}"},
			1,
		},
		"an outage, not arrived": {
			provider{sends: []error{unknown}, finds: []found{{err: unknown}}},
			0,
			[]string{"sending {}", "sending {}", "sent {sent}"},
			2,
		},
		"stored late": {
			provider{sends: []error{unknown}, finds: []found{{id: "found"}}},
			0,
			[]string{"sending {}", "sent {found}"},
			1,
		},
		"cannot tell": {
			provider{sends: []error{unknown}, finds: []found{{err: errors.New("too long")}}},
			0,
			[]string{"sending {}", `maybe_sent {""}`},
			1,
		},
		"a day": {
			provider{sends: []error{unknown}, finds: []found{{err: unknown}}},
			maxSends - 2,
			[]string{"sending {}", "maybe_sent {}"},
			1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.NoDiff(t, test.want, deliverReport(t, pgtest.DB(t), &test.provider, test.earlier))
			assert.Equal(t, test.sent, test.provider.sent, "sends")
		})
	}
}

// A sent part is not sent again if its first record was lost.
func TestALostRecordOfAPartDoesNotRepeatIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		create function refuse() returns trigger language plpgsql as $$ begin raise 'connection broken'; end $$`)
	pgtest.Exec(t, pool, `
		create trigger refuse before update on agent_channel_sends for each row
		  when (old.attempting and new.claim is not null and not new.attempting) execute function refuse()`)
	p := &provider{}
	assert.NoDiff(t, []string{"sending {sent}", "sent {sent}"}, deliverReport(t, pool, p, 0))
	assert.Equal(t, 1, p.sent, "sends")
}

// bouncing is a transport whose message bounces before Send returns.
type bouncing struct {
	provider
	inbox *inbox
}

func (b *bouncing) Send(ctx context.Context, m Message) (string, error) {
	return "accepted", b.inbox.Bounced(ctx, m.ID, "no such user")
}

func TestABounceBeforeTheSendIsRecordedCounts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	after := deliverReport(t, pool, &bouncing{inbox: &inbox{db: pool, name: "team"}}, 0)
	assert.NoDiff(t, []string{"failed {}"}, after)
	pgtest.Equal(t, pool, "failed no such user t", `
		select concat_ws(' ', m.status, m.error_message, s.finished_at is not null)
		  from agent_messages m join agent_channel_sends s on s.message_id = m.id`)
}
