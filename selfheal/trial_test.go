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

// newCooledSkill returns a database with a skill that self-heal disabled and whose cool-down has passed.
func newCooledSkill(t *testing.T) *pgxpool.Pool {
	t.Helper()
	db := pgtest.DB(t)
	insertSkill(t, db, skillName)
	insertAutomation(t, db, "daily", skillName)
	insertCalls(t, db, skillName, 0, "timeout timeout timeout")
	runHealing(t, db, selfheal.Default())
	report := runHealing(t, db, selfheal.Default())
	require.Truef(t, len(report.Trials) == 0, "on trial before the cool-down has passed: %+v", report.Trials)
	passCooldown(t, db)
	return db
}

// passCooldown moves the skill's disabling a day back.
func passCooldown(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, "update agent_skills set disabled_at = disabled_at - interval '24 hours' where name = $1", skillName)
}

func admit(t *testing.T, db postgres.DB, owner string) bool {
	t.Helper()
	ok, err := selfheal.Admit(t.Context(), db, skillName, owner)
	require.NoError(t, err)
	return ok
}

func TestSuccessfulTrial(t *testing.T) {
	t.Parallel()
	db := newCooledSkill(t)
	assert.True(t, !admit(t, db, "early"), "admitted before the trial was offered")
	report := runHealing(t, db, selfheal.Default())
	require.Truef(t, len(report.Trials) == 1 && report.Trials[0].Skill == skillName && !report.Trials[0].Taken &&
		len(report.Trials[0].Automations) == 1, "trials are %+v", report.Trials)
	s := getSkill(t, db, skillName)
	assert.Truef(t, !s.Enabled && s.TrialAt != nil && len(enabledAutomations(t, db)) == 0, "skill is %+v", s)
	require.True(t, admit(t, db, "one"), "not admitted")
	restored, err := selfheal.Settle(t.Context(), db, skillName, true)
	require.NoError(t, err)
	want := selfheal.Restored{
		Skill: skillName, Settled: true, Enabled: true, By: selfheal.By, Reason: "the trial succeeded",
		WasReason: "3 consecutive failures, last: timeout: it broke", Automations: []string{"daily"},
	}
	assert.NoDiff(t, want, restored)
	s = getSkill(t, db, skillName)
	assert.Truef(t, s.Enabled && s.TrialAt == nil && len(enabledAutomations(t, db)) == 1, "skill is %+v", s)
	report = runHealing(t, db, selfheal.Default())
	assert.Truef(t, len(report.Healed) == 0 && len(report.Trials) == 0, "disabled again without new failures: %+v", report)
}

func TestFailedTrial(t *testing.T) {
	t.Parallel()
	db := newCooledSkill(t)
	for range 2 {
		runHealing(t, db, selfheal.Default())
		require.True(t, admit(t, db, "one"), "not admitted")
		restored, err := selfheal.Settle(t.Context(), db, skillName, false)
		require.NoError(t, err)
		assert.Truef(t, restored.Settled && !restored.Enabled && len(restored.Automations) == 0, "settled as %+v", restored)
		s := getSkill(t, db, skillName)
		want := "failed its trial; disabled for: 3 consecutive failures, last: timeout: it broke"
		assert.Truef(t, !s.Enabled && s.DisabledReason == want, "enabled %v, reason %q", s.Enabled, s.DisabledReason)
		report := runHealing(t, db, selfheal.Default())
		assert.Truef(t, len(report.Trials) == 0 && len(enabledAutomations(t, db)) == 0, "no new cool-down: %+v",
			report.Trials)
		passCooldown(t, db)
	}
	settled, err := selfheal.Settle(t.Context(), db, skillName, true)
	assert.Truef(t, err == nil && !settled.Settled && !getSkill(t, db, skillName).Enabled,
		"a skill that is not on trial was settled: %+v, %v", settled, err)
}

func TestAdmitOneCall(t *testing.T) {
	t.Parallel()
	db := newCooledSkill(t)
	runHealing(t, db, selfheal.Default())
	admitted := make([]bool, 8)
	var g errgroup.Group
	for i := range admitted {
		g.Go(func() (err error) {
			admitted[i], err = selfheal.Admit(t.Context(), db, skillName, string(rune('a'+i)))
			return err
		})
	}
	require.NoError(t, g.Wait())
	winner := ""
	for i, ok := range admitted {
		require.Truef(t, !ok || winner == "", "more than one call was admitted: %v", admitted)
		if ok {
			winner = string(rune('a' + i))
		}
	}
	require.True(t, winner != "", "no call was admitted")
	assert.True(t, admit(t, db, winner), "the same owner is not admitted again")
	trials, err := selfheal.Trials(t.Context(), db)
	assert.Truef(t, err == nil && len(trials) == 1 && trials[0].Taken, "trials are %+v, %v", trials, err)
	if runHealing(t, db, selfheal.Default()); admit(t, db, "other") {
		t.Error("another owner is admitted after another run")
	}
	pgtest.Exec(t, db, `
		update agent_skills set evidence = jsonb_set(evidence, '{trial,until}',
		  to_jsonb(clock_timestamp() - interval '1 second'))`)
	assert.True(t, admit(t, db, "successor"), "no owner is admitted after the trial has expired")
	require.NoError(t, selfheal.Withdraw(t.Context(), db, skillName))
	assert.True(t, admit(t, db, "after a withdrawal"), "no owner is admitted after a withdrawal")
}

