package evals

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// SampleFilter selects recorded turns of an agent.
type SampleFilter struct {
	Agent  string
	Others []string // names of the other agents
	All    bool     // also select turns of names that are not in Others, for the default agent
	Since  time.Duration
	Size   int
	// For a shadow: select only turns that completed after After and until Until, and of those a share by trace hash.
	After, Until *time.Time
	Share        float64
}

// executions reads the executions of completed turns with a model call. It orders by a hash of the trace ids, so the
// same turns give the same sample.
func (s SampleFilter) executions(ctx context.Context, db postgres.DB) ([]sampledTurn, error) {
	return postgres.Rows[sampledTurn](ctx, db, "sample recorded turns", `
		select e.trace_id, e.id::text as execution_id, e.surface::text as surface, m.purpose
		  from agent_executions e
		 cross join lateral (
		       select a.agent, a.purpose from agent_activity a
		        where a.trace_id = e.trace_id and a.execution_id = e.id and a.kind = 'model' and a.status = 'success'
		        order by a.created_at, a.id limit 1) m
		 where e.id > (select lanekeeper.agent_uuid7_floor(clock_timestamp() - @since::interval)) and e.parent_id is null
		   and e.claimed_by is null -- condition of the index agent_executions_of_surface
		   and e.surface in ('chat', 'operate', 'webhook', 'heartbeat') and e.flow = any (@flows::text[])
		   and (@after::timestamptz is null
		     or e.completed_at > @after::timestamptz and e.completed_at <= @upto::timestamptz)
		   and (@share::float8 = 0 or ('x' || left(md5(e.trace_id), 8))::bit(32)::bigint < @share * 4294967296)
		   and e.status = 'completed' and (m.agent = @agent or @all::bool and m.agent <> all (@others::text[]))
		 order by md5(e.trace_id) limit @size`, postgres.Strict{
		"since": s.Since, "flows": []string{"chat", "chat_relay", "operate", "webhook", "heartbeat"}, "agent": s.Agent,
		"after": s.After, "upto": s.Until, "share": s.Share, "all": s.All,
		"others": append([]string{}, s.Others...), "size": s.Size,
	})
}

// sampledTurn is the execution of a recorded turn.
type sampledTurn struct {
	TraceID     string
	ExecutionID string
	Surface     string
	Purpose     string // purpose of the first model call
}

// Sample is the recorded part of a suite.
type Sample struct {
	Size    int                 `json:"size"`
	Skipped map[string]int      `json:"skipped"` // turns that cannot be played, by reason
	Turns   map[string]Recorded `json:"turns"`   // by case
}

// DrawSample reads a sample of recorded turns, and returns a case for each turn that can be played.
func DrawSample(ctx context.Context, db postgres.DB, filter SampleFilter) ([]Case, Sample, error) {
	sample := Sample{Skipped: map[string]int{}, Turns: map[string]Recorded{}}
	found, err := filter.executions(ctx, db)
	if err != nil {
		return nil, sample, err
	}
	sample.Size = len(found)
	cases := []Case{}
	allSkills, err := skills.InScope(ctx, db, nil)
	if err != nil {
		return nil, sample, err
	}
	for _, turnSource := range found {
		turn, err := readTurn(ctx, db, turnSource)
		if why, is := errors.AsType[unplayable](err); is {
			sample.Skipped[string(why)]++
			continue
		}
		if err != nil {
			return nil, sample, err
		}
		turn.keepRuntimeTools(allSkills)
		c := turn.Case(turnSource.TraceID)
		cases, sample.Turns[c.Name] = append(cases, c), turn
	}
	return cases, sample, nil
}

// Coverage reports the decided share of a sample.
type Coverage struct {
	Sampled  int            `json:"sampled"`
	Played   int            `json:"played"`   // cases with a decided trial
	Decided  int            `json:"decided"`  // played cases whose every trial passed or failed
	Followed int            `json:"followed"` // decided cases whose every trial made the recorded calls
	Diverged map[string]int `json:"diverged"` // cases, by the skill of the first unrecorded call
	Skipped  map[string]int `json:"skipped"`  // turns that cannot be played, by reason
}

// Playable returns the number of turns that can be played. A page shows it.
func (c Coverage) Playable() int {
	n := c.Sampled
	for _, skipped := range c.Skipped {
		n -= skipped
	}
	return n
}

// countCoverage counts the cases of a run.
func countCoverage(s Sample, trials []Trial) Coverage {
	c := Coverage{Sampled: s.Size, Diverged: map[string]int{}, Skipped: s.Skipped}
	type caseState struct{ played, undecided, failed bool }
	states := map[string]caseState{}
	for _, t := range trials {
		state := states[t.Case]
		switch t.Verdict {
		case Pass:
			state.played = true
		case Fail:
			state.played, state.failed = true, true
		case Diverged:
			if !state.undecided && len(t.Reasons) > 0 {
				skill, _, _ := strings.Cut(t.Reasons[0], " ")
				c.Diverged[skill]++
			}
			state.played, state.undecided = true, true
		case Error:
			state.played, state.undecided = true, true
		default:
			state.undecided = true
		}
		states[t.Case] = state
	}
	for _, s := range states {
		if s.played {
			c.Played++
		}
		if s.played && !s.undecided {
			c.Decided++
			if !s.failed {
				c.Followed++
			}
		}
	}
	return c
}

// PutSample stores a suite of recorded turns. No workspace declares it, and it is not current.
func PutSample(ctx context.Context, db postgres.DB, suite Suite, s Sample) (Suite, error) {
	raw, err := json.Marshal(struct {
		Definition
		Sample Sample `json:"sample"`
	}{suite.Definition, s})
	if err != nil {
		return Suite{}, fmt.Errorf("store a sample: %w", err)
	}
	return postgres.RowOr[Suite](ctx, db, ErrNotFound, "store a sample", `
		insert into agent_evals (name, version, digest, definition, source, current)
		values (@name, @version, encode(sha256(convert_to(@definition, 'utf8')), 'hex'), @definition::jsonb, @source, false)
		returning name, version, definition - 'sample' as definition, source, created_at`,
		postgres.Strict{"name": suite.Name, "version": suite.Version, "definition": string(raw), "source": suite.Source})
}

// RecordedTurn reads the recorded turn of a case. It returns nil for a case of a workspace file.
func RecordedTurn(ctx context.Context, db postgres.DB, r Run, caseName string) (turn *Recorded, err error) {
	err = db.QueryRow(ctx, `
		select definition -> 'sample' -> 'turns' -> @case from agent_evals where name = @name and version = @version`,
		postgres.Strict{"name": r.Suite, "version": r.Version, "case": caseName}).Scan(&turn)
	if err != nil {
		return nil, fmt.Errorf("read the recorded turn of %s: %w", caseName, err)
	}
	return turn, nil
}

// readSample reads the sample of a run, without its turns.
func readSample(ctx context.Context, db postgres.DB, r Run) (s Sample, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(definition -> 'sample', '{}') - 'turns' from agent_evals
		 where name = @name and version = @version`,
		postgres.Strict{"name": r.Suite, "version": r.Version}).Scan(&s)
	if err != nil {
		return s, fmt.Errorf("read the sample of %s: %w", r.Suite, err)
	}
	return s, nil
}
