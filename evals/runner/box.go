package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
)

// box is the isolated environment of one trial. Its state follows from the recorded results, so a resumed trial
// rebuilds it.
type box struct {
	recorded  *evals.Recorded // replaces stubs and memory; nil for a written case
	stubs     map[string][]evals.Stub
	approvals map[string]string
	now       time.Time
	memory    map[string]memory.Entry // by category/key
	used      map[string]int          // calls of each skill and arguments that stubs have answered

	calls    []evals.Call
	written  []string
	diverged []string
}

func newBox(c evals.Case, recorded *evals.Recorded, began time.Time) *box {
	b := &box{
		recorded: recorded, stubs: c.Skills, approvals: c.Approvals, now: began, memory: map[string]memory.Entry{},
		used: map[string]int{},
	}
	if at, err := time.Parse(time.RFC3339, c.Now); err == nil {
		b.now = at
	}
	for name, value := range c.Memory {
		category, key, _ := strings.Cut(name, "/")
		b.put(category, key, value)
	}
	return b
}

// put stores a memory entry.
func (b *box) put(category, key string, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		return // it was decoded from YAML or JSON
	}
	name := category + "/" + key
	b.memory[name] = memory.Entry{
		Category: category, Key: key, Value: text, Revision: b.memory[name].Revision + 1, UpdatedAt: b.now, CreatedAt: b.now,
	}
}

func (b *box) sandbox() *reason.Sandbox {
	s := &reason.Sandbox{
		Now: b.now, Pinned: b.pinned, Invoke: b.invoke, Approve: b.approve, OnResult: b.onResult,
		OnCall: func(r reason.Requested) {
			b.calls = append(b.calls, evals.Call{Skill: r.Name, Args: r.Args, Refused: r.Refused, Approval: r.Approval})
		},
	}
	if b.recorded != nil { // calls after an unknown result cannot be compared
		s.Stop = func() bool { return len(b.diverged) > 0 }
	}
	return s
}

func (b *box) pinned(names []memory.Name) (entries []memory.Entry) {
	for _, n := range names {
		if e, ok := b.memory[n.Category+"/"+n.Key]; ok {
			entries = append(entries, e)
		}
	}
	return entries
}

