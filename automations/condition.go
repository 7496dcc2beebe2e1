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

	"github.com/lanekeeper/lanekeeper/internal/exprcost"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Bounds of a condition, such as payload.amount > 100 && failures_24h < 5. Loops (all, any, map, …), ranges and
// exponential values ([exprcost.Check]) are rejected, and so is a pattern of matches that is no constant. So a node's
// cost is at most linear in the payload.
const (
	maxCondition = 1000    // bytes
	maxNodes     = 200     // AST nodes
	maxMemory    = 100_000 // VM memory budget
)

// ConditionEnv has the variables of an event's condition.
type ConditionEnv struct {
	EventEnv
	Counters
}

// EventEnv is the column payload of a run: the event, its key and its data.
type EventEnv struct {
	Event   string `expr:"event" json:"event"`
	Key     string `expr:"key" json:"key"`
	Payload any    `expr:"payload" json:"data"`
}

// compile compiles a boolean condition over env: a ConditionEnv, EventEnv or Counters. The error of a misspelt
// condition has the line and the column.
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
	limits := &costVisitor{}
	program, err := expr.Compile(text, append(options, expr.Patch(limits))...)
	if err == nil && limits.problem != "" {
		runes := []rune(text)
		before := string(runes[:min(limits.offset, len(runes))])
		return nil, positionError(limits.problem, 1+strings.Count(before, "\n"),
			utf8.RuneCountInString(before[strings.LastIndex(before, "\n")+1:]))
	}
	if err == nil {
		err = exprcost.Check(limits.root)
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

// costVisitor finds predicates, whose cost grows with a list, ranges, whose cost grows with their ends, and patterns
// that are compiled at each evaluation.
type costVisitor struct {
	problem string   // of the first match; "" without one
	offset  int      // of the first match
	root    ast.Node // the last visited node, since children come first
}

// Visit implements ast.Visitor.
func (v *costVisitor) Visit(node *ast.Node) {
	v.root = *node
	if v.problem != "" {
		return
	}
	const noLoops = "loops and ranges are not supported"
	switch n := (*node).(type) {
	case *ast.PredicateNode:
		v.problem = noLoops
	case *ast.BinaryNode:
		_, isConstant := n.Right.(*ast.StringNode)
		switch {
		case n.Operator == "..":
			v.problem = noLoops
		case n.Operator == "matches" && !isConstant:
			v.problem = "the pattern of matches must be a text in quotes"
		}
	}
	v.offset = (*node).Location().From
}

// evaluate compiles and runs a condition over env.
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

// ConditionHolds reports whether a's condition is true for the event of the run and the counters. An empty condition is
// true. counters, a call of [ReadCounters], reads a day of the activity log. ConditionHolds calls it for a
// condition that the event alone does not decide.
func ConditionHolds(
	ctx context.Context, db postgres.DB, a Automation, runID string, counters func() (Counters, error),
) (bool, error) {
	if a.Condition == "" {
		return true, nil
	}
	raw, err := Payload(ctx, db, runID)
	if err != nil {
		return false, err
	}
	var env ConditionEnv
	if err := json.Unmarshal(raw, &env.EventEnv); err != nil { // such as a number beyond float64
		return false, &ConditionError{a.Name, fmt.Errorf("decode payload: %w", err)}
	}
	result, err := evaluate(a.Condition, env.EventEnv)
	if err != nil { // such as the unknown name of a counter
		if env.Counters, err = counters(); err != nil {
			return false, err
		}
		result, err = evaluate(a.Condition, env)
	}
	if err != nil {
		return false, &ConditionError{a.Name, err}
	}
	return result, nil
}

// ConditionError reports a condition that fails at run time, such as payload.missing > 1. The caller must not retry it
// as a database error.
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
