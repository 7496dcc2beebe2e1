package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
)

// environment is the isolated environment of one trial. Its state depends only on the recorded results, so a resumed
// trial rebuilds it.
type environment struct {
	recorded  *evals.Recorded // replaces stubs and memory; nil for a case of a workspace file
	stubs     map[string][]evals.Stub
	approvals map[string]string
	now       time.Time
	memory    map[string]memory.Entry // by category/key
	answered  map[string]int          // answered calls, by skill and matching stubs or recorded arguments

	calls    []evals.Call
	written  []string
	diverged []string
}

func newEnvironment(c evals.Case, recorded *evals.Recorded, start time.Time) *environment {
	b := &environment{
		recorded: recorded, stubs: c.Skills, approvals: c.Approvals, now: start, memory: map[string]memory.Entry{},
		answered: map[string]int{},
	}
	if caseTime, err := time.Parse(time.RFC3339, c.Now); err == nil {
		b.now = caseTime
	}
	for name, value := range c.Memory {
		category, key, _ := strings.Cut(name, "/")
		b.setMemory(category, key, value)
	}
	return b
}

// setMemory stores a memory entry.
func (b *environment) setMemory(category, key string, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		return // impossible: the value was decoded from YAML or JSON
	}
	name := category + "/" + key
	b.memory[name] = memory.Entry{
		Category: category, Key: key, Value: text, Revision: b.memory[name].Revision + 1, UpdatedAt: b.now, CreatedAt: b.now,
	}
}

func (b *environment) sandbox() *reason.Sandbox {
	s := &reason.Sandbox{
		Now: b.now, Pinned: b.pinned, Invoke: b.invoke, Approve: b.approve, OnResult: b.onResult,
		OnCall: func(r reason.Requested) {
			b.calls = append(b.calls, evals.Call{Skill: r.Name, Args: r.Args, Refused: r.Refused, Approval: r.Approval})
		},
	}
	if b.recorded != nil { // after an unknown result, further calls cannot be compared
		s.Stop = func() bool { return len(b.diverged) > 0 }
	}
	return s
}

func (b *environment) pinned(names []memory.Name) (entries []memory.Entry) {
	for _, n := range names {
		if e, ok := b.memory[n.Category+"/"+n.Key]; ok {
			entries = append(entries, e)
		}
	}
	return entries
}

func (b *environment) approve(skill string, args json.RawMessage) (bool, string) {
	if b.recorded != nil {
		call, ok := b.recorded.Match(skill, args, b.answered[skill+" "+string(args)])
		if !ok {
			b.diverge(skill, args)
		}
		return ok && !call.Denied, "denied, as recorded"
	}
	if b.approvals[skill] == evals.Approve {
		return true, ""
	}
	return false, "rejected by the case of the eval"
}

// The builtins that are answered from the memory of the case, unless the case has stubs for them.
const (
	recall       = "recall"
	memorySearch = "memory_search"
	memoryWrite  = "memory_write"
	memoryForget = "memory_forget"
)

// classNoStub is the class of a call without a stub.
const classNoStub = "no_stub"

// invoke answers a call. It must not change the environment, because a resumed trial does not repeat the call.
func (b *environment) invoke(_ context.Context, skill string, args json.RawMessage) (any, error) {
	if b.recorded != nil {
		return b.replay(skill, args)
	}
	if _, has := b.stubs[skill]; !has && b.isMemorySkill(skill) {
		return b.answerMemoryCall(skill, args), nil
	}
	stub, key := b.match(skill, args)
	switch {
	case key == "":
		return nil, &executions.StepError{
			Class: classNoStub, Message: "the case of the eval has no stub for this call of " + skill,
		}
	case stub.Error != "":
		return nil, &executions.StepError{Class: cmp.Or(stub.Class, "error"), Message: stub.Error}
	}
	return stub.Returns, nil
}

// replay answers a call with its recorded result.
func (b *environment) replay(skill string, args json.RawMessage) (any, error) {
	call, ok := b.recorded.Match(skill, args, b.answered[skill+" "+string(args)])
	if !ok {
		return nil, &executions.StepError{Class: classNoStub, Message: "this call of " + skill + " is not recorded"}
	}
	if class, message := call.Failure(); class != "" {
		return nil, &executions.StepError{Class: class, Message: message}
	}
	return call.Result, nil
}

// diverge records a call whose result is unknown.
func (b *environment) diverge(skill string, args json.RawMessage) {
	what := "stub"
	if b.recorded != nil {
		what = "recorded call"
	}
	b.diverged = append(b.diverged, fmt.Sprintf("%s has no %s for %s", skill, what, redact.Text(string(args), 300)))
}

// match returns the stub for the next call with these arguments, and the key in answered; an empty key for no stub.
func (b *environment) match(skill string, args json.RawMessage) (stub evals.Stub, key string) {
	var matching []int
	for i, s := range b.stubs[skill] {
		if evals.Contains(args, s.When) {
			matching = append(matching, i)
		}
	}
	if len(matching) == 0 {
		return evals.Stub{}, ""
	}
	key = fmt.Sprint(skill, matching)
	return b.stubs[skill][matching[min(b.answered[key], len(matching)-1)]], key
}

