package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
)

// Interpreter carries flows out. Pool and Engine are required; without a Loop the actions skill and reason fail. It is safe
// for concurrent use. Give its Find to the Fallback of the engine.
type Interpreter struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Loop   *reason.Loop
	Logger *slog.Logger // may be nil; actions are logged by the engine

	mu    sync.Mutex
	known map[string]bool // names that agent_flows has; they never leave it
	ready map[string]*compiled
}

// mostReady is how many compiled versions are kept.
const mostReady = 256

// Find is how the engine comes to flows that are data: it returns nil for a name that agent_flows has never had.
func (in *Interpreter) Find(ctx context.Context, name string) (executions.Func, error) {
	in.mu.Lock()
	known := in.known[name]
	in.mu.Unlock()
	if !known {
		found, err := exists(ctx, in.Pool, name)
		if err != nil || !found {
			return nil, err
		}
		in.mu.Lock()
		if in.known == nil {
			in.known = map[string]bool{}
		}
		in.known[name] = true
		in.mu.Unlock()
	}
	return func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		return in.run(ctx, name, input)
	}, nil
}

// run is the durable function of a flow.
func (in *Interpreter) run(ctx context.Context, name string, input json.RawMessage) (executions.Result, error) {
	version, err := in.begin(ctx, name, input)
	if err != nil {
		return executions.Result{}, err
	}
	flow, err := in.load(ctx, name, version)
	if err != nil {
		return executions.Result{}, err
	}
	m, err := newMachine(ctx, in, flow, input)
	if err != nil {
		return executions.Result{}, err
	}
	ended, err := m.block(ctx, flow.actions)
	if late, ok := errors.AsType[*timedOut](err); ok {
		return executions.Result{Summary: "Timed out: " + late.Error()}, err
	}
	if err != nil {
		return executions.Result{}, err
	}
	return ended.result(fmt.Sprintf("Flow %s (version %d) completed.", name, version))
}

// begin chooses the version, once: the one that is current when the execution begins, or the one that a fork was given.
func (in *Interpreter) begin(ctx context.Context, name string, input json.RawMessage) (int, error) {
	current, _ := executions.Current(ctx)
	return executions.StepTx(ctx, "flow version", func(ctx context.Context, tx pgx.Tx) (int, error) {
		if current.FlowVersion != nil {
			return *current.FlowVersion, nil
		}
		if err := CheckStart(ctx, tx, name, input); err != nil {
			if errors.Is(err, ErrRemoved) {
				err = failure("removed", "%s", err)
			}
			return 0, err
		}
		var version int
		err := tx.QueryRow(ctx, `
			with v as (select version from agent_flows where name = @name and current)
			update agent_executions x set flow_version = v.version from v where x.id = @id returning x.flow_version`,
			postgres.Strict{"name": name, "id": current.ID}).Scan(&version)
		if errors.Is(err, pgx.ErrNoRows) { // removed in this moment
			err = failure("removed", "flow %s: %s", name, ErrRemoved)
		}
		if err == nil && in.Logger != nil {
			in.Logger.InfoContext(ctx, "flow begun", "flow", name, "version", version)
		}
		return version, err
	})
}

// load is one version, compiled. Versions never change, so they are kept.
func (in *Interpreter) load(ctx context.Context, name string, version int) (*compiled, error) {
	key := fmt.Sprintf("%s %d", name, version)
	in.mu.Lock()
	flow := in.ready[key]
	in.mu.Unlock()
	if flow != nil {
		return flow, nil
	}
	row, err := executions.Persist(ctx, func(ctx context.Context) (Flow, error) {
		return GetVersion(postgres.Unsealed(ctx), in.Pool, name, version) // a replay may read what never changes
	})
	if err != nil {
		return nil, err
	}
	if flow, err = compile(row.Definition); err != nil {
		return nil, fmt.Errorf("flow %s, version %d, is not understood by this binary: %w", name, version, err)
	}
	in.mu.Lock()
	if in.ready == nil || len(in.ready) >= mostReady {
		in.ready = map[string]*compiled{}
	}
	in.ready[key] = flow
	in.mu.Unlock()
	return flow, nil
}

// ending is what the action end says. The nil one is the end of the list.
type ending struct {
	Status  string `json:"status"`
	Summary string `json:"summary"`
	Result  any    `json:"result"`
}

func (e *ending) result(standard string) (executions.Result, error) {
	if e == nil {
		return executions.Result{Summary: standard}, nil
	}
	r := executions.Result{Summary: orElse(e.Summary, standard), Value: e.Result}
	switch e.Status {
	case "failed":
		return r, failure("ended", "%s", orElse(e.Summary, "the flow ended itself as failed"))
	case "timeout":
		return r, &timedOut{&executions.StepError{Class: classTimedOut, Message: orElse(e.Summary, "the flow ended itself as timed out")}}
	}
	return r, nil
}
