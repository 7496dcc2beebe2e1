package heartbeat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
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

// Limits of package memory.
const (
	maxKey   = 255
	maxValue = 64 << 10
)

// check validates beyond the tool's schema, while the model can still correct the call.
func (m memoryNote) check() error {
	switch {
	case strings.TrimSpace(m.Key) == "" || strings.TrimSpace(m.Category) == "":
		return errors.New("key and category must not be blank")
	case len(m.Key) > maxKey || len(m.Category) > maxKey:
		return fmt.Errorf("key and category have at most %d bytes", maxKey)
	case len(m.Value) > maxValue:
		return fmt.Errorf("a value has at most %d bytes of JSON", maxValue)
	}
	return nil
}

// rememberTool lets the model add a note to list. The phase save_memories stores the notes.
func rememberTool(list *[]memoryNote) reason.Tool {
	return reason.Tool{
		Name: "remember",
		Description: "Keep a fact for later heartbeats. It is stored at the end of this one. It replaces a fact of the " +
			"same key only if a heartbeat wrote that or you have read it.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["key","value"],"properties":{
			"category":{"type":"string","minLength":1,"maxLength":60,"description":"what sort of fact, e.g. observation"},
			"key":{"type":"string","minLength":1,"maxLength":200,"description":"a short stable name; the same key replaces the fact"},
			"value":{"description":"the fact, as text or JSON"},
			"expires_in_days":{"type":"integer","minimum":1,"maximum":3650}}}`),
		DoSeen: func(_ context.Context, args json.RawMessage, seen memories.Seen) (any, error) {
			m := memoryNote{Category: "observation"}
			if err := json.Unmarshal(args, &m); err != nil {
				return nil, errArguments(err)
			}
			if err := m.check(); err != nil {
				return nil, errArguments(err)
			}
			m.Read = max(0, seen.Revision(m.Category, m.Key))
			*list = append(*list, m)
			return map[string]string{"status": "noted; stored at the end of this heartbeat"}, nil
		},
	}
}

// noteBase is the memory and the revision that a note is based on. Of several notes with one base, the last one wins.
type noteBase struct {
	memories.Name
	read int
}

// saveMemories stores the notes and drops expired memories.
func (b *heartbeatRun) saveMemories(ctx context.Context) (phaseResult, error) {
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
		stored[base] = revision
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
	return result, errors.Join(failures...)
}

// errArguments is the error for arguments that the schema accepts and the tool rejects.
func errArguments(err error) error {
	return &executions.StepError{Class: "invalid_params", Message: err.Error()}
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
		note := memories.Note{
			Owner: memories.Owner(owner), Category: m.Category, Key: m.Key, Value: m.Value,
			TTL:     time.Duration(m.Days * float64(24*time.Hour)),
			TraceID: string(trace.IDFrom(ctx)), Revision: cmp.Or(m.Read, memories.Absent),
		}
		saved, err := memories.Save(ctx, tx, note)
		if accepted := acceptableEntry(err, note); accepted != nil {
			saved, err = *accepted, nil
			if accepted.TraceID != note.TraceID && writtenByHeartbeat(accepted.TraceID) {
				note.Revision = accepted.Revision
				saved, err = memories.Save(ctx, tx, note)
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

// acceptableEntry returns the stored entry if a note about an unread key is no conflict: the entry has the same value,
// or an earlier heartbeat wrote it last. Heartbeats run one after the other, so that is an older note of the agent
// itself.
func acceptableEntry(err error, note memories.Note) *memories.Entry {
	conflict, ok := errors.AsType[*memories.ConflictError](err)
	if !ok || conflict.Theirs == nil || note.Revision != memories.Absent {
		return nil
	}
	if equalJSON(conflict.Theirs.Value, conflict.Yours) || writtenByHeartbeat(conflict.Theirs.TraceID) &&
		conflict.Theirs.TraceID != note.TraceID {
		return conflict.Theirs
	}
	return nil
}

func writtenByHeartbeat(traceID string) bool { return trace.ID(traceID).Surface() == trace.Heartbeat }

func equalJSON(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// performance sums up the last 7 days.
type performance struct {
	News   int64         `json:"news"` // calls since the last reflection, including this heartbeat
	Skills []skillRecord `json:"skills"`
	Tokens int64         `json:"tokens"`
	Cost   float64       `json:"cost_usd"`
}

type skillRecord struct {
	Skill         string   `json:"skill"`
	Calls         int64    `json:"calls"`
	Rate          *float64 `json:"success_rate"`
	FailureStreak int64    `json:"streak"`
	P50           *float64 `json:"p50_ms"`
	State         string   `json:"state"`
}

// reflect reviews the last 7 days if there is news since the last review.
func (b *heartbeatRun) reflect(ctx context.Context) (phaseResult, error) {
	record, err := executions.Step(ctx, "performance", func(ctx context.Context) (performance, error) {
		return readPerformance(ctx, b.Pool)
	})
	if err != nil {
		return phaseResult{}, err
	}
	if record.News == 0 {
		return phaseResult{Idle: true, Summary: "nothing new since the last reflection"}, nil
	}
	var notes []memoryNote
	outcome, err := b.Loop.Run(ctx, reason.Turn{
		Purpose: "reflect", BudgetScope: budgetScope(ctx, "reflect"),
		System: "You look back on how an autonomous agent performed. Be brief and concrete. " +
			"Use the tool remember for each lesson that will matter later; call nothing else.",
		Prompt: b.reflectionPrompt(record),
		Tools:  []reason.Tool{rememberTool(&notes)},
	})
	if err != nil {
		return phaseResult{Memories: notes}, err
	}
	return phaseResult{Summary: "reflected on 7 days: " + firstLine(outcome.Text), Memories: notes}, nil
}

func (b *heartbeatRun) reflectionPrompt(record performance) string {
	var p strings.Builder
	p.WriteString("Reflect on the last 7 days of your own performance.\n\n")
	if len(b.summaries) > 0 {
		fmt.Fprintf(&p, "This heartbeat so far: %s.\n\n", strings.Join(b.summaries, "; "))
	}
	if b.report != "" {
		fmt.Fprintf(&p, "Healing report:\n%s\n\n", b.report)
	}
	fmt.Fprintf(&p, "Model tokens: %d, cost: %.4f USD.\nSkills:\n", record.Tokens, record.Cost)
	for _, s := range record.Skills {
		rate := "no calls"
		if s.Rate != nil {
			rate = fmt.Sprintf("%d calls, %.0f %% succeeded, %d failures in a row", s.Calls, *s.Rate*100, s.FailureStreak)
		}
		fmt.Fprintf(&p, "- %s (%s): %s\n", s.Skill, s.State, rate)
	}
	return p.String()
}

// readPerformance reads the performance. News counts the model's tool calls and the failed calls since the last review.
// Successful automations without a model cause no review.
func readPerformance(ctx context.Context, db postgres.DB) (performance, error) {
	var p performance
	err := db.QueryRow(ctx, `
		with last as (
		  select coalesce(max(id::text)::uuid, lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days')) as id
		    from (select a.id from agent_activity a
		           where a.skill_name = 'reflect' and a.kind = 'phase' and a.status = 'success'
		           order by a.id desc limit 1) r)
		select (select count(*) from (select 1 from agent_activity a, last
		         where a.id > last.id and a.kind = 'call' and a.purpose <> 'reflect'
		           and (a.cause_id is not null or a.status in ('error', 'unknown')) limit 1000) n),
		       coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0), coalesce(sum(a.cost_usd), 0)::float8
		  from agent_activity a
		 where a.skill_name = 'model_call'
		   and a.id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days'))`,
	).Scan(&p.News, &p.Tokens, &p.Cost)
	if err != nil {
		return p, fmt.Errorf("measure performance: %w", err)
	}
	health, err := activity.CountedHealth(ctx, db, activity.HealthFilter{Limit: 100})
	if err != nil {
		return p, fmt.Errorf("measure skills: %w", err)
	}
	for _, h := range health.Lines {
		p.Skills = append(p.Skills, skillRecord{h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.State})
	}
	return p, nil
}

// firstLine returns the first line of a text, cut to 200 characters.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	return line
}
