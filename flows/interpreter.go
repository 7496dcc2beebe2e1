package flows

import (
	"cmp"
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

// Interpreter runs flows. Pool and Engine are required. Without a Loop, the actions skill and reason fail. Interpreter
// is safe for concurrent use. Set Find as the engine's Fallback.
type Interpreter struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Loop   *reason.Loop
	Logger *slog.Logger // may be nil; actions are logged by the engine

	mu       sync.Mutex
	exists   map[string]bool // names in agent_flows; they are never deleted
	compiled map[string]*compiledFlow
}

// Find returns the function that interprets a stored flow. It returns nil for a name that agent_flows never had.
func (in *Interpreter) Find(ctx context.Context, name string) (executions.Func, error) {
	in.mu.Lock()
	known := in.exists[name]
	in.mu.Unlock()
	if !known {
		found, err := exists(ctx, in.Pool, name)
		if err != nil || !found {
			return nil, err
		}
		in.mu.Lock()
		if in.exists == nil {
			in.exists = map[string]bool{}
		}
		in.exists[name] = true
		in.mu.Unlock()
	}
	return func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		return in.run(ctx, name, input)
	}, nil
}

// run is the durable function of a flow.
func (in *Interpreter) run(ctx context.Context, name string, input json.RawMessage) (executions.Result, error) {
	version, err := in.chooseVersion(ctx, name, input)
	if err != nil {
		return executions.Result{}, err
	}
	flow, err := in.loadVersion(ctx, name, version)
	if err != nil {
		return executions.Result{}, err
	}
	m, err := newFlowRun(ctx, in, flow, input)
	if err != nil {
		return executions.Result{}, err
	}
	end, err := m.runActions(ctx, flow.actions)
	if timeout, ok := errors.AsType[*timedOut](err); ok {
		return executions.Result{Summary: "Timed out: " + timeout.Error()}, err
	}
	if err != nil {
		return executions.Result{}, err
	}
	return end.executionResult(fmt.Sprintf("Flow %s (version %d) completed.", name, version))
}

// chooseVersion chooses the version once: the current version, or the version that a fork already has.
func (in *Interpreter) chooseVersion(ctx context.Context, name string, input json.RawMessage) (int, error) {
	current, _ := executions.Current(ctx)
	return executions.StepTx(ctx, "flow version", func(ctx context.Context, tx pgx.Tx) (int, error) {
		if current.FlowVersion != nil {
			return *current.FlowVersion, nil
		}
		if err := CheckStart(ctx, tx, name, input); err != nil {
			if errors.Is(err, ErrRemoved) {
				err = classErrorf("removed", "%s", err)
			}
			return 0, err
		}
		var version int
		err := tx.QueryRow(ctx, `
			update agent_executions execution set flow_version = flow.version
			  from agent_flows flow
			 where flow.name = @name and flow.current and execution.id = @id
			returning execution.flow_version`,
			postgres.Strict{"name": name, "id": current.ID}).Scan(&version)
		if errors.Is(err, pgx.ErrNoRows) { // removed since CheckStart
			err = classErrorf("removed", "flow %s: %s", name, ErrRemoved)
		}
		if err == nil && in.Logger != nil {
			in.Logger.InfoContext(ctx, "loading configuration", "flow", name, "version", version)
		}
		return version, err
	})
}

// maxCompiled bounds the cache of compiled versions. A full cache is emptied.
const maxCompiled = 256

// loadVersion returns one compiled version. It caches versions, because they are immutable.
func (in *Interpreter) loadVersion(ctx context.Context, name string, version int) (*compiledFlow, error) {
	key := fmt.Sprintf("%s %d", name, version)
	in.mu.Lock()
	flow := in.compiled[key]
	in.mu.Unlock()
	if flow != nil {
		return flow, nil
	}
	row, err := executions.RetryTransient(ctx, func(ctx context.Context) (Flow, error) {
		return GetVersion(postgres.Unsealed(ctx), in.Pool, name, version) // a replay may read immutable data
	})
	if err != nil {
		return nil, err
	}
	if flow, err = compile(row.Definition); err != nil {
		return nil, fmt.Errorf("flow %s, version %d, is not understood by this binary: %w", name, version, err)
	}
	in.mu.Lock()
	if in.compiled == nil || len(in.compiled) >= maxCompiled {
		in.compiled = map[string]*compiledFlow{}
	}
	in.compiled[key] = flow
	in.mu.Unlock()
	return flow, nil
}

// endResult is the outcome of an action end. A nil endResult means that no such action ran.
type endResult struct {
	Status  string `json:"status"`
	Summary string `json:"summary"`
	Result  any    `json:"result"`
}

// UnmarshalJSON decodes Result with whole numbers as int.
func (e *endResult) UnmarshalJSON(raw []byte) error {
	type plain endResult
	record := struct {
		*plain
		Result json.RawMessage `json:"result"`
	}{plain: (*plain)(e)}
	err := json.Unmarshal(raw, &record)
	if err == nil {
		e.Result, err = decodeNormal(record.Result)
	}
	return err
}

func (e *endResult) executionResult(fallback string) (executions.Result, error) {
	if e == nil {
		return executions.Result{Summary: fallback}, nil
	}
	r := executions.Result{Summary: cmp.Or(e.Summary, fallback), Value: e.Result}
	switch e.Status {
	case "failed":
		return r, classErrorf("ended", "%s", cmp.Or(e.Summary, "the flow ended itself as failed"))
	case "timeout":
		return r, &timedOut{&executions.StepError{
			Class:   classTimedOut,
			Message: cmp.Or(e.Summary, "the flow ended itself as timed out"),
		}}
	}
	return r, nil
}
