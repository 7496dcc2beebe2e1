package randomflows_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// flowName is the name of the only flow. Its input determines its ops.
const flowName = "drawn"

// flowInput is the input. The seed is text, because JSON numbers have 53 bits.
type flowInput struct {
	Seed  string `json:"seed"`
	Depth int    `json:"depth"`
}

// player runs flows. Their calls go to a sink, which counts them.
type player struct{ sink string }

// flow is the durable function.
func (p player) flow(ctx context.Context, input json.RawMessage) (executions.Result, error) {
	var a flowInput
	if err := json.Unmarshal(input, &a); err != nil {
		return executions.Result{}, err
	}
	seed, err := strconv.ParseUint(a.Seed, 10, 64)
	if err != nil {
		return executions.Result{}, err
	}
	value, err := p.runOps(ctx, plan(seed, a.Depth), a.Depth, keyOf(seed), 0)
	return executions.Result{Value: value}, err
}

func (p player) runOps(ctx context.Context, ops []op, depth int, path string, value int) (int, error) {
	for i, o := range ops {
		next, err := p.runOp(ctx, o, depth, opPath(path, i), value)
		if err != nil {
			return 0, err
		}
		value = nextValue(value, next)
	}
	return value, nil
}

// runOp runs one op. Its error ends the run of the flow, for now or finally.
func (p player) runOp(ctx context.Context, o op, depth int, path string, value int) (int, error) {
	switch o.kind {
	case step:
		return executions.Step(ctx, o.name, func(ctx context.Context) (int, error) { return o.n, pause(ctx, o.lasts) },
			executions.Input(value))
	case fails, bounded:
		return o.n, p.runFailingStep(ctx, o)
	case effect:
		return executions.StepTx(ctx, o.name, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return o.n, insertNote(ctx, tx)
		})
	case within:
		return executions.StepTx(ctx, o.name, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return p.runTx(ctx, tx, o)
		})
	case call, once:
		return p.call(ctx, o)
	case delay, event, never:
		return o.n, wait(ctx, o, path)
	case child, aside:
		return p.trigger(ctx, o, depth)
	case children:
		return p.children(ctx, o, depth)
	case show:
		return o.n, executions.SetVariables(ctx, json.RawMessage(variablesOf(value)))
	case now:
		got, err := executions.Now(ctx)
		if err == nil && got.IsZero() {
			err = errors.New("no time")
		}
		return o.n, err
	case branches:
		return p.branches(ctx, o, depth, path)
	case phase:
		return executions.Phase(ctx, o.name, func(ctx context.Context, _ *executions.Effect) (int, error) {
			return p.runOps(ctx, o.parts[0], depth+1, path, 0)
		})
	case nest:
		return executions.Step(ctx, o.name, func(ctx context.Context) (int, error) {
			return p.runOps(ctx, o.parts[0], depth+1, path, 0)
		})
	case scope:
		return p.runOps(executions.Scope(ctx, o.name+path), o.parts[0], depth+1, path, 0)
	case loop:
		return p.loop(ctx, o, depth, path)
	case lane:
		return p.runInLane(ctx, o, depth, path)
	}
	return 0, fmt.Errorf("no such op: %s", o.kind)
}

// pause takes some time, which ctx may end.
func pause(ctx context.Context, lasts time.Duration) error {
	if !sleep.For(ctx, lasts) {
		return context.Cause(ctx)
	}
	return nil
}

// insertNote writes a row of the step it is in.
func insertNote(ctx context.Context, tx pgx.Tx) error {
	x, _ := executions.Current(ctx)
	_, err := tx.Exec(ctx, `insert into proof.effects (execution_id, step) values (@id, @step)`,
		postgres.Strict{"id": x.ID, "step": executions.StepKey(ctx)})
	return err
}

// runTx is the body of a transaction with a step and a call.
func (p player) runTx(ctx context.Context, tx pgx.Tx, o op) (int, error) {
	n, err := executions.Step(ctx, o.name, func(context.Context) (int, error) { return o.n, nil })
	if err == nil {
		_, err = p.call(ctx, op{kind: call, name: o.name, n: o.n})
	}
	if err == nil {
		err = insertNote(ctx, tx)
	}
	return n, err
}

// runFailingStep runs a step that fails by itself or by its limit. The flow continues.
func (p player) runFailingStep(ctx context.Context, o op) error {
	failing := func(context.Context) (int, error) { return 0, errors.New("as it should") }
	if o.kind == bounded {
		limited, cancel := context.WithTimeout(ctx, o.lasts)
		defer cancel()
		ctx = limited
		failing = func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
	}
	_, err := executions.Step(ctx, o.name, failing)
	var recorded *executions.StepError
	switch {
	case errors.As(err, &recorded):
		return nil
	case err == nil:
		return fmt.Errorf("the step %s has not failed", o.name)
	}
	return err
}

// call calls the sink. An unknown outcome has the same value.
func (p player) call(ctx context.Context, o op) (int, error) {
	c := executions.Call{Idempotent: o.kind == call}
	c.Skill = string(o.kind)
	got, err := executions.Do(ctx, o.name, c, func(ctx context.Context, made *executions.Effect) (int, error) {
		return o.n, p.post(ctx, o.kind, made.Key)
	})
	var unknown *executions.StepError
	if o.kind == once && errors.As(err, &unknown) && unknown.Class == executions.ClassUnknown {
		return o.n, nil
	}
	return got, err
}

