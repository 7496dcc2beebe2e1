package flows

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
)

// Flow is one version of a flow, a row of agent_flows.
type Flow struct {
	Name       string     `json:"name"`
	Version    int        `json:"version"`
	Digest     string     `json:"digest"` // of the definition
	Definition Definition `json:"definition"`
	Source     string     `json:"source"`
	Current    bool       `json:"current"` // new executions start with it
	CreatedAt  time.Time  `json:"created_at"`
}

// Put makes d the current version of d.Name and reports whether anything changed. Running executions keep their
// version. The caller serializes calls for one name, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	verb := fmt.Sprintf("put flow %q", d.Name)
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.PutVersion(ctx, db, verb, "agent_flows", d.Name, d, nil)
}

// Remove retires the workspace's flows except keep, and returns their names. Their versions stay, for the executions
// that started with them.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.RetireOthers(ctx, db, "flows", "agent_flows", keep)
}

// Get reads the current version of a flow, or returns [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where name = @name and current`,
		postgres.Strict{"name": name})
	return collectFlow(rows, err, name)
}

// GetVersion reads one version of a flow, even of a removed flow, or returns [ErrNotFound].
func GetVersion(ctx context.Context, db postgres.DB, name string, version int) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": version})
	return collectFlow(rows, err, name)
}

func collectFlow(rows pgx.Rows, err error, name string) (Flow, error) {
	return postgres.CollectOne(rows, err, ErrNotFound, fmt.Sprintf("read flow %s", name), pgx.RowToStructByName[Flow])
}

// Filter narrows a listing. The zero value lists the first 100 current flows, by name.
type Filter struct {
	Name   string // all versions of this flow, newest first, instead of all current ones
	After  string // the listing continues after this name
	Before int    // with Name: only versions before this one
	Limit  int    // 100 when 0, at most 500
}

// List reads flows.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Flow, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	return postgres.Rows[Flow](ctx, db, "list flows", `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where case when @name = '' then current and name > @after
		            else name = @name and (@before = 0 or version < @before) end
		 order by name, version desc limit @limit`,
		postgres.Strict{"name": f.Name, "after": f.After, "before": f.Before, "limit": min(f.Limit, 500)})
}

// CheckStart reports whether an execution of a flow can start with an input. It returns [ErrRemoved] for a removed
// flow and *[InvalidInput] for input that violates the schema. A name outside agent_flows may be a flow in Go, so it
// passes.
func CheckStart(ctx context.Context, db postgres.DB, name string, input json.RawMessage) error {
	schema, err := startSchema(ctx, db, name)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	compiled, err := compileInput(schema)
	if err != nil {
		return fmt.Errorf("check start of flow %s: %w", name, err)
	}
	_, err = compiled.validate(name, input)
	return err
}

// CheckThread returns [ErrNoThread] if a flow talks and the thread is empty. A flow in Go declares nothing and passes.
func CheckThread(ctx context.Context, db postgres.DB, name, thread string) error {
	if thread != "" {
		return nil
	}
	flow, err := Get(ctx, db, name)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case Talks(flow.Definition):
		return fmt.Errorf("flow %s: %w", name, ErrNoThread)
	}
	return nil
}

// startSchema reads a flow's input schema.
func startSchema(ctx context.Context, db postgres.DB, name string) (schema map[string]any, err error) {
	var current bool
	err = db.QueryRow(ctx, `
		select current, coalesce(definition -> 'input', '{}') from agent_flows
		 where name = @name order by current desc, version desc limit 1`,
		postgres.Strict{"name": name}).Scan(&current, &schema)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("check start of flow %s: %w", name, err)
	case !current:
		return nil, fmt.Errorf("flow %s: %w", name, ErrRemoved)
	}
	return schema, nil
}

// exists reports whether a flow of this name was ever applied.
func exists(ctx context.Context, db postgres.DB, name string) (found bool, err error) {
	err = db.QueryRow(ctx, `select exists (select from agent_flows where name = @name)`,
		postgres.Strict{"name": name}).Scan(&found)
	if err != nil {
		return false, fmt.Errorf("find flow %s: %w", name, err)
	}
	return found, nil
}

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

// maxCompiled bounds the cache of compiled versions.
const maxCompiled = 256

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
			in.Logger.InfoContext(ctx, "flow started", "flow", name, "version", version)
		}
		return version, err
	})
}

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
