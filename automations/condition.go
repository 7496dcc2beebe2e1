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
// exponential values ([exprcost.Check]) are rejected, so a node's cost is at most linear in the payload.
const (
	maxCondition = 1000    // bytes
	maxNodes     = 200     // AST nodes
	maxMemory    = 100_000 // VM memory budget
)

// ConditionEnv has the variables of an event's condition. A run stores its JSON as payload, where Payload is data.
type ConditionEnv struct {
	Event    string `expr:"event" json:"event"`
	Key      string `expr:"key" json:"key"`
	Payload  any    `expr:"payload" json:"data"`
	Counters `json:"-"`
}

// compile compiles a boolean condition over env, which is ConditionEnv{} or Counters{}. The error has the line and the
// column.
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
	if err == nil {
		err = exprcost.Check(loops.root)
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

// loopFinder finds predicates, whose cost grows with a list, and ranges, whose cost grows with their ends.
type loopFinder struct {
	found  bool
	offset int      // offset of the first match
	root   ast.Node // the node of the last visit
}

// Visit implements ast.Visitor.
func (f *loopFinder) Visit(node *ast.Node) {
	f.root = *node
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

// evaluate compiles and runs a condition over env. It keeps no compiled programs.
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

// ConditionHolds reports whether a's condition is true for the event of the run and the current counters. An empty
// condition is true.
func ConditionHolds(ctx context.Context, db postgres.DB, a Automation, runID string) (bool, error) {
	if a.Condition == "" {
		return true, nil
	}
	raw, err := Payload(ctx, db, runID)
	if err != nil {
		return false, err
	}
	var env ConditionEnv
	if err := json.Unmarshal(raw, &env); err != nil { // such as a number beyond float64
		return false, &ConditionError{a.Name, fmt.Errorf("decode payload: %w", err)}
	}
	if env.Counters, err = ReadCounters(ctx, db); err != nil {
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
