package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	mostRuns  = 30
	mostShown = 64 << 10 // bytes of one value
)

// automationPage shows one automation, its runs, and the levers on it.
func (room *Room) automationPage() page {
	return page{
		path: "/automations/{name}", name: "automation", title: "Automation",
		open: room.openAutomation,
		parts: []part{
			{name: "definition", every: 5 * time.Second, load: room.automationDefinition},
			{name: "dead", every: 5 * time.Second, load: room.automationDead},
			{name: "runs", every: 2 * time.Second, load: room.automationRuns},
		},
	}
}

// automationWanted is the automation of the page and where its runs go on.
type automationWanted struct{ ID, Before string }

func (room *Room) openAutomation(ctx context.Context, v *visit) (string, error) {
	name := v.path("name")
	before, err := v.uuidFilter("before")
	if err != nil {
		return "", err
	}
	var id string
	err = room.Read.QueryRow(ctx, `select id::text, name from agent_automations where name = @name`,
		postgres.Strict{"name": name}).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", missing("there is no automation %.80q", name)
	}
	v.About = automationWanted{id, before}
	return "Automation " + cut(80, name), err
}

// automationFacts is an automation with all that it says.
type automationFacts struct {
	automationRow
	Condition, Arguments, Source, DecidedBy string
	MaxAttempts                             int
	Armed                                   bool
	UpdatedAt                               time.Time
}

func (room *Room) automationDefinition(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(automationWanted)
	rows, err := room.Read.Query(ctx, `
		select a.id::text, a.name, left(a.description, 8192) as description, a.trigger,
		       left(a.cron, 300) as cron, left(a.timezone, 300) as timezone, left(a.event, 300) as event, left(a.signal, 4000) as signal,
		       a.skill_name, left(a.prompt, 8192) as prompt, a.flow, a.enabled, a.disabled_by, left(a.disabled_reason, 2000) as disabled_reason,
		       a.disabled_at, left(a.paused_for, 300) as paused_for, left(a.proposed_by, 300) as proposed_by,
		       left(a.last_trace_id, 300) as last_trace_id, a.next_run_at, a.created_at, left(a.condition, 4000) as condition,
		       case when octet_length(a.arguments::text) <= @most then a.arguments::text else left(a.arguments::text, 4000) end as arguments,
		       left(a.source, 300) as source, left(a.decided_by, 300) as decided_by, a.max_attempts, a.revision, a.armed, a.updated_at,
		       '' as run_status, '' as run_trace, '' as run_error, null::timestamptz as run_at
		  from agent_automations a where a.id = @id`, postgres.Strict{"id": want.ID, "most": mostShown})
	if err != nil {
		return nil, fmt.Errorf("read automation: %w", err)
	}
	a, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[automationFacts])
	if err != nil {
		return nil, fmt.Errorf("read automation: %w", err)
	}
	a.Arguments = argumentsShown(a.Arguments)
	return a, nil
}

// argumentsShown is JSON, or the beginning of some, without secrets and in lines.
func argumentsShown(text string) string {
	if !json.Valid([]byte(text)) {
		return redact.Text(text, mostShown)
	}
	return setOut(string(redact.JSON(json.RawMessage(text), mostShown)))
}

func (room *Room) automationRuns(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(automationWanted)
	all, err := collectAutomationRuns(room.Read.Query(ctx, `
		select `+runColumns+`
		  from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where r.automation_id = @id and (@before = '' or r.id < nullif(@before, '')::uuid)
		 order by r.id desc limit @most + 1`,
		freshPlan, postgres.Strict{"id": want.ID, "before": want.Before, "most": mostRuns}))
	if err != nil {
		return nil, err
	}
	list, more := onPage(all, mostRuns)
	older := ""
	if more {
		older = v.at("before", list[len(list)-1].ID)
	}
	for i := range list {
		list[i].Output = redact.Text(list[i].Output, mostShown)
	}
	return map[string]any{"Runs": list, "Older": older, "Newest": newest(v, want.Before)}, nil
}

// newest is the address of the first page; empty on it.
func newest(v *visit, before string) string {
	if before == "" {
		return ""
	}
	return v.at("before", "")
}

// automationDead are the dead letters of the automation.
func (room *Room) automationDead(ctx context.Context, v *visit) (any, error) {
	want, _ := v.About.(automationWanted)
	all, err := collectAutomationRuns(room.Read.Query(ctx, `
		select `+runColumns+`
		  from agent_automation_runs r join agent_automations a on a.id = r.automation_id
		 where r.automation_id = @id and r.status = 'dead' order by r.id desc limit @most + 1`,
		postgres.Strict{"id": want.ID, "most": mostDead}))
	if err != nil {
		return nil, err
	}
	list, more := onPage(all, mostDead)
	return map[string]any{"Runs": list, "More": more}, nil
}
