package builtins

import (
	"cmp"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// anyRevision as the revision of a call replaces whatever is there. It is for what people write down; a model cannot say it.
const anyRevision = -1

// ClassConflict is the class of a write that did not take place, because the key has changed since the run read it.
const ClassConflict = "conflict"

// readRevision is the revision of a [memory.Note] for that of a call's arguments, where 0, or none, says that the key must be new.
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
	Theirs  *recalled       `json:"theirs"` // nil: it was forgotten, or has expired
}

func conflictAnswer(c *memory.ConflictError) any {
	said := conflicted{Error: ClassConflict, Yours: c.Yours, Message: "Nothing was changed: somebody else wrote this key since you read it, or you have not read it. " +
		"Compare theirs with yours. Then, if it is still right, make the call again with what both say."}
	if e := c.Theirs; e != nil {
		said.Theirs = &recalled{e.Category, e.Key, e.Value, e.Revision, e.ExpiresAt, e.UpdatedAt, e.TraceID}
	}
	return said
}

// IsConflict reports whether a skill's answer is that its write did not take place, and says why for people.
func IsConflict(s skills.Skill, answer json.RawMessage) (why string, is bool) {
	var c conflicted
	if !writesMemory(s) || json.Unmarshal(answer, &c) != nil || c.Error != ClassConflict {
		return "", false
	}
	theirs := "nothing is there any more"
	if c.Theirs != nil {
		theirs = fmt.Sprintf("revision %d of trace %s is there: %s", c.Theirs.Revision, c.Theirs.TraceID, clip(string(c.Theirs.Value), maxError))
	}
	yours := cmp.Or(clip(string(c.Yours), maxError), "to forget it")
	return fmt.Sprintf("nothing was changed: the key is not at the revision that was read; %s; wanted was %s", theirs, yours), true
}

func writesMemory(s skills.Skill) bool {
	return s.Handler == "builtin:memory_write" || s.Handler == "builtin:memory_forget"
}

// readsMemory reports whether what a skill answers may show entries of the memory.
func readsMemory(s skills.Skill) bool {
	return s.Handler == "builtin:recall" || s.Handler == "builtin:memory_search" || writesMemory(s)
}

// Sights are the entries of the memory that a skill's answer showed in its first upto bytes.
func Sights(s skills.Skill, answer []byte, upto int) []memory.Sight {
	if !readsMemory(s) {
		return nil
	}
	return memory.SightsIn(answer, upto)
}

// Wrote is what a call has written by itself: its run knows it, without having read it.
func Wrote(s skills.Skill, answer json.RawMessage) []memory.Sight {
	var done struct {
		memory.Sight
		Forgotten *bool `json:"forgotten"`
	}
	if _, conflict := IsConflict(s, answer); conflict || !writesMemory(s) || json.Unmarshal(answer, &done) != nil || done.Key == "" {
		return nil
	}
	if done.Forgotten != nil {
		done.Revision = memory.Absent
	}
	return []memory.Sight{done.Sight}
}

// Guarded are the arguments of a call with the revision that its run has read of the key, whatever the caller says of it. nil for
// seen leaves them as they are: nobody keeps what was read.
func Guarded(s skills.Skill, args json.RawMessage, seen memory.Seen) json.RawMessage {
	if seen == nil || !writesMemory(s) {
		return args
	}
	var said map[string]json.RawMessage
	var name memory.Name
	if json.Unmarshal(args, &said) != nil || json.Unmarshal(args, &name) != nil {
		return args // which the check of arguments refuses
	}
	said["revision"] = json.RawMessage(fmt.Sprint(max(0, seen.Revision(name.Category, name.Key))))
	guarded, err := json.Marshal(said)
	if err != nil {
		return args
	}
	return guarded
}
