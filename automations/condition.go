package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/vm"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Bounds of a condition. Loops over a payload (all, any, map, …) are rejected, so that a condition's cost grows only
// with its length.
const (
	maxCondition = 1000    // bytes
	maxNodes     = 200     // AST nodes
	maxMemory    = 100_000 // VM memory budget
)

// Counters are variables available to conditions and signals. Names with the suffix 24h cover the last 24 hours.
type Counters struct {
	PendingApprovals   int     `expr:"pending_approvals" json:"pending_approvals"`
	Failures24h        int     `expr:"failures_24h" json:"failures_24h"` // failed calls of skills
	Calls24h           int     `expr:"calls_24h" json:"calls_24h"`
	Tokens24h          int     `expr:"tokens_24h" json:"tokens_24h"`
	CostUSD24h         float64 `expr:"cost_usd_24h" json:"cost_usd_24h"`
	ExecutionsPending  int     `expr:"executions_pending" json:"executions_pending"`
	ExecutionsRunning  int     `expr:"executions_running" json:"executions_running"`
	ExecutionsWaiting  int     `expr:"executions_waiting" json:"executions_waiting"`
	SkillsDisabled     int     `expr:"skills_disabled" json:"skills_disabled"`
	ObjectivesActive   int     `expr:"objectives_active" json:"objectives_active"`
	ObjectivesOverdue  int     `expr:"objectives_overdue" json:"objectives_overdue"` // due for over an hour
	ObjectivesProposed int     `expr:"objectives_proposed" json:"objectives_proposed"`
	AutomationsDead    int     `expr:"automations_dead" json:"automations_dead"` // dead runs
	Memories           int     `expr:"memories" json:"memories"`
}

// ConditionEnv is the environment of an event condition. Its JSON is the payload of a run.
type ConditionEnv struct {
	Event    string `expr:"event" json:"event"`
	Key      string `expr:"key" json:"key"`
	Payload  any    `expr:"payload" json:"data"`
	Counters `json:"-"`
}

// Count reads the counters in one snapshot.
func Count(ctx context.Context, db postgres.DB) (Counters, error) {
	rows, err := db.Query(ctx, `
		with a as (
		  select count(*) filter (where kind = 'call' and status = 'error') as failures,
		         count(*) filter (where kind = 'call') as calls,
		         coalesce(sum(lanekeeper.agent_tokens(token_usage, 'total_tokens')) filter (where kind = 'model'), 0)::bigint
		           as tokens,
		         coalesce(sum(cost_usd) filter (where kind = 'model'), 0)::float8 as cost
		    from agent_activity where id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '24 hours'))),
		x as (
		  select count(*) filter (where status = 'pending') as pending, count(*) filter (where status = 'running') as running,
		         count(*) filter (where status = 'waiting') as waiting
		    from agent_executions where status in ('pending', 'running', 'waiting')),
		o as (
		  select count(*) filter (where status = 'active') as active, count(*) filter (where status = 'proposed') as proposed,
		         count(*) filter (where status = 'active' and due_at < clock_timestamp() - interval '1 hour') as overdue
		    from agent_objectives where status in ('active', 'proposed'))
		select (select count(*) from agent_approvals where status = 'pending' and expires_at > clock_timestamp())
		         as pending_approvals,
		       a.failures as failures_24h, a.calls as calls_24h, a.tokens as tokens_24h, a.cost as cost_usd_24h,
		       x.pending as executions_pending, x.running as executions_running, x.waiting as executions_waiting,
		       (select count(*) from agent_skills where not enabled) as skills_disabled,
		       o.active as objectives_active, o.overdue as objectives_overdue, o.proposed as objectives_proposed,
		       (select count(*) from agent_automation_runs where status = 'dead') as automations_dead,
		       (select count(*) from agent_memory where expires_at is null or expires_at > clock_timestamp()) as memories
		  from a, x, o`)
	return postgres.CollectOne(rows, err, pgx.ErrNoRows, "count", pgx.RowToStructByName[Counters])
}