func (b *box) approve(skill string, args json.RawMessage) (bool, string) {
	if b.recorded != nil {
		call, ok := b.recorded.Match(skill, args, b.used[skill+" "+string(args)])
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

// The builtins that the memory of the case answers, unless it has stubs for them.
const (
	recall       = "recall"
	memorySearch = "memory_search"
	memoryWrite  = "memory_write"
	memoryForget = "memory_forget"
)

// classNoStub is the class of a call without a stub.
const classNoStub = "no_stub"

// invoke answers a call. It changes nothing, because a resumed trial does not repeat it.
func (b *box) invoke(_ context.Context, skill string, args json.RawMessage) (any, error) {
	if b.recorded != nil {
		return b.replay(skill, args)
	}
	if _, has := b.stubs[skill]; !has && b.remembers(skill) {
		return b.remember(skill, args), nil
	}
	stub, ok := b.match(skill, args)
	switch {
	case !ok:
		return nil, &executions.StepError{
			Class: classNoStub, Message: "the case of the eval has no stub for this call of " + skill,
		}
	case stub.Error != "":
		return nil, &executions.StepError{Class: cmp.Or(stub.Class, "error"), Message: stub.Error}
	}
	return stub.Returns, nil
}

// replay answers a call with its recorded result.
func (b *box) replay(skill string, args json.RawMessage) (any, error) {
	call, ok := b.recorded.Match(skill, args, b.used[skill+" "+string(args)])
	if !ok {
		return nil, &executions.StepError{Class: classNoStub, Message: "this call of " + skill + " is not recorded"}
	}
	if class, message := call.Failure(); class != "" {
		return nil, &executions.StepError{Class: class, Message: message}
	}
	return call.Result, nil
}

// diverge records a call whose result is unknown.
func (b *box) diverge(skill string, args json.RawMessage) {
	what := "stub"
	if b.recorded != nil {
		what = "recorded call"
	}
	b.diverged = append(b.diverged, fmt.Sprintf("%s has no %s for %s", skill, what, redact.Text(string(args), 300)))
}

// match returns the stub of the next call with these arguments.
func (b *box) match(skill string, args json.RawMessage) (evals.Stub, bool) {
	var fit []evals.Stub
	for _, s := range b.stubs[skill] {
		if evals.Contains(args, s.When) {
			fit = append(fit, s)
		}
	}
	if len(fit) == 0 {
		return evals.Stub{}, false
	}
	return fit[min(b.used[skill+" "+string(args)], len(fit)-1)], true
}

// onResult follows a call that was made.
func (b *box) onResult(skill string, args, _ json.RawMessage) {
	if b.recorded != nil {
		key := skill + " " + string(args)
		if _, ok := b.recorded.Match(skill, args, b.used[key]); !ok {
			b.diverge(skill, args)
		}
		b.used[key]++
		return
	}
	if _, has := b.stubs[skill]; !has && b.remembers(skill) {
		b.afterMemory(skill, args)
		return
	}
	if _, ok := b.match(skill, args); !ok {
		b.diverge(skill, args)
	}
	b.used[skill+" "+string(args)]++
}

func (b *box) remembers(skill string) bool {
	return slices.Contains([]string{recall, memorySearch, memoryWrite, memoryForget}, skill)
}

// memoryArgs are the arguments of the memory's builtins.
type memoryArgs struct {
	Category string `json:"category"`
	Key      string `json:"key"`
	Value    any    `json:"value"`
	Query    string `json:"query"`
}

func readMemoryArgs(skill string, raw json.RawMessage) (args memoryArgs) {
	if json.Unmarshal(raw, &args) != nil {
		return memoryArgs{} // the schema was checked
	}
	if skill == memoryWrite || skill == memoryForget {
		args.Category = cmp.Or(args.Category, "general")
	}
	return args
}

// remember answers as the builtins of the memory do.
func (b *box) remember(skill string, raw json.RawMessage) any {
	args := readMemoryArgs(skill, raw)
	there := b.memory[args.Category+"/"+args.Key]
	switch skill {
	case memoryWrite:
		return map[string]any{
			"category": args.Category, "key": args.Key, "revision": there.Revision + 1, "expires_at": nil,
		}
	case memoryForget:
		return map[string]any{"category": args.Category, "key": args.Key, "forgotten": there.Revision > 0}
	}
	return map[string]any{"memories": b.found(args)}
}

// found returns the entries with a word of the query; all without one.
func (b *box) found(args memoryArgs) []memory.Entry {
	entries := []memory.Entry{}
	for name, e := range b.memory {
		text := strings.ToLower(name + " " + string(e.Value))
		hit := args.Query == "" || slices.ContainsFunc(strings.Fields(strings.ToLower(args.Query)),
			func(word string) bool { return strings.Contains(text, word) })
		if hit && (args.Category == "" || args.Category == e.Category) {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(x, y memory.Entry) int {
		return cmp.Or(strings.Compare(x.Category, y.Category), strings.Compare(x.Key, y.Key))
	})
	return entries
}

// afterMemory changes the overlay as a made call did.
func (b *box) afterMemory(skill string, raw json.RawMessage) {
	args := readMemoryArgs(skill, raw)
	switch skill {
	case memoryWrite:
		b.put(args.Category, args.Key, args.Value)
		b.written = append(b.written, args.Category+"/"+args.Key)
	case memoryForget:
		delete(b.memory, args.Category+"/"+args.Key)
	}
}

// judge decides the trial.
func (b *box) judge(c evals.Case, o reason.Outcome, failure error, latency time.Duration) evals.Trial {
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
			t.Reasons = evals.Judge(c, evals.Observed{
				Answer: o.Text, Calls: b.calls, Written: b.written, Iterations: o.Iterations, CostUSD: o.CostUSD, Latency: latency,
			})
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
