package selfheal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// settleGrace is the time after the skill's timeout until another caller may be admitted.
const settleGrace = 15 * time.Minute

// settleLimit bounds the time to settle a call, whose context may have ended.
const settleLimit = 10 * time.Second

// offerTrials offers a trial for skills whose cool-down has passed. It skips locked rows, which the next run finds.
func offerTrials(ctx context.Context, db postgres.DB, p Policy) error {
	_, err := db.Exec(ctx, `
		update agent_skills s
		   set trial_at = clock_timestamp(), evidence = s.evidence - 'trial', updated_at = clock_timestamp()
		 where s.id in (
		       select o.id from agent_skills o
		        where not o.enabled and o.disabled_by = @by and o.trial_at is null
		          and o.disabled_at <= clock_timestamp() - @cooldown::interval
		          for no key update skip locked)`,
		postgres.Strict{"by": By, "cooldown": p.Cooldown})
	if err != nil {
		return fmt.Errorf("offer trials: %w", err)
	}
	return nil
}

// Trials lists the skills on trial, by name. [skills.QueueCallable] finds those that are not taken.
func Trials(ctx context.Context, db postgres.DB) ([]Trial, error) {
	list, err := postgres.Rows[Trial](ctx, db, "list trials", `
		select s.name as skill, s.disabled_reason as reason, s.trial_at as offered_at,
		       coalesce((s.evidence #>> '{trial,until}')::timestamptz > clock_timestamp(), false) as taken,
		       array(select a.name from agent_automations a
		              where a.paused_for = s.name and not a.enabled and a.disabled_by = @by order by a.name) as automations
		  from agent_skills s
		 where not s.enabled and s.disabled_by = @by and s.trial_at is not null
		 order by s.name`, postgres.Strict{"by": By})
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].OfferedAt = list[i].OfferedAt.UTC()
	}
	return list, nil
}

// Admit reports whether the caller may make the trial call of a skill. Validate the arguments first. Admit admits one
// owner until the trial is settled or withdrawn, or the skill's timeout plus 15 minutes have passed. owner identifies
// the call, for example by its idempotency key. Admit admits the same owner again, so a caller can repeat a call after
// a crash.
func Admit(ctx context.Context, db postgres.DB, skill, owner string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_skills s
		   set evidence = s.evidence || jsonb_build_object('trial', jsonb_build_object('owner', @owner::text,
		         'taken_at', clock_timestamp(),
		         'until', clock_timestamp() + make_interval(secs => s.timeout_ms / 1000.0) + @grace::interval)),
		       updated_at = clock_timestamp()
		 where s.name = @skill and not s.enabled and s.disabled_by = @by and s.trial_at is not null
		   and (s.evidence #>> '{trial,until}' is null or s.evidence #>> '{trial,owner}' = @owner
		        or (s.evidence #>> '{trial,until}')::timestamptz <= clock_timestamp())`,
		postgres.Strict{"skill": skill, "owner": owner, "by": By, "grace": settleGrace})
	if err != nil {
		return false, fmt.Errorf("admit a trial of skill %s: %w", skill, err)
	}
	return tag.RowsAffected() > 0, nil
}

// Settle ends the trial of a skill. A success enables the skill and resumes its paused automations. A failure restarts
// the cool-down. If the skill is not on trial, Settle changes nothing and Restored.Settled is false.
func Settle(ctx context.Context, db postgres.Beginner, skill string, success bool) (Restored, error) {
	restored := Restored{
		Skill: skill, By: By, Reason: "the trial failed: the cool-down begins again",
		Automations: []string{},
	}
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		disabledReason, found, err := lockTrial(ctx, tx, skill)
		if err != nil || !found {
			return err
		}
		restored.Settled, restored.WasReason = true, disabledReason
		if !success {
			_, err = skills.FailTrial(ctx, tx, skill, "failed its trial; disabled for: "+disabledReason)
			return err
		}
		restored.Enabled, restored.Reason = true, "the trial succeeded"
		if restored.Automations, err = automations.PausedFor(ctx, tx, skill); err != nil {
			return err
		}
		_, err = skills.Enable(ctx, tx, skill, By, restored.Reason)
		return err
	})
	if err != nil {
		return Restored{}, fmt.Errorf("settle the trial of skill %s: %w", skill, err)
	}
	return restored, nil
}

