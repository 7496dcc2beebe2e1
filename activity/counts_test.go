package activity_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// hurry shortens the lag of counting, so that a test need not wait for it. What it rests on stays: the trigger
// hears of every row that is older than half of the lag.
func hurry(t *testing.T, db postgres.DB) {
	t.Helper()
	_, err := db.Exec(t.Context(), `
		drop trigger agent_activity_late on agent_activity;
		create trigger agent_activity_late after insert on agent_activity
		  for each row when (new.id < lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '30 milliseconds'))
		  execute function lanekeeper.agent_activity_late()`)
	if err != nil {
		t.Fatal(err)
	}
}

// pass counts at most so many rows, with the lag that goes with hurry.
func pass(ctx context.Context, db postgres.Beginner, most int) error {
	_, _, err := activity.CountPass(ctx, db, most, 60*time.Millisecond)
	return err
}

// counted waits until nothing that has ended is left to count.
func counted(t *testing.T, db postgres.Beginner, most int) {
	t.Helper()
	var last string
	if err := db.QueryRow(t.Context(), `select lanekeeper.agent_uuid7()::text`).Scan(&last); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(t.Context(), `insert into agent_activity (id, trace_id, kind, skill_name) values ($1, 'hb_x', 'note', 'last')`, last); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, time.Minute, func() bool {
		if err := pass(t.Context(), db, most); err != nil {
			t.Fatal(err)
		}
		var done bool
		err := db.QueryRow(t.Context(), `
			select c.counted_upto > $1::text::uuid and not exists (
			       select from agent_activity_uncounted u join agent_activity a on a.id = u.activity_id where a.status <> 'running')
			  from agent_activity_counted c`, last).Scan(&done)
		if err != nil {
			t.Fatal(err)
		}
		return done
	}, "everything is counted")
}

