package faults

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/selfheal"
)

// Bounds of a history: the newest incidents, and the newest calls before each.
const (
	maxIncidents  = 100
	incidentCalls = 1000
)

//go:embed history.sql
var historySQL string

// History makes traces of the skills that self-heal or a person disabled, and counts the incidents without a verdict.
// An alarm was false if a person enabled the skill during its cool-down. An alarm was right if the skill stayed
// disabled, failed its trial, or if a person disabled it. Skills that stayed enabled have no trace. History reads the
// newest 100 incidents, with 1,000 calls before each.
func History(ctx context.Context, db postgres.DB, p selfheal.Policy, since time.Time) (
	all []Trace, unjudged int, err error,
) {
	type incident struct {
		Skill     string
		At, Since time.Time
		Fault     *bool
	}
	incidents, err := postgres.Rows[incident](ctx, db, "read what self-heal did", historySQL, postgres.Strict{
		"since": since, "window": p.Window, "cooldown": p.Cooldown, "most": maxIncidents,
	})
	if err != nil {
		return nil, 0, err
	}
	for _, i := range incidents {
		if i.Fault == nil {
			unjudged++
			continue
		}
		calls, err := callsBetween(ctx, db, i.Since, i.At)
		if err != nil {
			return nil, 0, err
		}
		failure := slices.IndexFunc(calls, func(c Call) bool { return c.Skill == i.Skill && c.Failed })
		if failure < 0 {
			continue // another cause disabled the skill
		}
		name := fmt.Sprintf("%s at %s", i.Skill, i.At.UTC().Format(time.RFC3339))
		t := Trace{Name: name, Shape: "history", Skill: i.Skill, Calls: calls}
		if *i.Fault {
			t.Out, t.From, t.By = true, failure+1, len(calls)
		}
		all = append(all, t)
	}
	return all, unjudged, nil
}

// callsBetween reads the calls that count, oldest first. Of many calls, it reads the newest.
func callsBetween(ctx context.Context, db postgres.DB, since, until time.Time) ([]Call, error) {
	counted, err := postgres.Rows[selfheal.Call](ctx, db, "read calls", `
		select c.skill_name as skill, coalesce(c.thread_id, c.trace_id) as caller, c.created_at as at,
		       c.status = 'error' as failed
		  from agent_skill_calls c
		 where c.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz) and c.created_at between @since and @until
		 order by c.created_at desc, c.id desc limit @most`,
		postgres.Strict{"since": since, "until": until, "most": incidentCalls})
	calls := make([]Call, len(counted))
	for i, c := range counted {
		calls[len(calls)-1-i] = Call{Call: c}
	}
	return calls, err
}