// Withdraw releases an admitted trial without a call, or with a call whose outcome is unknown.
func Withdraw(ctx context.Context, db postgres.DB, skill string) error {
	_, err := db.Exec(ctx, `
		update agent_skills s set evidence = s.evidence - 'trial', updated_at = clock_timestamp()
		 where s.name = @skill and not s.enabled and s.disabled_by = @by and s.trial_at is not null`,
		postgres.Strict{"skill": skill, "by": By})
	if err != nil {
		return fmt.Errorf("withdraw the trial of skill %s: %w", skill, err)
	}
	return nil
}

// After returns a function to call with the outcome of each skill call. The function settles trials and writes an
// activity (settle_trial). Only a failure of the skill counts: a rejected call, or a call whose run ended, withdraws
// the trial. When a trial enables the skill again, the function calls onEnabled, whose error does not disable the
// skill.
func After(
	db postgres.Beginner, onEnabled ...func(ctx context.Context, skill string) error,
) func(ctx context.Context, skill skills.Skill, err error) error {
	return func(ctx context.Context, skill skills.Skill, err error) error {
		if skill.Enabled {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
		defer cancel()
		failure, isFailure := errors.AsType[*skills.CallError](err)
		if err != nil && !isFailure {
			return Withdraw(ctx, db, skill.Name)
		}
		enabled := false
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
			restored, err := Settle(ctx, tx, skill.Name, !isFailure)
			enabled = restored.Enabled
			if err != nil || !restored.Settled {
				return err
			}
			outcome := activity.Outcome{Output: restored}
			if isFailure {
				outcome.Class, outcome.Message = failure.Class, failure.Message
			}
			_, err = activity.Note(ctx, tx, activity.Entry{
				Skill: "settle_trial", SkillID: skill.ID,
				Input: map[string]any{"skill": skill.Name, "success": !isFailure},
			}, outcome)
			return err
		})
		if err != nil || !enabled {
			return err
		}
		var errs []error
		for _, call := range onEnabled {
			errs = append(errs, call(ctx, skill.Name))
		}
		return errors.Join(errs...)
	}
}

// lockTrial locks a skill on trial and returns the reason why it was disabled.
func lockTrial(ctx context.Context, tx pgx.Tx, skill string) (reason string, found bool, err error) {
	err = tx.QueryRow(ctx, `
		select coalesce(evidence ->> 'reason', disabled_reason) from agent_skills
		 where name = @skill and not enabled and disabled_by = @by and trial_at is not null
		   for no key update`, postgres.Strict{"skill": skill, "by": By}).Scan(&reason)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", false, nil
	}
	return reason, err == nil, err
}

// Restored is the outcome of Settle or Reenable, for an activity row.
type Restored struct {
	Skill       string   `json:"skill"`
	Settled     bool     `json:"settled"` // this call changed the skill
	Enabled     bool     `json:"enabled"`
	By          string   `json:"by"`
	Reason      string   `json:"reason"`
	WasReason   string   `json:"was_reason"`  // why it was disabled
	Automations []string `json:"automations"` // the resumed automations
}

// ErrToolChanged reports a skill that package mcp disabled: its tool differs from the accepted version, or is gone.
var ErrToolChanged = errors.New("its MCP tool is not the accepted one")

// Reenable enables a skill, and resumes the automations paused for the skill. Earlier calls no longer count. The caller
// writes by and reason into its activity. For an unknown skill the error wraps skills.ErrNotFound. For a skill that
// package mcp disabled it wraps [ErrToolChanged].
func Reenable(ctx context.Context, db postgres.Beginner, skill, by, reason string) (Restored, error) {
	restored := Restored{Skill: skill, Enabled: true, By: by, Reason: reason, Automations: []string{}}
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		before, err := skills.Get(ctx, tx, skill)
		if err != nil {
			return err
		}
		if before.Source == skills.SourceMCP && before.DisabledBy == skills.SourceMCP {
			return fmt.Errorf("%w: %s", ErrToolChanged, before.DisabledReason)
		}
		restored.WasReason = before.DisabledReason
		if restored.Automations, err = automations.PausedFor(ctx, tx, skill); err != nil {
			return err
		}
		restored.Settled, err = skills.Enable(ctx, tx, skill, by, reason)
		return err
	})
	if err != nil {
		return Restored{}, fmt.Errorf("re-enable skill %s: %w", skill, err)
	}
	return restored, nil
}
