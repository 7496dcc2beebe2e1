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

// History makes a trace of each incident in which self-heal or a person disabled a skill. It reads the newest 100
// incidents, with at most 1,000 counted calls before each.
//
// The verdict follows from the next recorded change of the skill. An alarm was false if a person enabled the skill
// during its cool-down. It was right if a person enabled the skill only later or disabled it, or if the trial failed.
// If a person disabled a skill without an alarm, the rule missed a fault.
//
// undecided counts the incidents without a verdict: no change followed, or the trial succeeded. An incident
// with a verdict but without a failed call of the skill is in neither result.
func History(ctx context.Context, db postgres.DB, p selfheal.Policy, since time.Time) (
	all []Trace, undecided int, err error,
) {
	type incident struct {
		Skill     string
		At, Since time.Time
		Verdict   *bool // whether disabling was right; nil while nothing has decided it
	}
	incidents, err := postgres.Rows[incident](ctx, db, "read incidents", historySQL, postgres.Strict{
		"since": since, "window": p.Window, "cooldown": p.Cooldown, "limit": maxIncidents,
	})
	if err != nil {
		return nil, 0, err
	}
	for _, i := range incidents {
		if i.Verdict == nil {
			undecided++
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
		if *i.Verdict {
			t.MustDisable, t.FirstCall, t.LastCall = true, failure+1, len(calls)
		}
		all = append(all, t)
	}
	return all, undecided, nil
}

// callsBetween returns the counted calls, oldest first. Of more than incidentCalls, it returns the newest.
func callsBetween(ctx context.Context, db postgres.DB, since, until time.Time) ([]Call, error) {
	counted, err := postgres.Rows[selfheal.Call](ctx, db, "read calls", `
		select c.skill_name as skill, coalesce(c.thread_id, c.trace_id) as caller, c.created_at as at,
		       c.status = 'error' as failed
		  from agent_skill_calls c
		 where c.id >= lanekeeper.agent_uuid7_floor(@since::timestamptz) and c.created_at between @since and @until
		 order by c.created_at desc, c.id desc limit @limit`,
		postgres.Strict{"since": since, "until": until, "limit": incidentCalls})
	calls := make([]Call, len(counted))
	for i, c := range counted {
		calls[len(calls)-1-i] = Call{Call: c}
	}
	return calls, err
}