// post sends the call.
func (p player) post(ctx context.Context, k kind, key string) error {
	x, _ := executions.Current(ctx)
	where := p.sink + "?" + url.Values{
		"kind": {string(k)}, "execution": {x.ID}, "step": {executions.StepKey(ctx)},
		"key": {key},
	}.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, where, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // the body is not read
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the sink says %s", resp.Status)
	}
	return nil
}

// wait waits for an event or a time.
func wait(ctx context.Context, o op, path string) error {
	w := executions.Delay(o.lasts)
	switch o.kind {
	case event:
		w = executions.Event(path, time.Hour)
	case never:
		w = executions.Event("never "+path, o.lasts+time.Millisecond)
	default:
	}
	got, err := executions.Wait(ctx, o.name, w)
	switch {
	case err != nil:
		return err
	case o.kind == event && (got.TimedOut || string(got.Data) != dataOf(path)):
		return fmt.Errorf("the event %s came as %s, timed out %t", path, got.Data, got.TimedOut)
	case o.kind == never && !got.TimedOut:
		return fmt.Errorf("the event of nobody came as %s", got.Data)
	}
	return nil
}

// dataOf returns the data of an event, in the database's format.
func dataOf(key string) string { return fmt.Sprintf(`{"key": %q}`, key) }

// trigger starts a child, and waits for it if the op says so.
func (p player) trigger(ctx context.Context, o op, depth int) (int, error) {
	got, err := executions.Trigger(ctx, o.name, childOf(o.seed, depth, o.kind == child))
	if err != nil || o.kind == aside {
		return o.n, err
	}
	return valueOf(got)
}

// children starts the op's children, and then waits for each.
func (p player) children(ctx context.Context, o op, depth int) (int, error) {
	var ids, steps []string
	for _, seed := range o.seeds() {
		id, step, err := executions.StartChild(ctx, o.name, childOf(seed, depth, true))
		if err != nil {
			return 0, err
		}
		ids, steps = append(ids, id), append(steps, step)
	}
	all := 0
	for i, id := range ids {
		got, err := executions.AwaitChild(ctx, steps[i], id, 0)
		if err != nil {
			return 0, err
		}
		value, err := valueOf(got)
		if err != nil {
			return 0, err
		}
		all = nextValue(all, value)
	}
	return all, nil
}

// childOf describes the child of a seed.
func childOf(seed uint64, depth int, waits bool) executions.Child {
	input := flowInput{Seed: strconv.FormatUint(seed, 10), Depth: depth + 1}
	return executions.Child{Flow: flowName, Input: input, Wait: waits}
}

// valueOf returns the value of an ended child.
func valueOf(got executions.ChildResult) (value int, err error) {
	if !got.Success {
		return 0, fmt.Errorf("the child %s is %s: %s", got.ExecutionID, got.Status, got.Error)
	}
	err = json.Unmarshal(got.Result, &value)
	return value, err
}

// branches run at the same time. If they are joined, the first error stops the others.
func (p player) branches(ctx context.Context, o op, depth int, path string) (int, error) {
	values := make([]int, len(o.parts))
	group, within := &errgroup.Group{}, ctx
	if o.joined {
		group, within = errgroup.WithContext(ctx)
	}
	for b, part := range o.parts {
		group.Go(func() (err error) {
			values[b], err = p.runOps(executions.Scope(within, opPath(path, b)), part, depth+1, opPath(path, b), 0)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	all := 0
	for _, value := range values {
		all = nextValue(all, value)
	}
	return all, nil
}

// state is passed from one iteration of a loop to the next.
type state struct{ Value, Done int }

func (p player) loop(ctx context.Context, o op, depth int, path string) (int, error) {
	last, err := executions.Loop(ctx, o.name+path, state{}, func(ctx context.Context, s state) (state, bool, error) {
		value, err := p.runOps(ctx, o.parts[0], depth+1, path, s.Value)
		return state{Value: value, Done: s.Done + 1}, s.Done+1 == o.times, err
	})
	return last.Value, err
}

// runInLane runs ops in a lane, and records their begin and end.
func (p player) runInLane(ctx context.Context, o op, depth int, path string) (int, error) {
	hold, err := executions.Lane(ctx, o.name)
	for errors.Is(err, lanes.ErrBusy) {
		if _, err = executions.Wait(ctx, "free "+path, executions.LaneFree(o.name, time.Hour)); err == nil {
			hold, err = executions.Lane(ctx, o.name)
		}
	}
	if err != nil {
		return 0, err
	}
	value, within := 0, hold.Context()
	for _, at := range []string{"begins", "ends"} {
		_, err := executions.StepTx(within, at+" "+path, func(ctx context.Context, tx pgx.Tx) (int, error) {
			x, _ := executions.Current(ctx)
			_, err := tx.Exec(ctx, `insert into proof.alone (lane, execution_id, place, at) values (@lane, @id, @place, @at)`,
				postgres.Strict{"lane": o.name, "id": x.ID, "place": path, "at": at})
			return 0, err
		})
		if err == nil && at == "begins" {
			value, err = p.runOps(within, o.parts[0], depth+1, path, 0)
		}
		if err != nil {
			return 0, err
		}
	}
	return value, hold.Release(ctx)
}