// compile compiles a boolean condition over env, which is ConditionEnv{} or Counters{}. The error names the position.
func compile(text string, env any) (*vm.Program, error) {
	if len(text) > maxCondition {
		return nil, fmt.Errorf("must have at most %d bytes", maxCondition)
	}
	options := []expr.Option{expr.Env(env), expr.AsBool(), expr.MaxNodes(maxNodes), expr.DisableAllBuiltins()}
	for _, name := range []string{
		"len", "lower", "upper", "trim", "int", "float", "string", "abs", "hasPrefix", "hasSuffix",
	} {
		options = append(options, expr.EnableBuiltin(name))
	}
	loops := &loopFinder{}
	program, err := expr.Compile(text, append(options, expr.Patch(loops))...)
	if err == nil && loops.found {
		runes := []rune(text)
		before := string(runes[:min(loops.offset, len(runes))])
		return nil, positionError("loops and ranges are not supported", 1+strings.Count(before, "\n"),
			utf8.RuneCountInString(before[strings.LastIndex(before, "\n")+1:]))
	}
	return program, withPosition(err)
}

// withPosition adds the position of a condition's error to its message.
func withPosition(err error) error {
	if failure, ok := errors.AsType[*file.Error](err); ok {
		message := strings.Replace(failure.Message, `Operator("=")`, `"="; write == to compare`, 1)
		return positionError(message, failure.Line, failure.Column)
	}
	return err
}

// positionError formats an error. line counts from 1, column from 0.
func positionError(message string, line, column int) error {
	return fmt.Errorf("%s (line %d, column %d)", message, line, column+1)
}

// loopFinder finds predicates and ranges, whose cost depends on the payload.
type loopFinder struct {
	found  bool
	offset int // offset of the first match
}

// Visit implements ast.Visitor.
func (f *loopFinder) Visit(node *ast.Node) {
	if f.found {
		return
	}
	switch n := (*node).(type) {
	case *ast.PredicateNode:
		f.found = true
	case *ast.BinaryNode:
		f.found = n.Operator == ".."
	}
	f.offset = (*node).Location().From
}

// evaluate evaluates a condition over env.
func evaluate(text string, env any) (bool, error) {
	program, err := compile(text, env)
	if err != nil {
		return false, err
	}
	machine := vm.VM{MemoryBudget: maxMemory}
	value, err := machine.Run(program, env)
	if err != nil {
		return false, withPosition(err)
	}
	result, ok := value.(bool)
	if !ok {
		return false, fmt.Errorf("condition returned %T, want bool", value)
	}
	return result, nil
}

// ConditionHolds reports whether the condition of a run's automation holds for the event and the counters. An empty
// condition holds.
func ConditionHolds(ctx context.Context, db postgres.DB, a Automation, runID string) (bool, error) {
	if a.Condition == "" {
		return true, nil
	}
	raw, err := Payload(ctx, db, runID)
	if err != nil {
		return false, err
	}
	var env ConditionEnv
	if err := json.Unmarshal(raw, &env); err != nil {
		return false, fmt.Errorf("decode payload of run %s: %w", runID, err)
	}
	if env.Counters, err = Count(ctx, db); err != nil {
		return false, err
	}
	result, err := evaluate(a.Condition, env)
	if err != nil {
		return false, &ConditionError{a.Name, err}
	}
	return result, nil
}

// ConditionError reports a condition that fails at run time, such as a comparison with a missing field. The caller must
// not retry it as a database error.
type ConditionError struct {
	Automation string
	Err        error
}

// Error names the automation and the failure.
func (e *ConditionError) Error() string {
	return fmt.Sprintf("evaluate condition of automation %q: %s", e.Automation, e.Err)
}

// Unwrap returns the cause.
func (e *ConditionError) Unwrap() error { return e.Err }