// difference compares the counts with the views, in one snapshot.
func difference(ctx context.Context, db *pgxpool.Pool) (string, error) {
	var text string
	err := pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		for _, by := range []activity.Dimension{activity.BySkill, activity.ByPurpose} {
			different, err := spendDifference(ctx, tx, by)
			if err != nil {
				return err
			}
			text += different
		}
		health, err := activity.CountedHealth(ctx, tx, activity.HealthFilter{})
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			select h.skill, h.calls, h.calls - round(h.calls * coalesce(h.success_rate, 0))::bigint as failed, h.streak, false as streak_more,
			       h.state, h.disabled_by, h.disabled_reason, h.disabled_at from agent_skill_health h order by h.skill`)
		if err != nil {
			return err
		}
		fared, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.Health])
		if err != nil {
			return err
		}
		sameDay := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
		approximate := cmpopts.IgnoreFields(activity.Health{}, "P50MS", "P95MS", "SuccessRate", "Streak")
		text += cmp.Diff(fared, health.Lines, approximate, sameDay, cmpopts.EquateEmpty())
		return nil
	})
	return text, err
}

// spendDifference compares the counts and the view of spend with what the rows of the log say.
func spendDifference(ctx context.Context, tx pgx.Tx, by activity.Dimension) (string, error) {
	rows, err := tx.Query(ctx, `
		select coalesce(nullif(a.purpose, ''), a.skill_name) as purpose, (a.created_at at time zone 'UTC')::date::timestamp at time zone 'UTC' as day, a.led_to,
		       array[lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens'), lanekeeper.agent_tokens(a.token_usage, 'completion_tokens'),
		             lanekeeper.agent_tokens(a.token_usage, 'total_tokens'), (a.cost_usd * 1000000)::bigint,
		             lanekeeper.agent_tokens(a.token_usage, 'unknown_tokens'), (lanekeeper.agent_usd(a.token_usage, 'unknown_usd') * 1000000)::bigint] as used
		  from agent_activity a where a.kind = 'model'`)
	if err != nil {
		return "", err
	}
	type modelCall struct {
		Purpose string
		Day     time.Time
		LedTo   map[string]int
		Used    []int64 // tokens of the prompt, of the completion and in all, millionths of a dollar, and of these two what is unknown
	}
	calls, err := pgx.CollectRows(rows, pgx.RowToStructByName[modelCall])
	if err != nil {
		return "", err
	}
	type key struct {
		name string
		day  time.Time
	}
	sums := map[key]*activity.SpendLine{}
	for _, c := range calls {
		shares := []charge{{c.Purpose, 1, c.Used}}
		if by == activity.BySkill {
			shares = charges(c.LedTo, c.Used)
		}
		for _, s := range shares {
			k := key{s.skill, c.Day.UTC()}
			if sums[k] == nil {
				sums[k] = &activity.SpendLine{Key: s.skill, Period: &k.day}
			}
			l := sums[k]
			l.Calls, l.PromptTokens, l.CompletionTokens = l.Calls+s.calls, l.PromptTokens+s.used[0], l.CompletionTokens+s.used[1]
			l.Tokens, l.CostUSD = l.Tokens+s.used[2], l.CostUSD+float64(s.used[3])/1e6
			l.UnknownTokens, l.UnknownUSD = l.UnknownTokens+s.used[4], l.UnknownUSD+float64(s.used[5])/1e6
		}
	}
	want := []activity.SpendLine{}
	for _, l := range sums {
		want = append(want, *l)
	}
	counts, err := activity.CountedSpend(ctx, tx, activity.SpendFilter{By: by, Period: activity.ByDay})
	if err != nil {
		return "", err
	}
	view := map[activity.Dimension]string{activity.BySkill: "agent_spend", activity.ByPurpose: "agent_spend_by_purpose"}[by]
	rows, err = tx.Query(ctx, `
		select v.`+string(by)+` as key, v.day::timestamp at time zone 'UTC' as period, sum(v.calls)::bigint as calls,
		       sum(v.prompt_tokens)::bigint as prompt_tokens, sum(v.completion_tokens)::bigint as completion_tokens,
		       sum(v.tokens)::bigint as tokens, sum(v.cost_usd)::float8 as cost_usd,
		       sum(v.unknown_tokens)::bigint as unknown_tokens, sum(v.unknown_usd)::float8 as unknown_usd
		  from `+view+` v group by 1, 2`)
	if err != nil {
		return "", err
	}
	viewed, err := pgx.CollectRows(rows, pgx.RowToStructByName[activity.SpendLine])
	if err != nil {
		return "", err
	}
	same := cmp.Options{
		cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) }), cmpopts.EquateEmpty(), cmpopts.EquateApprox(0, 1e-9),
		cmpopts.SortSlices(func(a, b activity.SpendLine) bool { return a.Key+a.Period.String() < b.Key+b.Period.String() }),
	}
	for i := range viewed {
		viewed[i].Period = new(viewed[i].Period.UTC())
	}
	return cmp.Diff(want, counts.Lines, same) + cmp.Diff(want, viewed, same), nil
}

// charge is what a model call is charged to.
type charge struct {
	skill string
	calls int64
	used  []int64
}

// charges splits what a model call used among the skills that it led to, as the rule says: up to and with each skill,
// in the order of names, the whole part of what is due to the calls so far (of money, rounded to millionths).
func charges(ledTo map[string]int, used []int64) []charge {
	var total, upto int64
	most := ""
	for _, skill := range slices.Sorted(maps.Keys(ledTo)) {
		total += int64(ledTo[skill])
		if most == "" || ledTo[skill] > ledTo[most] {
			most = skill
		}
	}
	if total == 0 {
		return []charge{{"", 1, used}}
	}
	var list []charge
	for _, skill := range slices.Sorted(maps.Keys(ledTo)) {
		before := upto
		upto += int64(ledTo[skill])
		c := charge{skill: skill, used: make([]int64, len(used))}
		if skill == most {
			c.calls = 1
		}
		for i, n := range used {
			c.used[i] = n*upto/total - n*before/total
			if i == 3 || i == 5 {
				c.used[i] = (2*n*upto+total)/(2*total) - (2*n*before+total)/(2*total)
			}
		}
		list = append(list, c)
	}
	return list
}

// chaos writes rows in every way that there is, one transaction.
func chaos(ctx context.Context, db *pgxpool.Pool, r *rand.Rand) error {
	tx, err := db.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }()
	for range 1 + r.IntN(4) {
		id := "lanekeeper.agent_uuid7()"
		if r.IntN(3) == 0 {
			id = fmt.Sprintf("lanekeeper.agent_uuid7(clock_timestamp() - interval '%d milliseconds')", []int{10, 50, 100, 5000, 86_400_000}[r.IntN(5)])
		}
		status := []string{"success", "error", "running", "skipped", "pending_approval", "unknown"}[r.IntN(6)]
		_, err := tx.Exec(ctx, `
			insert into agent_activity (id, trace_id, kind, skill_name, purpose, surface, status, error_class, token_usage, cost_usd, duration_ms, led_to)
			values (`+id+`, 'hb_x', $1, $2, $3, $4, $5, $6, '{"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}'::jsonb || $9, 0.01, $7, $8)`,
			[]string{"model", "call", "call", "phase"}[r.IntN(4)], fmt.Sprintf("skill_%d", r.IntN(3)), []string{"", "plan"}[r.IntN(2)],
			[]string{"heartbeat", "chat"}[r.IntN(2)], status, []string{"", "timeout", "denied"}[r.IntN(3)], r.IntN(5000),
			[]string{`{}`, `{"skill_0": 25}`, `{"skill_0": 2, "skill_1": 1}`, `{"skill_2": 1, "skill_1": 1, "gone": 5}`}[r.IntN(4)],
			[]string{`{}`, `{"unknown_tokens": 5, "unknown_usd": 0.007}`}[r.IntN(2)])
		if err != nil {
			return err
		}
		pause(ctx, time.Duration(r.IntN(30))*time.Millisecond)
	}
	if r.IntN(2) == 0 {
		_, err = tx.Exec(ctx, `
			update agent_activity a set status = 'success', cost_usd = 0.5
			 where a.id in (select x.id from agent_activity x where x.status = 'running' limit 2 for update skip locked)`)
		if err != nil {
			return err
		}
	}
	pause(ctx, time.Duration(r.IntN(150))*time.Millisecond)
	if r.IntN(4) == 0 {
		return nil // rolled back
	}
	return tx.Commit(ctx)
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func TestEveryRowIsCountedOnceWhateverCommitsLate(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	hurry(t, db)
	_, err := db.Exec(t.Context(), `
		insert into agent_skills (name, tool_definition, handler)
		select 'skill_' || n, '{}', 'builtin:x' from generate_series(0, 3) n`)
	if err != nil {
		t.Fatal(err)
	}
	writing, stop := context.WithCancel(t.Context())
	defer stop()
	var writers, counters errgroup.Group
	for w := range 5 {
		writers.Go(func() error {
			r := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), uint64(w)))
			for range 25 {
				if err := chaos(t.Context(), db, r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for range 2 {
		counters.Go(func() error {
			for writing.Err() == nil {
				if err := pass(t.Context(), db, 7); err != nil {
					return err
				}
				pause(writing, 3*time.Millisecond)
			}
			return nil
		})
	}
	counters.Go(func() error {
		for writing.Err() == nil {
			diff, err := difference(t.Context(), db)
			if err != nil || diff != "" {
				return fmt.Errorf("at some moment: %s %w", diff, err)
			}
			pause(writing, 10*time.Millisecond)
		}
		return nil
	})
	err = writers.Wait()
	stop()
	if e := counters.Wait(); e != nil {
		t.Error(e)
	}
	if err != nil {
		t.Fatal(err)
	}
	counted(t, db, 7)
	if diff, err := difference(t.Context(), db); err != nil || diff != "" {
		t.Fatalf("in the end: %v %s", err, diff)
	}
	var inTable, inLog int
	const ended = `select (select sum(calls)::int from agent_activity_counts where span = 'hour' and kind <> 'charge'),
		(select count(*)::int from agent_activity where status <> 'running')`
	if err := db.QueryRow(t.Context(), ended).Scan(&inTable, &inLog); err != nil || inTable != inLog || inLog == 0 {
		t.Fatalf("%d rows are counted, %d have ended (%v)", inTable, inLog, err)
	}
	if _, err := db.Exec(t.Context(), `delete from agent_activity`); err != nil {
		t.Fatal(err)
	}
	counted(t, db, 7)
	var kept int
	if err := db.QueryRow(t.Context(), `select sum(calls)::int from agent_activity_counts where span = 'day' and kind <> 'charge'`).Scan(&kept); err != nil || kept != inTable+1 {
		t.Errorf("after the log was deleted the counts say %d (%v), want %d", kept, err, inTable+1)
	}
}
