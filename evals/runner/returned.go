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

// ErrNoModel reports a command that has no model, such as agent skills call.
var ErrNoModel = errors.New("this process has no model; agent eval run selfheal runs them")

// returnedUSD bounds a run of Returned whose suite has no budget, if the model has a price.
const returnedUSD = 0.10

// Returned starts a run of the cases in which a skill fails, once each, after the trial of the skill enabled it again.
// Servers play the run. A process without a model returns ErrNoModel. The activities run_eval and eval_ended are
// written to the trace of ctx. Without such cases it does nothing.
func (r *Runner) Returned(ctx context.Context, skill string) error {
	suite, err := evals.Get(ctx, r.Pool, evals.OutageSuite)
	if errors.Is(err, evals.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if suite.Definition.Cases = suite.Definition.Outages(skill); len(suite.Definition.Cases) == 0 {
		return nil
	}
	if r.Model == nil {
		return fmt.Errorf("run the cases of skill %s: %w", skill, ErrNoModel)
	}
	subject, err := r.Installation(r.Model.Model()).Subject(ctx, r.Pool, suite)
	if err != nil {
		return err
	}
	if budget := &subject.Suite.Definition.Budget; budget.CostUSD == 0 && r.Model.PricedModel(subject.Model) {
		budget.CostUSD = returnedUSD
	}
	_, err = r.start(ctx, subject, Options{Trials: 1, Background: true, returned: skill}, false)
	return err
}

// record writes the row of a started run: in the trace of the skill that came back, or as an act of the caller.
func (r *Runner) record(
	ctx context.Context, db postgres.Beginner, act activity.Act, returned string, change func(tx pgx.Tx) (any, error),
) error {
	if returned == "" {
		_, err := activity.Record(ctx, db, act, func(tx pgx.Tx, _ string) (any, error) { return change(tx) })
		return err
	}
	act.Input["returned"] = returned
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		output, err := change(tx)
		if err != nil {
			return err
		}
		_, err = activity.Note(ctx, tx, activity.Entry{Skill: act.Name, Input: act.Input}, activity.Outcome{Output: output})
		return err
	})
}

// noteEnd writes the result of a run of Returned into the trace that it began in.
func (r *Runner) noteEnd(ctx context.Context, tx pgx.Tx, run evals.Run, status string) error {
	var begun struct{ TraceID, Surface, Agent, Skill string }
	err := tx.QueryRow(ctx, `
		select trace_id, surface, agent, input ->> 'returned' from agent_activity
		 where skill_name = 'run_eval' and kind = 'note' and output ->> 'run' = @run::text and input ? 'returned'
		   and id >= lanekeeper.agent_uuid7_floor(@since::timestamptz - interval '1 minute')`,
		postgres.Strict{"run": run.ID, "since": run.CreatedAt}).
		Scan(&begun.TraceID, &begun.Surface, &begun.Agent, &begun.Skill)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = activity.Note(ctx, tx, activity.Entry{
		TraceID: begun.TraceID, Surface: begun.Surface, Agent: begun.Agent, Skill: "eval_ended",
		Input: map[string]any{"eval": run.Suite, "run": run.ID, "returned": begun.Skill},
	}, activity.Outcome{Output: map[string]string{"status": status}})
	return err
}