func TestAfterSettlesTrial(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err       error
		enabled   bool
		lockTrial bool
		rows      int
	}{
		"success":       {nil, true, false, 1},
		"failure":       {&skills.CallError{Class: "timeout", Message: "no answer"}, false, false, 1},
		"bad arguments": {&skills.InvalidParams{Skill: skillName}, false, true, 0},
		"cancelled":     {context.Canceled, false, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newCooledSkill(t)
			runHealing(t, db, selfheal.Default())
			admit(t, db, "one")
			id := trace.New(trace.Heartbeat)
			ctx, cancel := context.WithCancel(trace.With(t.Context(), trace.Span{TraceID: id}))
			cancel()
			require.NoError(t, selfheal.After(db)(ctx, getSkill(t, db, skillName), test.err))
			s := getSkill(t, db, skillName)
			assert.Truef(t, s.Enabled == test.enabled && (s.TrialAt != nil) == test.lockTrial, "skill is %+v", s)
			assert.True(t, !test.lockTrial || admit(t, db, "two"), "the trial was not withdrawn")
			rows, _, err := activity.Recent(t.Context(), db, activity.Filter{TraceID: string(id)})
			require.Truef(t, err == nil && len(rows) == test.rows, "rows are %+v, %v", rows, err)
			if len(rows) > 0 && rows[0].SkillName != "settle_trial" {
				t.Errorf("row is %+v", rows[0])
			}
		})
	}
}

// An error of onEnabled does not disable the skill.
func TestAfterCallsOnEnabled(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want []string
	}{
		"success": {nil, []string{skillName}},
		"failure": {&skills.CallError{Class: "timeout"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newCooledSkill(t)
			runHealing(t, db, selfheal.Default())
			admit(t, db, "one")
			var called []string
			callbackErr := errors.New("no suite")
			after := selfheal.After(db, func(_ context.Context, skill string) error {
				called = append(called, skill)
				return callbackErr
			})
			ctx := trace.With(t.Context(), trace.Span{TraceID: trace.New(trace.Heartbeat)})
			err := after(ctx, getSkill(t, db, skillName), test.err)
			if errors.Is(err, callbackErr) != (test.want != nil) || getSkill(t, db, skillName).Enabled != (test.want != nil) {
				t.Errorf("%v, enabled %v", err, getSkill(t, db, skillName).Enabled)
			}
			assert.NoDiff(t, test.want, called)
		})
	}
}

func TestAfterIgnoresEnabledSkill(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insertSkill(t, db, skillName)
	require.NoError(t, selfheal.After(db)(t.Context(), getSkill(t, db, skillName), errors.New("broken")))
	assert.True(t, getSkill(t, db, skillName).Enabled, "one failed call disabled it")
}

func TestAdminDisableEndsTrial(t *testing.T) {
	t.Parallel()
	db := newCooledSkill(t)
	runHealing(t, db, selfheal.Default())
	admit(t, db, "one")
	pgtest.Exec(t, db, "update agent_skills set disabled_by = 'admin'")
	settled, err := selfheal.Settle(t.Context(), db, skillName, true)
	assert.Truef(t, err == nil && !settled.Settled && !getSkill(t, db, skillName).Enabled,
		"self-heal enabled what an admin disabled: %+v, %v", settled, err)
}

func TestReenableEndsTrial(t *testing.T) {
	t.Parallel()
	db := newCooledSkill(t)
	runHealing(t, db, selfheal.Default())
	_, err := selfheal.Reenable(t.Context(), db, skillName, "ana", "fixed")
	require.NoError(t, err)
	trials, err := selfheal.Trials(t.Context(), db)
	assert.Truef(t, err == nil && len(trials) == 0, "trials are %+v, %v", trials, err)
	settled, err := selfheal.Settle(t.Context(), db, skillName, false)
	assert.Truef(t, err == nil && !settled.Settled && getSkill(t, db, skillName).Enabled,
		"a late failure disabled it: %+v, %v", settled, err)
	_, err = selfheal.Reenable(t.Context(), db, "nobody", "ana", "?")
	assert.ErrorIs(t, err, skills.ErrNotFound, "unknown skill")
}
