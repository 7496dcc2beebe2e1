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

// memory is something a phase wants remembered.
type memory struct {
	Category string          `json:"category"`
	Key      string          `json:"key"`
	Value    json.RawMessage `json:"value"`
	Days     float64         `json:"expires_in_days,omitempty"` // 30.0 is an integer to JSON Schema
	Read     int             `json:"read,omitempty"`            // the revision that the model had read then; 0: none
}

// Limits of what package memory keeps.
const (
	maxKey   = 255
	maxValue = 64 << 10
)

// check says what the schema of the tool cannot, so that the model hears of it while it can still act.
func (m memory) check() error {
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

// remember is the tool with which the model puts something on the list that save_memories stores.
func remember(list *[]memory) reason.Tool {
	return reason.Tool{
		Name:        "remember",
		Description: "Keep a fact for later heartbeats. It is stored at the end of this one. It replaces a fact of the same key only if a heartbeat wrote that or you have read it.",
		Parameters: json.RawMessage(`{"type":"object","additionalProperties":false,"required":["key","value"],"properties":{
			"category":{"type":"string","minLength":1,"maxLength":60,"description":"what sort of fact, e.g. observation"},
			"key":{"type":"string","minLength":1,"maxLength":200,"description":"a short stable name; the same key replaces the fact"},
			"value":{"description":"the fact, as text or JSON"},
			"expires_in_days":{"type":"integer","minimum":1,"maximum":3650}}}`),
		DoSeen: func(_ context.Context, args json.RawMessage, seen memories.Seen) (any, error) {
			m := memory{Category: "observation"}
			if err := json.Unmarshal(args, &m); err != nil {
				return nil, badArguments(err)
			}
			if err := m.check(); err != nil {
				return nil, badArguments(err)
			}
			m.Read = max(0, seen.Revision(m.Category, m.Key))
			*list = append(*list, m)
			return map[string]string{"status": "noted; stored at the end of this heartbeat"}, nil
		},
	}
}

// based is what a memory is based on: a later note of the same heartbeat replaces an earlier one.
type based struct {
	memories.Name
	read int
}

// saveMemories stores what the phases noted and drops what has expired.
func (b *beat) saveMemories(ctx context.Context) (done, error) {
	expired, err := executions.StepTx(ctx, "expire", func(ctx context.Context, tx pgx.Tx) (int, error) {
		n, err := memories.Expire(ctx, tx)
		return int(n), err
	})
	if err != nil {
		return done{}, err
	}
	saved, conflicts := 0, 0
	own := map[based]int{} // revisions that this heartbeat has stored, by what they are based on
	var failures []error
	for _, m := range b.memories {
		base := based{memories.Name{Category: m.Category, Key: m.Key}, m.Read}
		m.Read = cmp.Or(own[base], m.Read)
		revision, err := b.save(ctx, m)
		own[base] = revision
		switch {
		case err != nil && !isResult(err):
			return done{}, err
		case err == nil && revision == 0:
			conflicts++
		case err == nil:
			saved++
		}
		failures = append(failures, err)
	}
	said := done{Summary: fmt.Sprintf("%d memories saved", saved), Idle: len(b.memories) == 0 && expired == 0}
	if conflicts > 0 {
		said.Summary += fmt.Sprintf(", %d kept as conflicts (agent memory conflicts)", conflicts)
	}
	if expired > 0 {
		said.Summary += fmt.Sprintf(", %d expired ones dropped", expired)
	}
	return said, errors.Join(failures...)
}

// badArguments tells the model of arguments that its tool's schema lets through and the tool does not take.
func badArguments(err error) error {
	return &executions.StepError{Class: "invalid_params", Message: err.Error()}
}

// save stores one memory and its row in one transaction, and returns its revision. 0: others have written the key since
// the model read it, and what it noted is kept as a conflict, which an admin decides.
func (b *beat) save(ctx context.Context, m memory) (revision int, err error) {
	return executions.StepTx(ctx, "save memory", func(ctx context.Context, tx pgx.Tx) (int, error) {
		current, _ := executions.Current(ctx)
		owner, err := b.owner(ctx, tx, current.Agent)
		if err != nil {
			return 0, err
		}
		note := memories.Note{
			Owner: memories.Owner(owner), Category: m.Category, Key: m.Key, Value: m.Value, TTL: time.Duration(m.Days * float64(24*time.Hour)),
			TraceID: string(trace.IDFrom(ctx)), Revision: cmp.Or(m.Read, memories.Absent),
		}
		saved, err := memories.Save(ctx, tx, note)
		if known := known(err, note); known != nil {
			saved, err = *known, nil
			if known.TraceID != note.TraceID && ofHeartbeat(known.TraceID) {
				note.Revision = known.Revision
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

// owner names the memory of the agent whose heartbeat it is.
func (b *beat) owner(ctx context.Context, tx pgx.Tx, agent string) (string, error) {
	directory := cmp.Or(b.Loop.Agents, &agents.Directory{})
	owner, err := directory.ActingMemory(ctx, tx, agent)
	if errors.Is(err, agents.ErrNoMemory) {
		err = &executions.StepError{Class: "invalid_params", Message: err.Error()}
	}
	return owner, err
}

// known is the entry that a note meets without a conflict, although the model has not read it: one of the same value,
// or one that an earlier heartbeat wrote and nobody has changed since. Heartbeats follow one another, so that is the
// agent's own older fact. Nil: there is a conflict, or none is needed.
func known(err error, note memories.Note) *memories.Entry {
	conflict, ok := errors.AsType[*memories.ConflictError](err)
	if !ok || conflict.Theirs == nil || note.Revision != memories.Absent {
		return nil
	}
	if same(conflict.Theirs.Value, conflict.Yours) || ofHeartbeat(conflict.Theirs.TraceID) && conflict.Theirs.TraceID != note.TraceID {
		return conflict.Theirs
	}
	return nil
}

// ofHeartbeat reports whether a heartbeat wrote an entry.
func ofHeartbeat(traceID string) bool { return trace.ID(traceID).Surface() == trace.Heartbeat }

// same reports whether two JSON texts have the same value.
func same(a, b json.RawMessage) bool {
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// performance is how the agent did over the last 7 days.
type performance struct {
	News   int64         `json:"news"` // since the last reflection, this heartbeat's included
	Skills []skillRecord `json:"skills"`
	Tokens int64         `json:"tokens"`
	Cost   float64       `json:"cost_usd"`
}

type skillRecord struct {
	Skill string   `json:"skill"`
	Calls int64    `json:"calls"`
	Rate  *float64 `json:"success_rate"`
	Run   int64    `json:"streak"`
	P50   *float64 `json:"p50_ms"`
	State string   `json:"state"`
}

// reflect looks at the last 7 days, when there is news since it last did.
func (b *beat) reflect(ctx context.Context) (done, error) {
	record, err := executions.Step(ctx, "performance", func(ctx context.Context) (performance, error) {
		return measure(ctx, b.Pool)
	})
	if err != nil {
		return done{}, err
	}
	if record.News == 0 {
		return done{Idle: true, Summary: "nothing new since the last reflection"}, nil
	}
	var noted []memory
	outcome, err := b.Loop.Run(ctx, reason.Turn{
		Purpose: "reflect", BudgetScope: scope(ctx, "reflect"),
		System: "You look back on how an autonomous agent performed. Be brief and concrete. " +
			"Use the tool remember for each lesson that will matter later; call nothing else.",
		Prompt: b.reflection(record),
		Tools:  []reason.Tool{remember(&noted)},
	})
	if err != nil {
		return done{Memories: noted}, err
	}
	return done{Summary: "reflected on 7 days: " + firstLine(outcome.Text), Memories: noted}, nil
}

// reflection is the prompt.
func (b *beat) reflection(record performance) string {
	var p strings.Builder
	p.WriteString("Reflect on the last 7 days of your own performance.\n\n")
	if len(b.did) > 0 {
		fmt.Fprintf(&p, "This heartbeat so far: %s.\n\n", strings.Join(b.did, "; "))
	}
	if b.report != "" {
		fmt.Fprintf(&p, "Healing report:\n%s\n\n", b.report)
	}
	fmt.Fprintf(&p, "Model tokens: %d, cost: %.4f USD.\nSkills:\n", record.Tokens, record.Cost)
	for _, s := range record.Skills {
		rate := "no calls"
		if s.Rate != nil {
			rate = fmt.Sprintf("%d calls, %.0f %% succeeded, %d failures in a row", s.Calls, *s.Rate*100, s.Run)
		}
		fmt.Fprintf(&p, "- %s (%s): %s\n", s.Skill, s.State, rate)
	}
	return p.String()
}

// measure reads the record. News are counted on ids, which are time-ordered, from the last reflection on. They are the
// calls that a model made, and those that failed. What works without a model, such as an automation that calls a skill,
// costs no reflection.
func measure(ctx context.Context, db postgres.DB) (performance, error) {
	var got performance
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
		 where a.skill_name = 'model_call' and a.id >= (select lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '7 days'))`,
	).Scan(&got.News, &got.Tokens, &got.Cost)
	if err != nil {
		return got, fmt.Errorf("measure performance: %w", err)
	}
	health, err := activity.CountedHealth(ctx, db, activity.HealthFilter{Limit: 100})
	if err != nil {
		return got, fmt.Errorf("measure skills: %w", err)
	}
	for _, h := range health.Lines {
		got.Skills = append(got.Skills, skillRecord{h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.State})
	}
	return got, nil
}

// firstLine shortens a text to what fits a row.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	return line
}
