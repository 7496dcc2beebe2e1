package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	maxAutomations = 50
	maxProposals   = 20 // bound of undecided proposals
	maxDeadRuns    = 20
	upcomingTimes  = 3
)

// automationsPage lists the automations.
func (room *Room) automationsPage() page {
	return page{
		path: "/automations", name: "automations", navLabel: "Automations", title: "Automations",
		open: func(_ context.Context, req *pageRequest) (string, error) {
			state, err := req.oneOf("state", "", "enabled", "disabled")
			if err != nil {
				return "", err
			}
			name, err := req.textFilter("name")
			if err != nil {
				return "", err
			}
			before, err := req.uuidFilter("before")
			req.Subject = automationFilter{state, name, before}
			return "Automations", err
		},
		parts: []part{
			room.filtersPart("/automations"),
			{name: "proposals", interval: 5 * time.Second, load: room.automationProposals},
			{name: "list", interval: 5 * time.Second, load: room.automationsList},
			{name: "dead", interval: 5 * time.Second, load: room.automationsDead},
		},
	}
}

// automationFilter holds the parameters of the list.
type automationFilter struct{ State, Name, Before string }

// automationRow is an automation in a list, with its last run.
type automationRow struct {
	Revision                                                                               int
	ID, Name, Description, Trigger, Cron, Timezone, Event, Signal, SkillName, Prompt, Flow string
	Enabled                                                                                bool
	DisabledBy, DisabledReason, PausedFor, ProposedBy, LastTraceID                         string
	DisabledAt, NextRunAt                                                                  *time.Time
	CreatedAt                                                                              time.Time
	RunStatus, RunTrace, RunError                                                          string
	RunAt                                                                                  *time.Time
}

// State is the automation's state.
func (a automationRow) State() string {
	switch {
	case a.Enabled:
		return "enabled"
	case a.DisabledBy == automations.Proposal:
		return "proposed"
	case a.PausedFor != "":
		return "paused"
	}
	return "disabled"
}

// Upcoming are the next times of a schedule, computed from the row.
func (a automationRow) Upcoming() []time.Time {
	return automations.Automation{
		Trigger: a.Trigger, Cron: a.Cron, Timezone: a.Timezone, Enabled: a.Enabled, NextRunAt: a.NextRunAt,
	}.Upcoming(upcomingTimes)
}

const automationColumns = `a.id::text, a.name, left(a.description, 300) as description, a.trigger,
	left(a.cron, 300) as cron, left(a.timezone, 300) as timezone, left(a.event, 300) as event,
	left(a.signal, 300) as signal, a.skill_name, left(a.prompt, 300) as prompt, a.flow, a.enabled, a.disabled_by,
	left(a.disabled_reason, 300) as disabled_reason, a.disabled_at, left(a.paused_for, 300) as paused_for,
	left(a.proposed_by, 300) as proposed_by,
	left(a.last_trace_id, 300) as last_trace_id, a.next_run_at, a.created_at, a.revision,
	coalesce(r.status, '') as run_status, coalesce(left(r.trace_id, 300), '') as run_trace,
	coalesce(left(r.error_message, 300), '') as run_error,
	r.claimed_at as run_at`

func (room *Room) automationsList(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(automationFilter)
	all, err := postgres.Rows[automationRow](ctx, room.Read, "list automations", `
		select `+automationColumns+`
		  from agent_automations a
		  left join lateral (
		    select x.status, x.trace_id, x.error_message, x.claimed_at from agent_automation_runs x
		     where x.automation_id = a.id order by x.id desc limit 1) r on true
		 where a.disabled_by <> 'proposal' and (@state = '' or a.enabled = (@state = 'enabled'))
		   and (@name = '' or a.name ilike @name or a.skill_name ilike @name or a.flow ilike @name)
		   and (@before = '' or a.id < nullif(@before, '')::uuid)
		 order by a.id desc limit @limit + 1`,
		customPlan, postgres.Strict{
			"state": filter.State, "name": containsPattern(filter.Name), "before": filter.Before,
			"limit": maxAutomations,
		})
	if err != nil {
		return nil, err
	}
	for i := range all {
		all[i].RunError = redact.Text(all[i].RunError, maxShown)
	}
	list, links := paginate(req, all, maxAutomations, func(a automationRow) string { return a.ID })
	return map[string]any{"Automations": list, "State": filter.State, "Name": filter.Name, "Links": links}, nil
}

func (room *Room) automationProposals(ctx context.Context, _ *pageRequest) (any, error) {
	return postgres.Rows[automationRow](ctx, room.Read, "list automations", `
		select `+automationColumns+`
		  from agent_automations a left join agent_automation_runs r on false
		 where a.disabled_by = 'proposal' order by a.id desc limit @limit`, postgres.Strict{"limit": maxProposals})
}

// automationRun is one run of an automation.
type automationRun struct {
	ID, Automation, Cause, Status, TraceID, Error, Output string
	Attempt                                               int
	ScheduledFor, CreatedAt                               time.Time
	RetryAt, FinishedAt                                   *time.Time
	ExecutionID                                           *string
}

const runColumns = `r.id::text, a.name as automation, r.cause, r.status, left(r.trace_id, 300) as trace_id,
	coalesce(left(r.error_message, 1000), '') as error, coalesce(left(r.output::text, 8192), '') as output, r.attempt,
	r.scheduled_for, r.created_at, r.retry_at, r.finished_at, r.execution_id::text`

