package selfheal_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// resting is a database with a skill that self-heal disabled and whose cool-down has passed.
func resting(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.DB(t)
	skill(t, db, fetch)
	automation(t, db, "daily", fetch)
	calls(t, db, fetch, 0, "timeout timeout timeout")
	run(t, db, selfheal.Default())
	if report := run(t, db, selfheal.Default()); len(report.Trials) > 0 {
		t.Fatalf("on trial before the cool-down has passed: %+v", report.Trials)
	}
	cool(t, db)
	return db
}

// cool lets a day go by.
func cool(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, "update agent_skills set disabled_at = disabled_at - interval '24 hours' where name = $1", fetch)
}

func admit(t *testing.T, db postgres.DB, owner string) bool {
	t.Helper()
	ok, err := selfheal.Admit(t.Context(), db, fetch, owner)
	require.NoError(t, err)
	return ok
}

func TestATrialThatSucceeds(t *testing.T) {
	t.Parallel()
	db := resting(t)
	if admit(t, db, "early") {
		t.Error("admitted before the trial was offered")
	}
	report := run(t, db, selfheal.Default())
	if len(report.Trials) != 1 || report.Trials[0].Skill != fetch || report.Trials[0].Taken ||
		len(report.Trials[0].Automations) != 1 {
		t.Fatalf("trials are %+v", report.Trials)
	}
	if s := get(t, db, fetch); s.Enabled || s.TrialAt == nil || len(inService(t, db)) != 0 {
		t.Errorf("skill is %+v", s)
	}
	if !admit(t, db, "one") {
		t.Fatal("not admitted")
	}
	restored, err := selfheal.Settle(t.Context(), db, fetch, true)
	require.NoError(t, err)
	want := selfheal.Restored{
		Skill: fetch, Settled: true, Enabled: true, By: selfheal.By, Reason: "the trial succeeded",
		WasReason: "3 consecutive failures, last: timeout: it broke", Automations: []string{"daily"},
	}
	assert.NoDiff(t, want, restored)
	if s := get(t, db, fetch); !s.Enabled || s.TrialAt != nil || len(inService(t, db)) != 1 {
		t.Errorf("skill is %+v", s)
	}
	if report := run(t, db, selfheal.Default()); len(report.Healed) > 0 || len(report.Trials) > 0 {
		t.Errorf("it fell straight back: %+v", report)
	}
}

func TestATrialThatFails(t *testing.T) {
	t.Parallel()
	db := resting(t)
	for range 2 {
		run(t, db, selfheal.Default())
		if !admit(t, db, "one") {
			t.Fatal("not admitted")
		}
		restored, err := selfheal.Settle(t.Context(), db, fetch, false)
		require.NoError(t, err)
		if !restored.Settled || restored.Enabled || len(restored.Automations) > 0 {
			t.Errorf("settled as %+v", restored)
		}
		s := get(t, db, fetch)
		if want := "failed its trial; disabled for: 3 consecutive failures, last: timeout: it broke"; s.Enabled ||
			s.DisabledReason != want {
			t.Errorf("enabled %v, reason %q", s.Enabled, s.DisabledReason)
		}
		if report := run(t, db, selfheal.Default()); len(report.Trials) > 0 || len(inService(t, db)) > 0 {
			t.Errorf("no new cool-down: %+v", report.Trials)
		}
		cool(t, db)
	}
	late, err := selfheal.Settle(t.Context(), db, fetch, true)
	if err != nil || late.Settled || get(t, db, fetch).Enabled {
		t.Errorf("a skill that is not on trial was settled: %+v, %v", late, err)
	}
}

func TestOneCallIsLetThrough(t *testing.T) {
	t.Parallel()
	db := resting(t)
	run(t, db, selfheal.Default())
	admitted := make([]bool, 8)
	var g errgroup.Group
	for i := range admitted {
		g.Go(func() (err error) {
			admitted[i], err = selfheal.Admit(t.Context(), db, fetch, string(rune('a'+i)))
			return err
		})
	}
	require.NoError(t, g.Wait())
	winner := ""
	for i, ok := range admitted {
		if ok && winner != "" {
			t.Fatalf("more than one call was let through: %v", admitted)
		}
		if ok {
			winner = string(rune('a' + i))
		}
	}
	if winner == "" {
		t.Fatal("no call was let through")
	}
	if !admit(t, db, winner) {
		t.Error("a call that is repeated is refused for its own first attempt")
	}
	if trials, err := selfheal.Trials(t.Context(), db); err != nil || len(trials) != 1 || !trials[0].Taken {
		t.Errorf("trials are %+v, %v", trials, err)
	}
	if run(t, db, selfheal.Default()); admit(t, db, "other") {
		t.Error("another run offers the trial again")
	}
	pgtest.Exec(t, db, `
		update agent_skills set evidence = jsonb_set(evidence, '{trial,until}',
		  to_jsonb(clock_timestamp() - interval '1 second'))`)
	if !admit(t, db, "successor") {
		t.Error("a trial whose process died is lost for ever")
	}
	require.NoError(t, selfheal.Withdraw(t.Context(), db, fetch))
	if !admit(t, db, "after a withdrawal") {
		t.Error("a trial that was given back is lost")
	}
}

