package evals

import (
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/schema"
)

// PurposeJudge is the purpose of a judge's model calls. Reports of spend show it separately.
const PurposeJudge = "eval_judge"

// Call is a call that the model requested.
type Call struct {
	Skill    string          `json:"skill"`
	Args     json.RawMessage `json:"args"`
	Refused  bool            `json:"refused,omitempty"`  // not made, because it was unknown, invalid or repeated
	Approval string          `json:"approval,omitempty"` // approved or denied; empty for none
}

// made reports whether a call was made.
func (c Call) made() bool { return !c.Refused && c.Approval != "denied" }

// Observed is the behaviour of a trial.
type Observed struct {
	Answer     string
	Calls      []Call
	Written    []string // memory, as category/key
	Iterations int
	CostUSD    float64
	Latency    time.Duration
}

// Judge returns the reasons why a trial fails the expectations of its case, or nil if it meets them. It ignores the
// expectations that a model judges.
func Judge(c Case, o Observed) []string {
	var reasons []string
	for i, e := range c.Expect {
		for _, why := range e.check(o) {
			reasons = append(reasons, fmt.Sprintf("expect[%d]: %s", i, why))
		}
	}
	return reasons
}

func (e Expectation) check(o Observed) []string {
	switch {
	case e.Answer != nil:
		return e.Answer.check(o)
	case e.Called != nil:
		return e.Called.check(o)
	case e.NotCalled != nil:
		return notCalled(e.NotCalled, o)
	case e.InOrder != nil:
		return inOrder(e.InOrder, o)
	case e.Exact != nil:
		if got := skillsOf(o.Calls, Call.made); !slices.Equal(got, e.Exact) {
			return reasonf("the calls were %s, not %s", joinNames(got), joinNames(e.Exact))
		}
	case e.ApprovalAsked != "":
		if !slices.ContainsFunc(o.Calls, func(c Call) bool { return c.Skill == e.ApprovalAsked && c.Approval != "" }) {
			return reasonf("no approval of %s was requested", e.ApprovalAsked)
		}
	case e.Delegated != "":
		to := Called{Skill: "delegate", Args: map[string]any{"agent": e.Delegated}}
		if to.count(o) == 0 {
			return reasonf("nothing was delegated to %s", e.Delegated)
		}
	case e.MemoryWritten != "":
		if !slices.Contains(o.Written, e.MemoryWritten) {
			return reasonf("the memory %s was not written", e.MemoryWritten)
		}
	case e.Within != nil:
		return e.Within.check(o)
	}
	return nil
}

func reasonf(format string, args ...any) []string { return []string{fmt.Sprintf(format, args...)} }

