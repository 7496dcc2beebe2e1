package builtins

import (
	"cmp"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

// anyRevision as the revision of a call replaces whatever is there. It is for what people write down; a model cannot say it.
const anyRevision = -1

// ClassConflict is the class of a write that did not take place, because the key has changed since the run read it.
const ClassConflict = "conflict"

// readRevision is the revision of a [memory.Note], or of an objective's note, for that of a call's arguments, where 0,
// or none, says that there must be none.
func readRevision(said float64) int {
	switch revision := int(said); revision {
	case 0:
		return memory.Absent
	case anyRevision:
		return 0
	default:
		return revision
	}
}

// conflicted is the answer of a write that did not take place: both values, so that the caller can decide.
type conflicted struct {
	Error   string          `json:"error"` // ClassConflict
	Message string          `json:"message"`
	Yours   json.RawMessage `json:"yours,omitempty"`
	Theirs  any             `json:"theirs"` // *recalled or pursued; nil: it was forgotten, or has expired
}

func conflictAnswer(c *memory.ConflictError) any {
	said := conflicted{Error: ClassConflict, Yours: c.Yours, Message: "Nothing was changed: somebody else wrote this key since you read it, or you have not read it. " +
		"Compare theirs with yours. Then, if it is still right, make the call again with what both say."}
	if e := c.Theirs; e != nil {
		said.Theirs = &recalled{e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID}
	}
	return said
}

// theirs is what a conflict has found, of either kind.
type theirs struct {
	Revision    int             `json:"revision"`
	Value       json.RawMessage `json:"value"`
	Note        string          `json:"note"`
	TraceID     string          `json:"trace_id"`
	LastTraceID string          `json:"last_trace_id"`
}

// IsConflict reports whether a skill's answer is that its write did not take place, and says why for people.
func IsConflict(s skills.Skill, answer json.RawMessage) (why string, is bool) {
	var c struct {
		Error  string          `json:"error"`
		Yours  json.RawMessage `json:"yours"`
		Theirs *theirs         `json:"theirs"`
	}
	if !guards(s) || json.Unmarshal(answer, &c) != nil || c.Error != ClassConflict {
		return "", false
	}
	there := "nothing is there any more"
	if t := c.Theirs; t != nil {
		there = fmt.Sprintf("revision %d of trace %s is there: %s", t.Revision, cmp.Or(t.TraceID, t.LastTraceID), clip(cmp.Or(string(t.Value), t.Note), maxError))
	}
	yours := cmp.Or(clip(string(c.Yours), maxError), "to forget it")
	return fmt.Sprintf("nothing was changed: it is not at the revision that was read; %s; wanted was %s", there, yours), true
}

// kindObjective is the kind of a [memory.Name] that names an objective: its key is the objective's name, or its id.
const kindObjective = "objective"

func writesMemory(s skills.Skill) bool {
	return s.Handler == "builtin:memory_write" || s.Handler == "builtin:memory_forget"
}

// OnMemory reports whether a skill reads or writes the memory.
func OnMemory(s skills.Skill) bool { return readsMemory(s) }

func writesObjective(s skills.Skill) bool { return s.Handler == "builtin:objective_update" }

// guards reports whether a skill writes what others may have written since it was read.
func guards(s skills.Skill) bool { return writesMemory(s) || writesObjective(s) }

// readsMemory reports whether what a skill answers may show entries of the memory.
func readsMemory(s skills.Skill) bool {
	return s.Handler == "builtin:recall" || s.Handler == "builtin:memory_search" || writesMemory(s)
}

// readsObjectives reports whether what a skill answers may show objectives with their notes.
func readsObjectives(s skills.Skill) bool {
	return s.Handler == "builtin:objectives_list" || s.Handler == "builtin:objective_advance" || writesObjective(s)
}

// Sights are the entries of the memory, and the objectives, that a skill's answer showed in its first upto bytes.
func Sights(s skills.Skill, answer []byte, upto int) []memory.Sight {
	switch {
	case readsMemory(s):
		return memory.SightsIn(answer, upto)
	case !readsObjectives(s):
		return nil
	}
	var found []memory.Sight
	for _, raw := range memory.ShownIn(answer, upto, "objectives") {
		var p pursued
		if json.Unmarshal(raw, &p) == nil && p.Name != "" && !p.NoteCut {
			found = append(found, SightsOf(objectives.Objective{ID: p.ID, Name: p.Name, Revision: p.Revision})...)
		}
	}
	return found
}

// SightsOf are the sights of an objective that was shown with its whole note.
func SightsOf(o objectives.Objective) []memory.Sight {
	return []memory.Sight{
		{Name: memory.Name{Kind: kindObjective, Key: o.Name}, Revision: o.Revision}, {Name: memory.Name{Kind: kindObjective, Key: o.ID}, Revision: o.Revision},
	}
}

// Wrote is what a call has written by itself: its run knows it, without having read it.
func Wrote(s skills.Skill, answer json.RawMessage) []memory.Sight {
	var done struct {
		memory.Sight
		Forgotten *bool  `json:"forgotten"`
		Objective string `json:"objective"`
		ID        string `json:"id"`
	}
	if _, conflict := IsConflict(s, answer); conflict || !guards(s) || json.Unmarshal(answer, &done) != nil {
		return nil
	}
	switch {
	case writesObjective(s) && done.Revision > 0: // a note was written
		return SightsOf(objectives.Objective{ID: done.ID, Name: done.Objective, Revision: done.Revision})
	case writesObjective(s) || done.Key == "":
		return nil
	case done.Forgotten != nil:
		done.Revision = memory.Absent
	}
	return []memory.Sight{{Name: memory.Name{Category: done.Category, Key: done.Key}, Revision: done.Revision}}
}

// Guarded are the arguments of a call with the revision that its run has read of what it writes, whatever the caller
// says of it. nil for seen leaves them as they are: nobody keeps what was read.
func Guarded(s skills.Skill, args json.RawMessage, seen memory.Seen) json.RawMessage {
	if seen == nil || !guards(s) {
		return args
	}
	var said map[string]json.RawMessage
	var name struct{ Category, Key, Objective string }
	if json.Unmarshal(args, &said) != nil || json.Unmarshal(args, &name) != nil {
		return args // which the check of arguments refuses
	}
	revision := seen.Revision(name.Category, name.Key)
	if writesObjective(s) {
		revision = seen[memory.Name{Kind: kindObjective, Key: name.Objective}]
	}
	said["revision"] = json.RawMessage(fmt.Sprint(max(0, revision)))
	guarded, err := json.Marshal(said)
	if err != nil {
		return args
	}
	return guarded
}
