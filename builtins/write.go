package builtins

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// classInvalid marks invalid arguments, which are no failure of the skill.
const classInvalid = "invalid_params"

// invalidIf converts err to a classInvalid error if it is one of mistakes.
func invalidIf(err error, mistakes ...error) error {
	for _, m := range mistakes {
		if errors.Is(err, m) {
			return &skills.CallError{Class: classInvalid, Message: err.Error()}
		}
	}
	return err
}

func invalid(text string) error { return &skills.CallError{Class: classInvalid, Message: text} }

const defaultCategory = "general"

type memoryWriteArgs struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days"`
	Revision float64         `json:"revision"` // 2.0 is an integer in JSON Schema
}

// memoryWrite stores a value. A repeated call after a crash finds the first call's value and succeeds.
func memoryWrite(ctx context.Context, db postgres.Beginner, who memoryUser, args memoryWriteArgs) (any, error) {
	note := memory.Note{
		Owner:    who.owner,
		Category: args.Category, Key: args.Key, Value: args.Value, TraceID: who.traceID,
		TTL: time.Duration(args.Days * float64(24*time.Hour)), Revision: noteRevision(args.Revision),
	}
	saved, err := memory.Save(ctx, db, note)
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		if !wroteBefore(note, conflict) {
			return conflictAnswer(conflict), nil
		}
		saved, err = *conflict.Theirs, nil
	}
	if err != nil {
		return nil, invalidIf(err, memory.ErrSecret, memory.ErrFull, memory.ErrInvalid)
	}
	return map[string]any{
		"category": saved.Category, "key": saved.Key, "revision": saved.Revision,
		"expires_at": saved.ExpiresAt,
	}, nil
}

// wroteBefore reports whether this very call stored the current value.
func wroteBefore(note memory.Note, conflict *memory.ConflictError) bool {
	there := conflict.Theirs
	return there != nil && there.TraceID == note.TraceID && sameJSON(there.Value, conflict.Yours) &&
		(there.Revision == note.Revision+1 || note.Revision == memory.Absent)
}

// sameJSON compares values, because jsonb normalizes texts.
func sameJSON(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	left, err := json.Marshal(x)
	if err != nil {
		return false
	}
	right, err := json.Marshal(y)
	return err == nil && string(left) == string(right)
}

type memoryForgetArgs struct {
	Category string  `json:"category"`
	Key      string  `json:"key"`
	Revision float64 `json:"revision"`
}

func memoryForget(ctx context.Context, db postgres.Beginner, who memoryUser, args memoryForgetArgs) (any, error) {
	args.Category = cmp.Or(args.Category, defaultCategory)
	forgotten, err := who.owner.Forget(ctx, db, args.Category, args.Key, noteRevision(args.Revision))
	if conflict, ok := errors.AsType[*memory.ConflictError](err); ok {
		return conflictAnswer(conflict), nil
	}
	return map[string]any{"category": args.Category, "key": args.Key, "forgotten": forgotten}, err
}

// anyRevision replaces any revision. Only people's writes use it, never a model's.
const anyRevision = -1

// ClassConflict marks a rejected write: the key has changed since the run read it.
const ClassConflict = "conflict"

// noteRevision converts a call's revision to that of a [memory.Note] or an objective's note. 0 or none means absent.
func noteRevision(value float64) int {
	switch revision := int(value); revision {
	case 0:
		return memory.Absent
	case anyRevision:
		return 0
	default:
		return revision
	}
}

// rejectedWrite is the answer of a rejected write, with both values.
type rejectedWrite struct {
	Error   string          `json:"error"` // ClassConflict
	Message string          `json:"message"`
	Yours   json.RawMessage `json:"yours,omitempty"`
	Theirs  any             `json:"theirs"` // *recalled or pursued; nil if it was forgotten or has expired
}

func conflictAnswer(c *memory.ConflictError) any {
	write := rejectedWrite{Error: ClassConflict, Yours: c.Yours, Message: "Nothing was changed: " +
		"somebody else wrote this key since you read it, or you have not read it. " +
		"Compare theirs with yours. Then, if it is still right, make the call again with what both say."}
	if e := c.Theirs; e != nil {
		write.Theirs = &memoryView{e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID}
	}
	return write
}

// currentValue is the current value in a conflict.
type currentValue struct {
	Revision    int             `json:"revision"`
	Value       json.RawMessage `json:"value"`
	Note        string          `json:"note"`
	TraceID     string          `json:"trace_id"`
	LastTraceID string          `json:"last_trace_id"`
}