func TestAfterSettlesWhatWasOnTrial(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err     error
		enabled bool
		onTrial bool
		rows    int
	}{
		"success":       {nil, true, false, 1},
		"failure":       {&skills.CallError{Class: "timeout", Message: "no answer"}, false, false, 1},
		"bad arguments": {&skills.InvalidParams{Skill: fetch}, false, true, 0},
		"cancelled":     {context.Canceled, false, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := resting(t)
			run(t, db, selfheal.Default())
			admit(t, db, "one")
			id := trace.New(trace.Heartbeat)
			ctx, cancel := context.WithCancel(trace.With(t.Context(), trace.Span{TraceID: id}))
			cancel()
			require.NoError(t, selfheal.After(db)(ctx, get(t, db, fetch), test.err))
			s := get(t, db, fetch)
			if s.Enabled != test.enabled || (s.TrialAt != nil) != test.onTrial {
				t.Errorf("skill is %+v", s)
			}
			if test.onTrial && !admit(t, db, "two") {
				t.Error("the trial was not given back")
			}
			rows, _, err := activity.Recent(t.Context(), db, activity.Filter{TraceID: string(id)})
			if err != nil || len(rows) != test.rows {
				t.Fatalf("rows are %+v, %v", rows, err)
			}
			if len(rows) > 0 && rows[0].SkillName != "settle_trial" {
				t.Errorf("row is %+v", rows[0])
			}
		})
	}
}

// What follows a return cannot undo it.
func TestAReturnIsFollowedUp(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want []string
	}{
		"success": {nil, []string{fetch}},
		"failure": {&skills.CallError{Class: "timeout"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := resting(t)
			run(t, db, selfheal.Default())
			admit(t, db, "one")
			var followed []string
			broken := errors.New("no suite")
			after := selfheal.After(db, func(_ context.Context, skill string) error {
				followed = append(followed, skill)
				return broken
			})
			ctx := trace.With(t.Context(), trace.Span{TraceID: trace.New(trace.Heartbeat)})
			err := after(ctx, get(t, db, fetch), test.err)
			if errors.Is(err, broken) != (test.want != nil) || get(t, db, fetch).Enabled != (test.want != nil) {
				t.Errorf("%v, enabled %v", err, get(t, db, fetch).Enabled)
			}
			assert.NoDiff(t, test.want, followed)
		})
	}
}

func TestAfterLeavesSkillsInServiceAlone(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	skill(t, db, fetch)
	require.NoError(t, selfheal.After(db)(t.Context(), get(t, db, fetch), errors.New("broken")))
	if !get(t, db, fetch).Enabled {
		t.Error("one failed call disabled it")
	}
}

func TestAnAdminTakesASkillOffItsTrial(t *testing.T) {
	t.Parallel()
	db := resting(t)
	run(t, db, selfheal.Default())
	admit(t, db, "one")
	pgtest.Exec(t, db, "update agent_skills set disabled_by = 'admin'")
	settled, err := selfheal.Settle(t.Context(), db, fetch, true)
	if err != nil || settled.Settled || get(t, db, fetch).Enabled {
		t.Errorf("self-heal enabled what an admin disabled: %+v, %v", settled, err)
	}
}

func TestReenableDuringATrialEndsIt(t *testing.T) {
	t.Parallel()
	db := resting(t)
	run(t, db, selfheal.Default())
	_, err := selfheal.Reenable(t.Context(), db, fetch, "ana", "fixed")
	require.NoError(t, err)
	if trials, err := selfheal.Trials(t.Context(), db); err != nil || len(trials) > 0 {
		t.Errorf("trials are %+v, %v", trials, err)
	}
	if settled, err := selfheal.Settle(t.Context(), db, fetch, false); err != nil || settled.Settled ||
		!get(t, db, fetch).Enabled {
		t.Errorf("a late failure disabled it: %+v, %v", settled, err)
	}
	if _, err := selfheal.Reenable(t.Context(), db, "nobody", "ana", "?"); !errors.Is(err, skills.ErrNotFound) {
		t.Errorf("unknown skill: %v", err)
	}
}
