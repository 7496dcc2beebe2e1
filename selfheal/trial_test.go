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

// resting returns a database with a skill that self-heal disabled and whose cool-down has passed.
func resting(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.DB(t)
	skill(t, db, fetch)
	automation(t, db, "daily", fetch)
	calls(t, db, fetch, 0, "timeout timeout timeout")
	run(t, db, selfheal.Default())
	report := run(t, db, selfheal.Default())
	require.Truef(t, len(report.Trials) == 0, "on trial before the cool-down has passed: %+v", report.Trials)
	cool(t, db)
	return db
}

// cool moves the skill's disabling a day back.
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
	assert.True(t, !admit(t, db, "early"), "admitted before the trial was offered")
	report := run(t, db, selfheal.Default())
	require.Truef(t, len(report.Trials) == 1 && report.Trials[0].Skill == fetch && !report.Trials[0].Taken &&
		len(report.Trials[0].Automations) == 1, "trials are %+v", report.Trials)
	s := get(t, db, fetch)
	assert.Truef(t, !s.Enabled && s.TrialAt != nil && len(inService(t, db)) == 0, "skill is %+v", s)
	require.True(t, admit(t, db, "one"), "not admitted")
	restored, err := selfheal.Settle(t.Context(), db, fetch, true)
	require.NoError(t, err)
	want := selfheal.Restored{
		Skill: fetch, Settled: true, Enabled: true, By: selfheal.By, Reason: "the trial succeeded",
		WasReason: "3 consecutive failures, last: timeout: it broke", Automations: []string{"daily"},
	}
	assert.NoDiff(t, want, restored)
	s = get(t, db, fetch)
	assert.Truef(t, s.Enabled && s.TrialAt == nil && len(inService(t, db)) == 1, "skill is %+v", s)
	report = run(t, db, selfheal.Default())
	assert.Truef(t, len(report.Healed) == 0 && len(report.Trials) == 0, "it fell straight back: %+v", report)
}

func TestATrialThatFails(t *testing.T) {
	t.Parallel()
	db := resting(t)
	for range 2 {
		run(t, db, selfheal.Default())
		require.True(t, admit(t, db, "one"), "not admitted")
		restored, err := selfheal.Settle(t.Context(), db, fetch, false)
		require.NoError(t, err)
		assert.Truef(t, restored.Settled && !restored.Enabled && len(restored.Automations) == 0, "settled as %+v", restored)
		s := get(t, db, fetch)
		want := "failed its trial; disabled for: 3 consecutive failures, last: timeout: it broke"
		assert.Truef(t, !s.Enabled && s.DisabledReason == want, "enabled %v, reason %q", s.Enabled, s.DisabledReason)
		report := run(t, db, selfheal.Default())
		assert.Truef(t, len(report.Trials) == 0 && len(inService(t, db)) == 0, "no new cool-down: %+v", report.Trials)
		cool(t, db)
	}
	late, err := selfheal.Settle(t.Context(), db, fetch, true)
	assert.Truef(t, err == nil && !late.Settled && !get(t, db, fetch).Enabled,
		"a skill that is not on trial was settled: %+v, %v", late, err)
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
		require.Truef(t, !ok || winner == "", "more than one call was let through: %v", admitted)
		if ok {
			winner = string(rune('a' + i))
		}
	}
	require.True(t, winner != "", "no call was let through")
	assert.True(t, admit(t, db, winner), "a call that is repeated is refused for its own first attempt")
	trials, err := selfheal.Trials(t.Context(), db)
	assert.Truef(t, err == nil && len(trials) == 1 && trials[0].Taken, "trials are %+v, %v", trials, err)
	if run(t, db, selfheal.Default()); admit(t, db, "other") {
		t.Error("another run offers the trial again")
	}
	pgtest.Exec(t, db, `
		update agent_skills set evidence = jsonb_set(evidence, '{trial,until}',
		  to_jsonb(clock_timestamp() - interval '1 second'))`)
	assert.True(t, admit(t, db, "successor"), "a trial whose process died is lost for ever")
	require.NoError(t, selfheal.Withdraw(t.Context(), db, fetch))
	assert.True(t, admit(t, db, "after a withdrawal"), "a released trial is lost")
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
			assert.Truef(t, s.Enabled == test.enabled && (s.TrialAt != nil) == test.onTrial, "skill is %+v", s)
			assert.True(t, !test.onTrial || admit(t, db, "two"), "the trial was not released")
			rows, _, err := activity.Recent(t.Context(), db, activity.Filter{TraceID: string(id)})
			require.Truef(t, err == nil && len(rows) == test.rows, "rows are %+v, %v", rows, err)
			if len(rows) > 0 && rows[0].SkillName != "settle_trial" {
				t.Errorf("row is %+v", rows[0])
			}
		})
	}
}

// A failing follow-up cannot undo a return.
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
	assert.True(t, get(t, db, fetch).Enabled, "one failed call disabled it")
}

func TestAnAdminTakesASkillOffItsTrial(t *testing.T) {
	t.Parallel()
	db := resting(t)
	run(t, db, selfheal.Default())
	admit(t, db, "one")
	pgtest.Exec(t, db, "update agent_skills set disabled_by = 'admin'")
	settled, err := selfheal.Settle(t.Context(), db, fetch, true)
	assert.Truef(t, err == nil && !settled.Settled && !get(t, db, fetch).Enabled,
		"self-heal enabled what an admin disabled: %+v, %v", settled, err)
}

func TestReenableDuringATrialEndsIt(t *testing.T) {
	t.Parallel()
	db := resting(t)
	run(t, db, selfheal.Default())
	_, err := selfheal.Reenable(t.Context(), db, fetch, "ana", "fixed")
	require.NoError(t, err)
	trials, err := selfheal.Trials(t.Context(), db)
	assert.Truef(t, err == nil && len(trials) == 0, "trials are %+v, %v", trials, err)
	settled, err := selfheal.Settle(t.Context(), db, fetch, false)
	assert.Truef(t, err == nil && !settled.Settled && get(t, db, fetch).Enabled,
		"a late failure disabled it: %+v, %v", settled, err)
	_, err = selfheal.Reenable(t.Context(), db, "nobody", "ana", "?")
	assert.ErrorIs(t, err, skills.ErrNotFound, "unknown skill")
}