// IsConflict reports whether a skill's answer is a rejected write, and why.
func IsConflict(s skills.Skill, answer json.RawMessage) (why string, is bool) {
	var c struct {
		Error  string          `json:"error"`
		Yours  json.RawMessage `json:"yours"`
		Theirs *currentValue   `json:"theirs"`
	}
	if !needsRevision(s) || json.Unmarshal(answer, &c) != nil || c.Error != ClassConflict {
		return "", false
	}
	there := "nothing is there any more"
	if t := c.Theirs; t != nil {
		there = fmt.Sprintf("revision %d of trace %s is there: %s", t.Revision, cmp.Or(t.TraceID, t.LastTraceID),
			textcut.Text(cmp.Or(string(t.Value), t.Note), maxError))
	}
	yours := cmp.Or(textcut.Text(string(c.Yours), maxError), "to forget it")
	return fmt.Sprintf("nothing was changed: it is not at the revision that was read; %s; wanted was %s", there, yours),
		true
}

// kindObjective is the kind of a [memory.Name] of an objective: its key is the objective's name or id.
const kindObjective = "objective"

func writesMemory(s skills.Skill) bool {
	return s.Handler == "builtin:memory_write" || s.Handler == "builtin:memory_forget"
}

// OnMemory reports whether a skill reads or writes the memory.
func OnMemory(s skills.Skill) bool { return readsMemory(s) }

func writesObjective(s skills.Skill) bool { return s.Handler == "builtin:objective_update" }

// needsRevision reports whether a skill's write depends on what its run has read.
func needsRevision(s skills.Skill) bool { return writesMemory(s) || writesObjective(s) }

// readsMemory reports whether a skill's answer may show memory entries.
func readsMemory(s skills.Skill) bool {
	return s.Handler == "builtin:recall" || s.Handler == "builtin:memory_search" || writesMemory(s)
}

// readsObjectives reports whether a skill's answer may show objectives with notes.
func readsObjectives(s skills.Skill) bool {
	return s.Handler == "builtin:objectives_list" || s.Handler == "builtin:objective_advance" || writesObjective(s)
}

// Sights are the memory entries and objectives in the first upto bytes of a skill's answer.
func Sights(s skills.Skill, answer []byte, upto int) []memory.Sight {
	switch {
	case readsMemory(s):
		return memory.SightsIn(answer, upto)
	case !readsObjectives(s):
		return nil
	}
	var found []memory.Sight
	for _, raw := range memory.ShownIn(answer, upto, "objectives") {
		var p objectiveView
		if json.Unmarshal(raw, &p) == nil && p.Name != "" && !p.NoteCut {
			found = append(found, SightsOf(objectives.Objective{ID: p.ID, Name: p.Name, Revision: p.Revision})...)
		}
	}
	return found
}

// SightsOf are the sights of an objective that was shown with its whole note.
func SightsOf(o objectives.Objective) []memory.Sight {
	return []memory.Sight{
		{Name: memory.Name{Kind: kindObjective, Key: o.Name}, Revision: o.Revision},
		{Name: memory.Name{Kind: kindObjective, Key: o.ID}, Revision: o.Revision},
	}
}

// SightsWritten returns the sights of a call's own write.
func SightsWritten(s skills.Skill, answer json.RawMessage) []memory.Sight {
	var done struct {
		memory.Sight
		Forgotten *bool  `json:"forgotten"`
		Objective string `json:"objective"`
		ID        string `json:"id"`
	}
	if _, conflict := IsConflict(s, answer); conflict || !needsRevision(s) || json.Unmarshal(answer, &done) != nil {
		return nil
	}
	switch {
	case writesObjective(s) && done.Revision > 0: // it wrote a note
		return SightsOf(objectives.Objective{ID: done.ID, Name: done.Objective, Revision: done.Revision})
	case writesObjective(s) || done.Key == "":
		return nil
	case done.Forgotten != nil:
		done.Revision = memory.Absent
	}
	return []memory.Sight{{Name: memory.Name{Category: done.Category, Key: done.Key}, Revision: done.Revision}}
}

