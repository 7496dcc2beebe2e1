package executions

import (
	"context"
	_ "embed" // for the SQL statement in a file of its own
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ErrNoFork reports an execution that cannot be forked. The error's text gives the reason and an alternative.
var ErrNoFork = errors.New("it cannot be forked")

// ErrNoStep reports a fork from a step without a checkpoint.
var ErrNoStep = errors.New("no such recorded step")

// ForkSpec describes a fork.
type ForkSpec struct {
	ID string
	// From is the key of the first step to run again: a recorded step, an unfinished phase or loop, a scope, or a waiting
	// step. If From is empty, the fork keeps every checkpoint.
	From string
	// Input replaces the input; nil keeps it.
	Input json.RawMessage
	// Latest uses the current version of a flow that is stored as data, instead of the recorded version.
	Latest bool
}

// Unforkable makes forks of a flow fail with ErrNoFork and a reason, which should name an alternative. Use it for flows
// that may have only one execution for each subject, such as a chat turn. Call it before Run.
func (e *Engine) Unforkable(flow, reason string) {
	if e.unforkable == nil {
		e.unforkable = map[string]string{}
	}
	e.unforkable[flow] = reason
}

// WhyUnforkable returns the reasons that were given to Unforkable, by flow. Do not change the map.
func (e *Engine) WhyUnforkable() map[string]string { return e.unforkable }

// Fork starts a new execution with its own trace. The fork copies the checkpoints before a step and runs the rest
// again. Steps, calls, children, messages and requests from that step on are its own. Fork does not change the original
// execution. A fork has no parent.
//
// Checkpoints before a step are those recorded earlier than the step. For an unfinished phase, loop or scope, its first
// inner step decides. The fork drops the inner steps of the named step, approvals of calls that the original never
// made, and a request to people without a later step. It acquires its own lanes, and sends messages under its own
// claim. A fork from a wait waits again: a delay starts over, and other waits need a new event. A wait for a child
// waits for the original's child if the fork keeps the start of that child.
//
// Fork replays the copied checkpoints with s.Input. If a checkpoint has another recorded input (see Input), Fork fails
// with ErrChanged and the name of the step. If the flow fails between steps, Fork fails with ErrNoFork. A failure that
// the replay does not reach fails the new execution instead. Further errors: ErrNotFound, ErrNoStep, ErrNoFork.
func (e *Engine) Fork(ctx context.Context, db postgres.Beginner, s ForkSpec) (Execution, error) {
	x, err := Get(ctx, db, s.ID)
	if err != nil {
		return Execution{}, fmt.Errorf("fork: %w", err)
	}
	if reason := e.unforkable[x.Flow]; reason != "" {
		return Execution{}, fmt.Errorf("fork execution %s of %s: %w: %s", x.ID, x.Flow, ErrNoFork, reason)
	}
	if s.Input != nil && !json.Valid(s.Input) {
		return Execution{}, fmt.Errorf("fork execution %s: the input is not JSON", x.ID)
	}
	var forked Execution
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if s.Input != nil {
			if err := e.checkInput(ctx, tx, x, s); err != nil {
				return err
			}
		}
		if forked, err = e.fork(ctx, tx, s); err != nil {
			return err
		}
		return activity.RecordRequester(ctx, tx, "execution "+forked.ID)
	})
	if err != nil {
		return Execution{}, fmt.Errorf("fork execution %s: %w", x.ID, err)
	}
	e.log.InfoContext(ctx, "execution forked", "execution", x.ID, "from", s.From, "fork", forked.ID)
	return forked, nil
}

//go:embed fork_steps.sql
var forkStepsSQL string