func joinNames(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// skillsOf lists the skills of the calls for which keep returns true.
func skillsOf(calls []Call, keep func(Call) bool) []string {
	names := []string{}
	for _, c := range calls {
		if keep(c) {
			names = append(names, c.Skill)
		}
	}
	return names
}

func (a Answer) check(o Observed) (reasons []string) {
	add := func(format string, args ...any) { reasons = append(reasons, fmt.Sprintf("answer "+format, args...)) }
	lower := strings.ToLower(o.Answer)
	if a.Contains != "" && !strings.Contains(lower, strings.ToLower(a.Contains)) {
		add("lacks %q", a.Contains)
	}
	if a.Lacks != "" && strings.Contains(lower, strings.ToLower(a.Lacks)) {
		add("contains %q", a.Lacks)
	}
	if a.Regex != "" {
		if match, err := regexp.MatchString(a.Regex, o.Answer); err != nil || !match {
			add("does not match %s", a.Regex)
		}
	}
	if words := len(strings.Fields(o.Answer)); a.MaxWords > 0 && words > a.MaxWords {
		add("has %d words, more than %d", words, a.MaxWords)
	}
	var decoded any
	isJSON := json.Unmarshal([]byte(o.Answer), &decoded) == nil
	if a.Schema != nil {
		if why := violation(a.Schema, decoded, isJSON); why != "" {
			add("does not match the schema: %s", why)
		}
	}
	if a.Expr != "" {
		vars := map[string]any{"answer": o.Answer, "json": decoded, "calls": exprCalls(o.Calls)}
		holds, err := flows.Condition(a.Expr, vars)
		switch {
		case err != nil:
			add("cannot be checked: %s", err)
		case !holds:
			add("does not fulfil %s", a.Expr)
		}
	}
	return reasons
}

// violation returns why a JSON answer violates a schema.
func violation(answerSchema map[string]any, decoded any, isJSON bool) string {
	if !isJSON {
		return "it is not JSON"
	}
	compiled, err := compile(answerSchema)
	if err == nil {
		err = compiled.Validate(decoded)
	}
	if err != nil {
		return schema.OneLine(err)
	}
	return ""
}

// exprCalls returns the calls in the form that an expression reads.
func exprCalls(calls []Call) []any {
	list := make([]any, len(calls))
	for i, c := range calls {
		var args any
		if json.Unmarshal(c.Args, &args) != nil {
			args = string(c.Args)
		}
		list[i] = map[string]any{"skill": c.Skill, "args": args, "refused": c.Refused, "approval": c.Approval}
	}
	return list
}

func (c Called) check(o Observed) []string {
	n := c.count(o)
	what := c.Skill
	if len(c.Args) > 0 {
		args, err := json.Marshal(c.Args)
		if err != nil {
			return reasonf("called: %s", err)
		}
		what += " with " + string(args)
	}
	switch {
	case c.Times > 0 && n != c.Times:
		return reasonf("%s was called %d times, not %d", what, n, c.Times)
	case n == 0:
		return reasonf("%s was not called", what)
	}
	return nil
}

// count counts the matching calls that were made.
func (c Called) count(o Observed) (n int) {
	for _, call := range o.Calls {
		if call.made() && call.Skill == c.Skill && Contains(call.Args, c.Args) {
			n++
		}
	}
	return n
}

// notCalled also rejects a call that was requested and not made: the model must not even request it.
func notCalled(skills []string, o Observed) (reasons []string) {
	for _, skill := range skills {
		if slices.ContainsFunc(o.Calls, func(c Call) bool { return c.Skill == skill }) {
			reasons = append(reasons, fmt.Sprintf("%s was called", skill))
		}
	}
	return reasons
}

func inOrder(skills []string, o Observed) []string {
	got := skillsOf(o.Calls, Call.made)
	rest := got
	for _, skill := range skills {
		i := slices.Index(rest, skill)
		if i < 0 {
			return reasonf("%s was not called in the order %s; the calls were %s", skill, joinNames(skills), joinNames(got))
		}
		rest = rest[i+1:]
	}
	return nil
}

func (w Within) check(o Observed) (reasons []string) {
	if w.Iterations > 0 && o.Iterations > w.Iterations {
		reasons = append(reasons, fmt.Sprintf("it took %d model calls, more than %d", o.Iterations, w.Iterations))
	}
	if w.CostUSD > 0 && o.CostUSD > w.CostUSD {
		reasons = append(reasons, fmt.Sprintf("it cost $%.4f, more than $%.4f", o.CostUSD, w.CostUSD))
	}
	if limit, err := time.ParseDuration(w.Latency); err == nil && o.Latency > limit {
		reasons = append(reasons, fmt.Sprintf("it took %s, more than %s", o.Latency.Round(time.Millisecond), limit))
	}
	return reasons
}

// Contains reports whether a call's arguments contain the wanted ones, at any depth of objects. Numbers are compared by
// value.
func Contains(args json.RawMessage, wanted map[string]any) bool {
	if len(wanted) == 0 {
		return true
	}
	got, err := decodeExact(args)
	if err != nil {
		return false
	}
	text, err := json.Marshal(wanted)
	if err != nil {
		return false
	}
	decoded, err := decodeExact(text)
	return err == nil && contains(got, decoded)
}

// decodeExact decodes JSON like [json.Unmarshal]. A whole number that a float64 would round stays a [json.Number].
func decodeExact(text []byte) (any, error) {
	tree, err := exactjson.Decode(text)
	return exactjson.MapNumbers(tree, floatOrNumber), err
}

// floatOrNumber returns a number as a float64, unless that rounds a whole number.
func floatOrNumber(n json.Number) any {
	f, err := n.Float64()
	text := n.String()
	if err == nil && (strings.ContainsAny(text, ".eE") || strconv.FormatFloat(f, 'f', -1, 64) == text) {
		return f
	}
	return n
}

func contains(got, wanted any) bool {
	wantedObject, ok := wanted.(map[string]any)
	if !ok {
		return reflect.DeepEqual(got, wanted)
	}
	gotObject, ok := got.(map[string]any)
	if !ok {
		return false
	}
	for key, value := range wantedObject {
		if inner, exists := gotObject[key]; !exists || !contains(inner, value) {
			return false
		}
	}
	return true
}
