package builtins

import (
	"cmp"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// anyRevision replaces any revision. In a turn of a model, [WithRevisions] overwrites it.
const anyRevision = -1

// noteRevision converts the argument revision to the revision of a [memory.Note] or an objective's note. An argument
// of 0, or none, requires that the entry or note does not exist.
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

// ClassConflict marks a rejected write: the key has changed since the run read it.
const ClassConflict = "conflict"

// rejectedWrite is the answer of a rejected write, with both values.
type rejectedWrite struct {
	Error    string          `json:"error"` // ClassConflict
	Message  string          `json:"message"`
	Category string          `json:"category,omitempty"` // set with Key if Theirs is nil
	Key      string          `json:"key,omitempty"`
	Yours    json.RawMessage `json:"yours,omitempty"`
	Theirs   any             `json:"theirs"` // *memoryView or objectiveView; nil if the entry does not exist any more
}

// ConflictAnswer returns the answer of a rejected write.
func ConflictAnswer(c *memory.ConflictError) any {
	e := c.Theirs
	if e == nil {
		return rejectedWrite{
			Error: ClassConflict, Category: c.Category, Key: c.Key, Yours: c.Yours,
			Message: "Nothing was changed: this key has no entry any more. If yours is still right, make the call again, as " +
				"for a new entry.",
		}
	}
	return rejectedWrite{
		Error: ClassConflict, Yours: c.Yours,
		Theirs: &memoryView{e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID},
		Message: "Nothing was changed: somebody else wrote this key since you read it, or you have not read it. " +
			"Compare theirs with yours. Then, if it is still right, make the call again with what both say.",
	}
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

// currentValue is the current value in a conflict.
type currentValue struct {
	Revision    int             `json:"revision"`
	Value       json.RawMessage `json:"value"`
	Note        string          `json:"note"`
	TraceID     string          `json:"trace_id"`
	LastTraceID string          `json:"last_trace_id"`
}

// IsConflict reports whether a skill's answer is a rejected write, and why.
func IsConflict(s skills.Skill, answer json.RawMessage) (why string, ok bool) {
	var c struct {
		Error  string          `json:"error"`
		Yours  json.RawMessage `json:"yours"`
		Theirs *currentValue   `json:"theirs"`
	}
	if !needsRevision(s) || json.Unmarshal(answer, &c) != nil || c.Error != ClassConflict {
		return "", false
	}
	current := "nothing is there any more"
	if t := c.Theirs; t != nil {
		current = fmt.Sprintf("revision %d of trace %s is there: %s", t.Revision, cmp.Or(t.TraceID, t.LastTraceID),
			textcut.Text(cmp.Or(string(t.Value), t.Note), maxError))
	}
	yours := cmp.Or(textcut.Text(string(c.Yours), maxError), "to forget it")
	return fmt.Sprintf("nothing was changed: it is not at the revision that was read; %s; wanted was %s", current, yours),
		true
}

// kindObjective is the kind of a [memory.Name] of an objective: its key is the objective's name or id.
const kindObjective = "objective"

// needsRevision reports whether a skill's write depends on what its run has read.
func needsRevision(s skills.Skill) bool { return writesMemory(s) || writesObjective(s) }

func writesMemory(s skills.Skill) bool {
	return s.Handler == "builtin:memory_write" || s.Handler == "builtin:memory_forget"
}

func writesObjective(s skills.Skill) bool { return s.Handler == "builtin:objective_update" }

// OnMemory reports whether a skill reads or writes the memory, so its answer may show entries.
func OnMemory(s skills.Skill) bool {
	return s.Handler == "builtin:recall" || s.Handler == "builtin:memory_search" || writesMemory(s)
}

// readsObjectives reports whether a skill's answer may show objectives with notes.
func readsObjectives(s skills.Skill) bool {
	return s.Handler == "builtin:objectives_list" || s.Handler == "builtin:objective_advance" || writesObjective(s)
}

// Sights are the memory entries and objectives in the first upto bytes of a skill's answer.
func Sights(s skills.Skill, answer []byte, upto int) []memory.Sight {
	switch {
	case OnMemory(s):
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

// SightsWritten returns the sights of a call's own write, or of the absence that rejected it.
func SightsWritten(s skills.Skill, answer json.RawMessage) []memory.Sight {
	var done struct {
		memory.Sight
		Forgotten *bool  `json:"forgotten"`
		Objective string `json:"objective"`
		ID        string `json:"id"`
	}
	if !needsRevision(s) || json.Unmarshal(answer, &done) != nil {
		return nil
	}
	_, conflict := IsConflict(s, answer)
	switch {
	case writesObjective(s) && done.Revision > 0: // the call wrote a note
		return SightsOf(objectives.Objective{ID: done.ID, Name: done.Objective, Revision: done.Revision})
	case writesObjective(s) || done.Key == "":
		return nil
	case done.Forgotten != nil || conflict:
		done.Revision = memory.Absent
	}
	return []memory.Sight{{Name: memory.Name{Category: done.Category, Key: done.Key}, Revision: done.Revision}}
}

// WithRevisions returns the arguments of a call with the revision that its run has read, in place of the caller's. If
// seen is nil, it returns them unchanged.
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
	result, err := json.Marshal(members)
	if err != nil {
		return args
	}
	return result
}