// WithRevisions returns a call's arguments with the revision that its run has read, overriding the caller's. A nil seen
// leaves them unchanged.
func WithRevisions(s skills.Skill, args json.RawMessage, seen memory.Seen) json.RawMessage {
	if seen == nil || !needsRevision(s) {
		return args
	}
	var members map[string]json.RawMessage
	var name struct{ Category, Key, Objective string }
	if json.Unmarshal(args, &members) != nil || json.Unmarshal(args, &name) != nil {
		return args // the argument check rejects it
	}
	revision := seen.Revision(name.Category, name.Key)
	if writesObjective(s) {
		revision = seen[memory.Name{Kind: kindObjective, Key: name.Objective}]
	}
	members["revision"] = json.RawMessage(fmt.Sprint(max(0, revision)))
	guarded, err := json.Marshal(members)
	if err != nil {
		return args
	}
	return guarded
}

type objectiveProposeArgs struct {
	Name            string   `json:"name"`
	Goal            string   `json:"goal"`
	SuccessCriteria string   `json:"success_criteria"`
	Steps           []string `json:"steps"`
	Priority        float64  `json:"priority"` // 2.0 is an integer in JSON Schema
	ReviewEvery     string   `json:"review_every"`
}

func objectivePropose(ctx context.Context, db postgres.Beginner, who acting, args objectiveProposeArgs) (any, error) {
	d := objectives.Definition{
		Name: args.Name, Goal: args.Goal, SuccessCriteria: args.SuccessCriteria, Steps: args.Steps,
		Priority:    int(args.Priority),
		ReviewEvery: args.ReviewEvery,
	}
	if err := objectives.Validate(d); err != nil {
		return nil, invalid(err.Error())
	}
	o, err := objectives.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNameTaken, objectives.ErrTooMany)
	}
	return map[string]any{"objective": o.Name, "status": o.Status, "note": waitsForAdmin}, nil
}

const waitsForAdmin = "a proposal: nothing is done about it until an administrator accepts it"

type objectiveUpdateArgs struct {
	Objective string   `json:"objective"`
	Note      string   `json:"note"`
	AddSteps  []string `json:"add_steps"`
	Revision  float64  `json:"revision"`
}

// objectiveUpdate stores an objective's note and plans steps; objective_advance completes them. A note replaces the
// one that the caller has read. After a concurrent change nothing is written, and the answer has both notes. A
// repeated call after a crash finds its own note.
func objectiveUpdate(ctx context.Context, db postgres.Beginner, who acting, args objectiveUpdateArgs) (any, error) {
	if args.Note == "" && len(args.AddSteps) == 0 {
		return nil, invalid("say what to change: note or add_steps")
	}
	var value any
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		o, err := objectives.Get(ctx, tx, args.Objective)
		if err != nil {
			return err
		}
		done := map[string]any{"objective": o.Name, "id": o.ID}
		if args.Note != "" {
			there, err := objectives.SetNote(ctx, tx, o.ID, args.Note, who.TraceID, noteRevision(args.Revision))
			if errors.Is(err, objectives.ErrConflict) && there.Note != args.Note {
				value = noteConflict(args.Note, there)
				return nil
			}
			if err != nil && !errors.Is(err, objectives.ErrConflict) {
				return err
			}
			done["revision"], done["note"] = there.Revision, there.Note
		}
		done["steps_added"], err = addedSteps(ctx, tx, o.ID, args.AddSteps)
		value = done
		return err
	})
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNotFound, objectives.ErrNotActive)
	}
	return value, nil
}

// noteConflict is the answer of a note that would replace an unread one.
func noteConflict(note string, there objectives.Objective) any {
	yours, _ := json.Marshal(note) // a string always encodes
	return rejectedWrite{
		Error: ClassConflict, Yours: yours, Theirs: objectiveViewOf(there),
		Message: "Nothing was changed: somebody else changed this objective since you read it, or you have not read it. " +
			"Compare its note with yours. Then, if it is still right, make the call again with what both say.",
	}
}

func addedSteps(ctx context.Context, tx pgx.Tx, objectiveID string, titles []string) ([]string, error) {
	added := []string{}
	if len(titles) == 0 {
		return added, nil
	}
	steps, err := objectives.AddSteps(ctx, tx, objectiveID, titles)
	for _, s := range steps {
		added = append(added, s.Title)
	}
	return added, err
}

type objectiveAdvanceArgs struct {
	Objective string `json:"objective"`
	Step      string `json:"step"`
	Result    string `json:"result"`
}

