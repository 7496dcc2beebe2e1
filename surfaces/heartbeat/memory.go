package heartbeat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	memories "github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// memoryNote is a fact to be stored at the end of the heartbeat.
type memoryNote struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days,omitempty"` // 30.0 is an integer to JSON Schema
	Read     int             `json:"read,omitempty"`            // the revision that the model had read; 0 for none
}

// stored is the note for package memory.
func (m memoryNote) stored() memories.Note {
	return memories.Note{
		Category: m.Category, Key: m.Key, Value: m.Value, TTL: time.Duration(m.Days * float64(24*time.Hour)),
		Revision: cmp.Or(m.Read, memories.Absent),
	}
}

// rememberTool lets the model add a note to list. The phase save_memories stores the notes.
func rememberTool(list *[]memoryNote) reason.Tool {
	return reason.Tool{
		Name: "remember",
		Description: "Keep a fact for later heartbeats. It is stored at the end of this one. It replaces a fact of the " +
			"same key only if a heartbeat of yours wrote that or you have read it.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["key","value"],"properties":{
			"category":{"type":"string","minLength":1,"maxLength":60,"description":"what sort of fact, e.g. observation"},
			"key":{"type":"string","minLength":1,"maxLength":200,"description":"a short stable name"},
			"value":{"description":"the fact, as text or JSON"},
			"expires_in_days":{"type":"integer","minimum":1,"maximum":3650}}}`),
		DoSeen: func(_ context.Context, args json.RawMessage, seen memories.Seen) (any, error) {
			m := memoryNote{Category: "observation"}
			if err := json.Unmarshal(args, &m); err != nil {
				return nil, errArguments(err)
			}
			if err := m.stored().Check(); err != nil { // now the model can still correct the call
				return nil, errArguments(err)
			}
			m.Read = max(0, seen.Revision(m.Category, m.Key))
			*list = append(*list, m)
			return map[string]string{"status": "noted; stored at the end of this heartbeat"}, nil
		},
	}
}

// errArguments is the error for arguments that the schema accepts and the tool rejects.
func errArguments(err error) error {
	return &executions.StepError{Class: "invalid_params", Message: err.Error()}
}

// noteBase is the memory and the revision that a note is based on. Of several notes with one base, the last one wins.
type noteBase struct {
	memories.Name
	read int
}

// saveMemories stores the notes and drops expired memories. It does not yield: it needs no model, and an early end
// would lose the notes.
func (b *heartbeatRun) saveMemories(ctx context.Context) (phaseResult, error) {
	ctx = withoutYield(ctx)
	expired, err := executions.StepTx(ctx, "expire", func(ctx context.Context, tx pgx.Tx) (int, error) {
		n, err := memories.Expire(ctx, tx)
		return int(n), err
	})
	if err != nil {
		return phaseResult{}, err
	}
	saved, conflicts := 0, 0
	stored := map[noteBase]int{} // revisions that this heartbeat has stored, by base
	var failures []error
	for _, m := range b.memories {
		base := noteBase{memories.Name{Category: m.Category, Key: m.Key}, m.Read}
		m.Read = cmp.Or(stored[base], m.Read)
		revision, err := b.saveNote(ctx, m)
		stored[base] = cmp.Or(revision, stored[base])
		switch {
		case err != nil && !isStepError(err):
			return phaseResult{}, err
		case err == nil && revision == 0:
			conflicts++
		case err == nil:
			saved++
		}
		failures = append(failures, err)
	}
	result := phaseResult{Summary: fmt.Sprintf("%d memories saved", saved), Idle: len(b.memories) == 0 && expired == 0}
	if conflicts > 0 {
		result.Summary += fmt.Sprintf(", %d kept as conflicts (agent memory conflicts)", conflicts)
	}
	if expired > 0 {
		result.Summary += fmt.Sprintf(", %d expired ones dropped", expired)
	}
	return result, joinErrors(failures)
}

// saveNote stores one note and its activity in one transaction, and returns the revision. Revision 0 means that the key
// has changed since the model read it. The note is then stored as a conflict for an admin.
func (b *heartbeatRun) saveNote(ctx context.Context, m memoryNote) (revision int, err error) {
	return executions.StepTx(ctx, "save memory", func(ctx context.Context, tx pgx.Tx) (int, error) {
		current, _ := executions.Current(ctx)
		owner, err := b.memoryOwner(ctx, tx, current.Agent)
		if err != nil {
			return 0, err
		}
		note := m.stored()
		note.Owner, note.TraceID = memories.Owner(owner), string(trace.IDFrom(ctx))
		saved, err := memories.Save(ctx, tx, note)
		if conflict, ok := errors.AsType[*memories.ConflictError](err); ok && conflict.Theirs != nil &&
			note.Revision == memories.Absent {
			own, readErr := writtenBefore(ctx, tx, *conflict.Theirs, current)
			switch {
			case readErr != nil:
				return 0, readErr
			case own:
				note.Revision = conflict.Theirs.Revision
				saved, err = memories.Save(ctx, tx, note)
			case exactjson.Equal(conflict.Theirs.Value, conflict.Yours):
				saved, err = *conflict.Theirs, nil
			}
		}
		entry := activity.Entry{Skill: "save_memory", Claim: current.Claim, Input: m}
		if conflict, ok := errors.AsType[*memories.ConflictError](err); ok {
			id, err := memories.StoreConflict(ctx, tx, note, conflict, current.ID)
			if err != nil {
				return 0, err
			}
			_, err = activity.Note(ctx, tx, entry, activity.Outcome{
				Status: activity.Skipped, Output: map[string]string{"conflict_id": id, "conflict": conflict.Error()},
			})
			return 0, err
		}
		if err != nil {
			return 0, err
		}
		_, err = activity.Note(ctx, tx, entry, activity.Outcome{Output: map[string]int{"revision": saved.Revision}})
		return saved.Revision, err
	}, executions.Input(m))
}

// memoryOwner returns the memory of the acting agent.
func (b *heartbeatRun) memoryOwner(ctx context.Context, tx pgx.Tx, agent string) (string, error) {
	directory := cmp.Or(b.Loop.Agents, &agents.Directory{})
	owner, err := directory.ActingMemory(ctx, tx, agent)
	if errors.Is(err, agents.ErrNoMemory) {
		err = &executions.StepError{Class: "invalid_params", Message: err.Error()}
	}
	return owner, err
}

// writtenBefore reports whether an earlier heartbeat of the same agent wrote an entry last. A heartbeat whose execution
// retention has removed counts as one of the agent.
func writtenBefore(ctx context.Context, tx pgx.Tx, entry memories.Entry, current executions.Execution) (bool, error) {
	if entry.TraceID == current.TraceID || trace.ID(entry.TraceID).Surface() != trace.Heartbeat {
		return false, nil
	}
	var own bool
	err := tx.QueryRow(ctx, `
		select not exists (select from agent_executions x where x.trace_id = @trace and x.flow = @flow and x.agent <> @agent)`,
		postgres.Strict{"trace": entry.TraceID, "flow": Flow, "agent": current.Agent}).Scan(&own)
	if err != nil {
		return false, fmt.Errorf("read the heartbeat that wrote %s: %w", entry.Key, err)
	}
	return own, nil
}
