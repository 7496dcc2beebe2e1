package runner

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// outageBudgetUSD bounds a run of RunOutageCases whose suite has no budget, if the model has a price.
const outageBudgetUSD = 0.10

// RunOutageCases starts a run of the cases in which a skill fails, once each. It is called after a successful trial of
// the skill. Servers play the run with their model. The activities run_eval and eval_ended belong to the trace of ctx.
// Without such cases it does nothing.
func (r *Runner) RunOutageCases(ctx context.Context, skill string) error {
	suite, err := evals.Get(ctx, r.Pool, evals.OutageSuite)
	if errors.Is(err, evals.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if suite.Definition.Cases = suite.Definition.OutageCases(skill); len(suite.Definition.Cases) == 0 {
		return nil
	}
	run := evals.Run{Kind: evals.OfSuite, Trials: 1, Background: true}
	_, err = r.insertForSkill(ctx, r.Pool, run, evals.Subject{Suite: suite}, skill)
	return err
}

// completeRun sets the agent, skills and model of a run of RunOutageCases. The first server that plays the run calls
// it.
func (r *Runner) completeRun(ctx context.Context, run evals.Run, s evals.Subject) (evals.Run, evals.Subject, error) {
	s, err := r.Installation(r.Model.Model()).Subject(ctx, r.Pool, s.Suite)
	if err != nil {
		return run, s, err
	}
	if budget := &s.Suite.Definition.Budget; budget.CostUSD == 0 && r.Model.PricedModel(s.Model) {
		budget.CostUSD = outageBudgetUSD
	}
	if err := r.checkPrices(s); err != nil {
		return run, s, err
	}
	_, err = r.Pool.Exec(ctx, `
		update agent_eval_runs
		   set subject = @subject, agent = @agent, agent_version = @agent_version, model = @model,
		       agent_digest = @agent_digest, suite_digest = @suite_digest, runtime = @runtime
		 where id = @id and model = ''`, postgres.Strict{
		"subject": s, "agent": s.Agent.Name, "agent_version": s.Version, "model": s.Model, "agent_digest": s.AgentDigest(),
		"suite_digest": s.SuiteDigest(), "runtime": s.Runtime, "id": run.ID,
	})
	if err != nil {
		return run, s, fmt.Errorf("prepare run %s: %w", run.ID, err)
	}
	if run, err = evals.GetRun(ctx, r.Pool, run.ID); err == nil {
		s, err = evals.ReadSubject(ctx, r.Pool, run)
	}
	return run, s, err
}

// recordStart writes the activity of a started run. With enabledSkill it belongs to the trace of ctx. Otherwise it is
// an audited act of the caller.
func (r *Runner) recordStart(
	ctx context.Context, db postgres.Beginner, act activity.Act, enabledSkill string, change func(tx pgx.Tx) (any, error),
) error {
	if enabledSkill == "" {
		_, err := activity.Record(ctx, db, act, func(tx pgx.Tx, _ string) (any, error) { return change(tx) })
		return err
	}
	act.Input["returned"] = enabledSkill
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		output, err := change(tx)
		if err != nil {
			return err
		}
		_, err = activity.Note(ctx, tx, activity.Entry{Skill: act.Name, Input: act.Input}, activity.Outcome{Output: output})
		return err
	})
}

// recordEnd writes the result of a run of RunOutageCases to the trace that started it.
func (r *Runner) recordEnd(ctx context.Context, tx pgx.Tx, run evals.Run, status string) error {
	var start struct{ TraceID, Surface, Agent, Skill string }
	err := tx.QueryRow(ctx, `
		select trace_id, surface, agent, input ->> 'returned' from agent_activity
		 where skill_name = 'run_eval' and kind = 'note' and output ->> 'run' = @run::text and input ? 'returned'
		   and id >= lanekeeper.agent_uuid7_floor(@since::timestamptz - interval '1 minute')`,
		postgres.Strict{"run": run.ID, "since": run.CreatedAt}).
		Scan(&start.TraceID, &start.Surface, &start.Agent, &start.Skill)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = activity.Note(ctx, tx, activity.Entry{
		TraceID: start.TraceID, Surface: start.Surface, Agent: start.Agent, Skill: "eval_ended",
		Input: map[string]any{"eval": run.Suite, "run": run.ID, "returned": start.Skill},
	}, activity.Outcome{Output: map[string]string{"status": status}})
	return err
}