// readRuns collects runs of a query, with redacted outputs and errors.
func readRuns(rows pgx.Rows, err error) ([]automationRun, error) {
	list, err := postgres.Collect(rows, err, "list runs", pgx.RowToStructByName[automationRun])
	for i := range list {
		list[i].Output = cut(2000, redact.Text(list[i].Output, maxShown))
		list[i].Error = redact.Text(list[i].Error, maxShown)
	}
	return list, err
}

// automationsDead lists the newest dead runs of all automations.
func (room *Room) automationsDead(ctx context.Context, _ *pageRequest) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select `+runColumns+`
		  from (select * from agent_automation_runs x where x.status = 'dead' order by x.id desc limit @limit + 1) r
		  join agent_automations a on a.id = r.automation_id
		 order by r.id desc`, postgres.Strict{"limit": maxDeadRuns})
	all, err := readRuns(rows, err)
	if err != nil {
		return nil, err
	}
	list, more := firstN(all, maxDeadRuns)
	return map[string]any{"Runs": list, "More": more}, nil
}

const (
	maxRuns = 30
	// maxShown bounds the bytes of a value of an automation or a delivery.
	maxShown = 64 << 10
)

// automationPage shows one automation, its runs and its actions.
func (room *Room) automationPage() page {
	return page{
		path: "/automations/{name}", name: "automation", title: "Automation",
		open: room.openAutomation,
		parts: []part{
			{name: "definition", interval: 5 * time.Second, load: room.automationDefinition},
			{name: "dead", interval: 5 * time.Second, load: room.automationDead},
			{name: "runs", interval: 2 * time.Second, load: room.automationRuns},
		},
	}
}

// automationSubject is the automation of a page and the position in its runs.
type automationSubject struct{ ID, Before string }

func (room *Room) openAutomation(ctx context.Context, req *pageRequest) (string, error) {
	name := req.path("name")
	before, err := req.uuidFilter("before")
	if err != nil {
		return "", err
	}
	var id string
	err = room.Read.QueryRow(ctx, `select id::text, name from agent_automations where name = @name`,
		postgres.Strict{"name": name}).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", notFound("there is no automation %.80q", name)
	}
	req.Subject = automationSubject{id, before}
	return "Automation " + cut(80, name), err
}

// automationFacts is an automation with its definition.
type automationFacts struct {
	automationRow
	Condition, Arguments, Source, DecidedBy string
	MaxAttempts                             int
	SignalArmed                             bool
	UpdatedAt                               time.Time
}

func (room *Room) automationDefinition(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(automationSubject)
	a, err := postgres.Row[automationFacts](ctx, room.Read, "read automation", `
		select a.id::text, a.name, left(a.description, 8192) as description, a.trigger, left(a.cron, 300) as cron,
		       left(a.timezone, 300) as timezone, left(a.event, 300) as event, left(a.signal, 4000) as signal, a.skill_name,
		       left(a.prompt, 8192) as prompt, a.flow, a.enabled, a.disabled_by,
		       left(a.disabled_reason, 2000) as disabled_reason, a.disabled_at, left(a.paused_for, 300) as paused_for,
		       left(a.proposed_by, 300) as proposed_by, left(a.last_trace_id, 300) as last_trace_id, a.next_run_at,
		       a.created_at, left(a.condition, 4000) as condition,
		       case when octet_length(a.arguments::text) <= @limit then a.arguments::text
		         else left(a.arguments::text, 4000) end as arguments,
		       left(a.source, 300) as source, left(a.decided_by, 300) as decided_by, a.max_attempts, a.revision,
		       a.signal_armed, a.updated_at,
		       '' as run_status, '' as run_trace, '' as run_error, null::timestamptz as run_at
		  from agent_automations a where a.id = @id`, postgres.Strict{"id": subject.ID, "limit": maxShown})
	if err != nil {
		return nil, err
	}
	a.Arguments = argumentsShown(a.Arguments)
	return a, nil
}

// argumentsShown formats JSON, or its beginning, redacted.
func argumentsShown(text string) string {
	if !json.Valid([]byte(text)) {
		return redact.Text(text, maxShown)
	}
	return formatJSON(string(redact.JSON(json.RawMessage(text), maxShown)))
}

func (room *Room) automationRuns(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(automationSubject)
	rows, err := room.Read.Query(ctx, `
		select `+runColumns+`
		  from agent_automation_runs r
		  join agent_automations a on a.id = r.automation_id
		 where r.automation_id = @id and (@before = '' or r.id < nullif(@before, '')::uuid)
		 order by r.id desc limit @limit + 1`,
		customPlan, postgres.Strict{"id": subject.ID, "before": subject.Before, "limit": maxRuns})
	all, err := readRuns(rows, err)
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, all, maxRuns, func(r automationRun) string { return r.ID })
	return map[string]any{"Runs": list, "Links": links}, nil
}

// automationDead lists the automation's dead runs.
func (room *Room) automationDead(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(automationSubject)
	rows, err := room.Read.Query(ctx, `
		select `+runColumns+`
		  from agent_automation_runs r
		  join agent_automations a on a.id = r.automation_id
		 where r.automation_id = @id and r.status = 'dead'
		 order by r.id desc limit @limit + 1`, postgres.Strict{"id": subject.ID, "limit": maxDeadRuns})
	all, err := readRuns(rows, err)
	if err != nil {
		return nil, err
	}
	list, more := firstN(all, maxDeadRuns)
	return map[string]any{"Runs": list, "More": more}, nil
}