// objectiveAdvance reports a step as done. It looks up the evidence among the calls of this run, and holds the
// objective's lane meanwhile.
func objectiveAdvance(ctx context.Context, db postgres.Beginner, who acting, args objectiveAdvanceArgs) (any, error) {
	o, step, err := findStep(ctx, db, args)
	if err != nil {
		return nil, err
	}
	if _, inside := executions.Current(ctx); inside {
		hold, err := executions.Lane(ctx, "objective:"+o.ID)
		if errors.Is(err, lanes.ErrBusy) {
			return nil, &skills.CallError{Class: skills.ClassBusy, Message: "somebody else works on this objective now; leave " +
				"it to them: " + err.Error()}
		}
		if err != nil {
			return nil, err
		}
		defer func() { _ = hold.Release(ctx) }() // a lost release is covered by the end of the execution
	}
	if step.Status == objectives.Done && step.TraceID == who.TraceID {
		return advanced(ctx, db, o, step) // reported before, by this run
	}
	calls, err := objectives.FindEvidence(ctx, db, step.ID, objectives.EvidenceFilter{
		TraceID:     who.TraceID,
		ExecutionID: who.ExecutionID,
	})
	if err != nil {
		return nil, err
	}
	ok, err := objectives.CompleteStep(ctx, db, step.ID, args.Result, who.TraceID, calls)
	if errors.Is(err, objectives.ErrNoEvidence) {
		return nil, invalid("nothing shows that this step is done: no successful call of yours since it began that " +
			"has not shown another step already. Calls that failed or await approval do not count. Act first, then " +
			"report")
	}
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, invalid(fmt.Sprintf("step %q is no longer pending", step.Title))
	}
	if _, err := objectives.Advanced(ctx, db, o.ID, who.TraceID); err != nil {
		return nil, err
	}
	return advanced(ctx, db, o, step)
}

func advanced(ctx context.Context, db postgres.DB, o objectives.Objective, step objectives.Step) (any, error) {
	o, err := objectives.Get(ctx, db, o.ID)
	return map[string]any{
		"objective": o.Name, "step": step.Title, "status": "done", "done": o.Done, "total": o.Total,
		"objective_status": o.Status,
		"objectives":       []objectiveView{objectiveViewOf(o)}, // the current state, for a later note
	}, err
}

// findStep finds a step by title or id in an active objective.
func findStep(
	ctx context.Context, db postgres.DB, args objectiveAdvanceArgs,
) (objectives.Objective, objectives.Step, error) {
	o, err := objectives.Get(ctx, db, args.Objective)
	if err != nil {
		return o, objectives.Step{}, invalidIf(err, objectives.ErrNotFound)
	}
	if o.Status != objectives.Active && o.Status != objectives.Completed {
		return o, objectives.Step{},
			invalid(fmt.Sprintf("objective %q is %s: only an active one is advanced", o.Name, o.Status))
	}
	steps, err := objectives.Steps(ctx, db, o.ID)
	if err != nil {
		return o, objectives.Step{}, err
	}
	var titles []string
	for _, s := range steps {
		if s.ID == args.Step || s.Title == strings.TrimSpace(args.Step) {
			return o, s, nil
		}
		titles = append(titles, fmt.Sprintf("%q", s.Title))
	}
	return o, objectives.Step{}, invalid(fmt.Sprintf("objective %q has no step %q; its steps are %s", o.Name,
		textcut.Text(args.Step, maxGoal), strings.Join(titles, ", ")))
}

type automationProposeArgs struct {
	Name        string         `json:"name"`
	Description string         `json:"description"`
	Cron        string         `json:"cron"`
	Timezone    string         `json:"timezone"`
	Event       string         `json:"event"`
	When        string         `json:"when"`
	Signal      string         `json:"signal"`
	Skill       string         `json:"skill"`
	Arguments   map[string]any `json:"arguments"`
	Prompt      string         `json:"prompt"`
}

func automationPropose(ctx context.Context, db postgres.Beginner, who acting, args automationProposeArgs) (any, error) {
	d := automations.Definition{
		Name: args.Name, Description: args.Description, Cron: args.Cron, Timezone: args.Timezone,
		Event: args.Event, When: args.When,
		Signal: args.Signal, Skill: args.Skill, Arguments: args.Arguments, Prompt: args.Prompt,
	}
	if err := automations.Validate(d); err != nil {
		return nil, invalid(err.Error())
	}
	if args.Skill != "" {
		if _, err := skills.Get(ctx, db, args.Skill); err != nil {
			return nil, invalidIf(err, skills.ErrNotFound)
		}
	}
	a, err := automations.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, invalidIf(err, automations.ErrNameTaken, automations.ErrTooMany)
	}
	status := automations.Proposal
	if a.DisabledBy != automations.Proposal {
		status = "decided"
	}
	return map[string]any{"automation": a.Name, "status": status, "note": waitsForAdmin}, nil
}
