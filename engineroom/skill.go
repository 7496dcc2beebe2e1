package engineroom

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// skillPage shows one skill.
func (room *Room) skillPage() page {
	return page{
		path: "/skills/{name}", name: "skill", open: room.openSkill, parallel: true,
		parts: []part{
			{name: "about", interval: 3 * time.Second, load: room.skillAbout},
			{name: "health", interval: 5 * time.Second, refreshOnActivity: true, load: room.skillHealth},
			{name: "errors", interval: 5 * time.Second, refreshOnActivity: true, load: room.skillErrors},
			{name: "calls", interval: 2 * time.Second, refreshOnActivity: true, load: room.skillCalls},
			{name: "automations", interval: 10 * time.Second, load: room.skillAutomations},
		},
	}
}

// skillNamePattern matches names of skills.
var skillNamePattern = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

func (room *Room) openSkill(ctx context.Context, req *pageRequest) (string, error) {
	name := req.path("name")
	unknown := notFound("there is no skill %.80q; it may have been removed with its declaration", name)
	if !skillNamePattern.MatchString(name) {
		return "", unknown
	}
	var found string
	err := room.Read.QueryRow(ctx, `select s.name from agent_skills s where s.name = @name`,
		postgres.Strict{"name": name}).Scan(&found)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", unknown
	}
	if err != nil {
		return "", fmt.Errorf("find skill: %w", err)
	}
	req.Subject = found
	return "Skill " + found, nil
}

// shownSkill is a skill with its definition.
type shownSkill struct {
	Name, Description, Handler, Scope, Trust, State, Source, DisabledBy, DisabledReason string
	Idempotent, Enabled                                                                 bool
	TimeoutMS                                                                           int64
	Revision, StateRevision                                                             int
	DisabledAt, TrialAt                                                                 *time.Time
	EnabledAt, UpdatedAt                                                                time.Time
	Tool, Config, Evidence                                                              string
	ToolSize, ConfigSize, EvidenceSize                                                  int64
}

// Definition is the skill's tool definition, in a form for the page.
func (s shownSkill) Definition() shownValue { return shownJSON(s.Tool, s.ToolSize) }

// Settings is the handler's configuration.
func (s shownSkill) Settings() shownValue { return shownJSON(s.Config, s.ConfigSize) }

// Proof is the evidence of the disabling.
func (s shownSkill) Proof() shownValue { return shownJSON(s.Evidence, s.EvidenceSize) }

// Ever reports whether the skill was ever re-enabled.
func (s shownSkill) Ever() bool { return s.EnabledAt.After(time.Unix(0, 0)) }

func (room *Room) skillAbout(ctx context.Context, req *pageRequest) (any, error) {
	return postgres.RowOr[shownSkill](ctx, room.Read, notFound("the skill has been removed"), "read skill", `
		select s.name, left(s.description, 4000) as description, left(s.handler, 300) as handler, s.scope, s.trust,
		       left(s.source, 300) as source, s.disabled_by, left(s.disabled_reason, 2000) as disabled_reason, s.idempotent,
		       s.enabled, s.timeout_ms, s.revision, s.state_revision, s.disabled_at, s.trial_at, s.enabled_at, s.updated_at,
		       case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
		       left(s.tool_definition::text, 8192) as tool, octet_length(s.tool_definition::text) as tool_size,
		       left(s.config::text, 8192) as config, octet_length(s.config::text) as config_size,
		       left(s.evidence::text, 8192) as evidence, octet_length(s.evidence::text) as evidence_size
		  from agent_skills s where s.name = @name`, postgres.Strict{"name": req.Subject})
}

// skillHealth reads a skill's counted health and calls of 7 days. A removed skill is not found.
func (room *Room) skillHealth(ctx context.Context, req *pageRequest) (any, error) {
	name, _ := req.Subject.(string)
	sums, err := activity.CountedHealth(ctx, room.Read, activity.HealthFilter{Skill: name})
	if err != nil {
		return nil, err
	}
	if len(sums.Lines) == 0 {
		return nil, notFound("the skill has been removed")
	}
	since := today().AddDate(0, 0, -6)
	days, err := activity.CountedCalls(ctx, room.Read, name, since, activity.ByDay)
	if err != nil {
		return nil, err
	}
	callsByDay := map[int64]activity.CallLine{}
	for _, l := range days.Lines {
		if l.Period != nil {
			callsByDay[l.Period.Unix()] = l
		}
	}
	c := chart{
		Title: "Calls by day, 7 days", About: "Each bar shows the calls of a day: successes, failures, and " +
			"calls that do not count for the skill.",
		Series: []series{{"succeeded", "bar-good"}, {"failed", "bar-bad"}, {"other", "bar-note"}}, Write: countTick,
	}
	c.Points = pointsSince(since, 24*time.Hour, func(at time.Time) []float64 {
		l := callsByDay[at.Unix()]
		return []float64{float64(l.Worked - l.Failed), float64(l.Failed), float64(l.Calls - l.Worked)}
	})
	return map[string]any{"Health": skillHealth{sums.Lines[0]}, "Chart": c, "Until": sums.Until}, nil
}

// skillCall is a call of a skill.
type skillCall struct {
	ID, TraceID, Surface, Status, Class, Message string
	DurationMS                                   *int64
	CreatedAt                                    time.Time
}

// skillErrors returns the newest failures among the newest rows.
func (room *Room) skillErrors(ctx context.Context, req *pageRequest) (any, error) {
	list, err := room.callsOf(ctx, req, "error", maxSkillErrors)
	return map[string]any{"Calls": list, "Skill": req.Subject, "Walked": int64(maxSearchedSkillCalls)}, err
}

func (room *Room) skillCalls(ctx context.Context, req *pageRequest) (any, error) {
	list, err := room.callsOf(ctx, req, "", maxSkillCalls)
	return map[string]any{"Calls": list, "Skill": req.Subject}, err
}

func (room *Room) callsOf(ctx context.Context, req *pageRequest, status string, limit int) ([]skillCall, error) {
	return postgres.Rows[skillCall](ctx, room.Read, "list calls", `
		select x.id::text, x.trace_id, left(x.surface, 40) as surface, x.status, left(x.error_class, 100) as class,
		       coalesce(left(x.error_message, 400), '') as message, x.duration_ms, x.created_at
		  from (select a.id, a.trace_id, a.surface, a.status, a.error_class, a.error_message, a.duration_ms, a.created_at,
		               a.kind
		          from agent_activity a where a.skill_name = @name order by a.id desc limit @searched::int) x
		 where x.kind = 'call' and (@status::text = '' or x.status = @status)
		 order by x.id desc limit @limit::int`, customPlan, postgres.Strict{
		"name": req.Subject, "searched": maxSearchedSkillCalls, "status": status, "limit": limit,
	})
}

// callingAutomation is an automation that calls a skill.
type callingAutomation struct {
	Name, Trigger, State, LastTraceID string
	NextRunAt                         *time.Time
}

func (room *Room) skillAutomations(ctx context.Context, req *pageRequest) (any, error) {
	return postgres.Rows[callingAutomation](ctx, room.Read, "list automations of a skill", `
		select left(a.name, 100) as name, a.trigger, case when a.enabled then 'enabled' else 'disabled' end as state,
		       a.last_trace_id, case when a.enabled then a.next_run_at end as next_run_at
		  from agent_automations a where a.skill_name = @name
		    order by a.name limit @limit::int`, postgres.Strict{"name": req.Subject, "limit": maxSkills})
}