// onResult updates the environment after a call.
func (b *environment) onResult(skill string, args, result json.RawMessage) {
	if b.recorded != nil {
		key := skill + " " + string(args)
		if _, ok := b.recorded.Match(skill, args, b.answered[key]); !ok {
			b.diverge(skill, args)
		}
		b.answered[key]++
		return
	}
	if _, has := b.stubs[skill]; !has && b.isMemorySkill(skill) {
		b.applyMemoryCall(skill, args, result)
		return
	}
	if _, key := b.match(skill, args); key != "" {
		b.answered[key]++
	} else {
		b.diverge(skill, args)
	}
}

func (b *environment) isMemorySkill(skill string) bool {
	return slices.Contains([]string{recall, memorySearch, memoryWrite, memoryForget}, skill)
}

// memoryArgs are the arguments of the memory's builtins.
type memoryArgs struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Query    string          `json:"query"`
	Revision *int            `json:"revision"` // set by the runtime for a write of the builtins
}

func readMemoryArgs(skill string, raw json.RawMessage) (args memoryArgs) {
	if json.Unmarshal(raw, &args) != nil {
		return memoryArgs{} // impossible: the arguments match the schema
	}
	if skill == memoryWrite || skill == memoryForget {
		args.Category = cmp.Or(args.Category, "general")
	}
	return args
}

// answerMemoryCall answers a call like the builtins of the memory.
func (b *environment) answerMemoryCall(skill string, raw json.RawMessage) any {
	args := readMemoryArgs(skill, raw)
	entry, exists := b.memory[args.Category+"/"+args.Key]
	if args.Revision != nil && *args.Revision != entry.Revision && (exists || skill == memoryWrite) {
		conflict := &memory.ConflictError{Category: args.Category, Key: args.Key, Yours: args.Value}
		if exists {
			conflict.Theirs = &entry
		}
		return builtins.ConflictAnswer(conflict)
	}
	switch skill {
	case memoryWrite:
		return map[string]any{
			"category": args.Category, "key": args.Key, "revision": entry.Revision + 1, "expires_at": nil,
		}
	case memoryForget:
		return map[string]any{"category": args.Category, "key": args.Key, "forgotten": exists}
	}
	return map[string]any{"memories": b.searchMemory(args)}
}

// searchMemory returns the entries that contain a word of the query, or all entries for an empty query.
func (b *environment) searchMemory(args memoryArgs) []memory.Entry {
	entries := []memory.Entry{}
	for name, e := range b.memory {
		text := strings.ToLower(name + " " + string(e.Value))
		matches := args.Query == "" || slices.ContainsFunc(strings.Fields(strings.ToLower(args.Query)),
			func(word string) bool { return strings.Contains(text, word) })
		if matches && (args.Category == "" || args.Category == e.Category) {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(x, y memory.Entry) int {
		return cmp.Or(strings.Compare(x.Category, y.Category), strings.Compare(x.Key, y.Key))
	})
	return entries
}

// applyMemoryCall applies a call to the memory of the environment, unless it was rejected.
func (b *environment) applyMemoryCall(skill string, raw, result json.RawMessage) {
	var answer struct{ Error string }
	if json.Unmarshal(result, &answer) == nil && answer.Error == builtins.ClassConflict {
		return
	}
	args := readMemoryArgs(skill, raw)
	switch skill {
	case memoryWrite:
		b.setMemory(args.Category, args.Key, args.Value)
		b.written = append(b.written, args.Category+"/"+args.Key)
	case memoryForget:
		delete(b.memory, args.Category+"/"+args.Key)
	}
}

// evaluate decides the trial. The latency of a resumed trial contains the time in which no process played it, so it
// fails no trial.
func (b *environment) evaluate(
	c evals.Case, o reason.Outcome, failure error, latency time.Duration, resumed bool,
) evals.Trial {
	t := evals.Trial{
		Answer: o.Text, Iterations: o.Iterations, Tokens: int64(o.Usage.TotalTokens), CostUSD: o.CostUSD,
		DurationMS: latency.Milliseconds(), Verdict: evals.Pass, Reasons: []string{}, Calls: redact.JSON(b.calls, maxCalls),
	}
	if b.calls == nil {
		t.Calls = json.RawMessage(`[]`)
	}
	switch {
	case failure != nil:
		t.Verdict, t.Reasons = evals.Error, []string{failure.Error()}
	case o.Ended == reason.EndedEval:
		t.Verdict, t.Reasons = evals.UndecidedTrial, []string{budgetUsedUp}
	case len(b.diverged) > 0:
		t.Verdict, t.Reasons = evals.Diverged, b.diverged
	default:
		if b.recorded != nil {
			t.Reasons = b.recorded.Follows(b.calls)
		} else {
			observed := evals.Observed{
				Answer: o.Text, Calls: b.calls, Written: b.written, Iterations: o.Iterations, CostUSD: o.CostUSD, Latency: latency,
			}
			t.Reasons = evals.Judge(c, observed)
			observed.Latency = 0
			if resumed && o.Ended == reason.Answered && len(t.Reasons) > 0 && len(evals.Judge(c, observed)) == 0 {
				t.Verdict, t.Reasons = evals.UndecidedTrial, []string{"it was interrupted, so its latency is unknown"}
				return t
			}
		}
		if o.Ended != reason.Answered {
			t.Reasons = append(t.Reasons, "the turn ended without an answer: "+o.Ended)
		}
		if len(t.Reasons) > 0 {
			t.Verdict = evals.Fail
		}
	}
	return t
}