// fork inserts the execution with its checkpoints and labels, and wakes a worker. The row starts with claim 1, so its
// first claim has number 2 and loads the checkpoints. The row lock prevents retention from deleting the original
// meanwhile. The waits of an external worker are numbered, so the fork counts those that it keeps. The kept actions of
// a flow in YAML may have read the variables executionId and traceId, so these keep their values.
func (e *Engine) fork(ctx context.Context, tx pgx.Tx, s ForkSpec) (Execution, error) {
	var id string
	var oldVersion, version *int
	err := tx.QueryRow(ctx, `
		with original as materialized (
		  select x.*, coalesce((select f.version from agent_flows f where @latest and f.name = x.flow and f.current),
		                       x.flow_version) as version
		    from agent_executions x where x.id = @id for key share of x)
		insert into agent_executions (trace_id, surface, agent, flow, flow_version, thread_id, queue, priority, status,
		       claim, input, variables, on_lost, max_attempts, progress_seconds, forked_from, forked_step)
		select @trace_id, 'flow', o.agent, o.flow, o.version, o.thread_id, 'background', o.priority, 'pending',
		       1, coalesce(@input, o.input),
		       coalesce((select jsonb_object_agg(v.key, v.value) from jsonb_each(o.variables) v
		                  where v.key in ('executionId', 'traceId')), '{}'),
		       o.on_lost, o.max_attempts, o.progress_seconds, o.id, @from
		  from original o
		returning id::text, flow_version, (select o.flow_version from original o)`, postgres.Strict{
		"id": s.ID, "from": null(s.From), "input": s.Input, "trace_id": string(trace.New(trace.Flow)), "latest": s.Latest,
	}).Scan(&id, &version, &oldVersion)
	if errors.Is(err, pgx.ErrNoRows) {
		return Execution{}, ErrNotFound
	} else if err != nil {
		return Execution{}, err
	}
	var stepCount int
	err = tx.QueryRow(ctx, `
		with steps as materialized (`+forkStepsSQL+`),
		copied as (
		  insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output, created_at)
		  select @fork, s.step, 1, s.fingerprint, s.failed,
		         case when s.step = 'flow version' and @old_version::int is not null and not s.failed
		              then to_jsonb(@version::int) else s.output end, s.created_at
		    from steps s where s.step is not null),
		numbered as (
		  update agent_executions x
		     set wait_number = (select count(*) from steps s where s.step ~ '^wait [a-z]+ [0-9]+$')
		   where x.id = @fork and x.is_external),
		labelled as (
		  insert into agent_execution_labels (execution_id, name, value)
		  select @fork, l.name, l.value from agent_execution_labels l where l.execution_id = @id)
		select count(*) from steps`, postgres.Strict{
		"id": s.ID, "from": null(s.From), "fork": id, "old_version": oldVersion, "version": version,
	}).Scan(&stepCount)
	switch {
	case err != nil:
		return Execution{}, err
	case stepCount == 0:
		return Execution{}, fmt.Errorf("from %q: %w", s.From, ErrNoStep)
	}
	forked, err := Get(ctx, tx, id)
	if err != nil {
		return Execution{}, err
	}
	return forked, e.insertWakeups(ctx, tx, []wakeup{{forked.ID, 0, forked.Queue, forked.Priority}})
}

// forkSteps reads the checkpoints that a fork copies. It returns ErrNoStep for an unknown step.
func forkSteps(ctx context.Context, tx pgx.Tx, s ForkSpec) ([]Checkpoint, error) {
	rows, err := tx.Query(ctx, forkStepsSQL, postgres.Strict{"id": s.ID, "from": null(s.From)})
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var checkpoints []Checkpoint
	found := false
	for rows.Next() {
		found = true
		if rows.RawValues()[0] == nil { // the step exists without checkpoints before it
			continue
		}
		checkpoint, err := pgx.RowToStructByPos[Checkpoint](rows)
		if err != nil {
			return nil, err
		}
		checkpoints = append(checkpoints, checkpoint)
	}
	if rows.Err() == nil && !found {
		return nil, fmt.Errorf("from %q: %w", s.From, ErrNoStep)
	}
	return checkpoints, rows.Err()
}

// checkInput replays the flow with the new input and the checkpoints of the fork. It returns an error if a checkpoint
// belongs to another input, or if the flow fails between steps.
func (e *Engine) checkInput(ctx context.Context, tx pgx.Tx, x Execution, s ForkSpec) error {
	if fn, err := e.flow(ctx, x.Flow); err != nil || fn == nil {
		return err
	}
	checkpoints, err := forkSteps(ctx, tx, s)
	if err != nil {
		return err
	}
	if s.Latest && x.FlowVersion != nil {
		if err := useCurrentVersion(ctx, tx, &x, checkpoints); err != nil {
			return err
		}
	}
	slices.SortStableFunc(checkpoints, func(a, b Checkpoint) int { return a.CreatedAt.Compare(b.CreatedAt) })
	x.Input, x.Status, x.ErrorMessage = s.Input, Running, nil
	replayed, err := e.replayCheckpoints(ctx, x, checkpoints, nil)
	if err != nil {
		return err
	}
	switch {
	case replayed.changed != "":
		conflict := strings.TrimSuffix(replayed.changed, ": "+errOtherInput.Error())
		return &inputConflict{strings.TrimSuffix(conflict, ": "+ErrChanged.Error()) +
			"; fork from this step or one before it"}
	case replayed.failure != "":
		return fmt.Errorf("%w: with this input the flow fails: %s", ErrNoFork, replayed.failure)
	}
	return nil
}

// inputConflict is an ErrChanged that a new input caused, not new code.
type inputConflict struct{ message string }

func (c *inputConflict) Error() string        { return c.message }
func (c *inputConflict) Is(target error) bool { return target == ErrChanged }

// useCurrentVersion sets the current version of the flow in an execution and its checkpoints, as fork does.
func useCurrentVersion(ctx context.Context, tx pgx.Tx, x *Execution, checkpoints []Checkpoint) error {
	var version int
	err := tx.QueryRow(ctx,
		`select coalesce((select f.version from agent_flows f where f.name = @flow and f.current), @old_version)`,
		postgres.Strict{"flow": x.Flow, "old_version": *x.FlowVersion}).Scan(&version)
	if err != nil {
		return fmt.Errorf("read current version of flow %s: %w", x.Flow, err)
	}
	x.FlowVersion = &version
	for i := range checkpoints {
		if checkpoints[i].Step == "flow version" && !checkpoints[i].Failed {
			checkpoints[i].Output = fmt.Appendf(nil, "%d", version)
		}
	}
	return nil
}
