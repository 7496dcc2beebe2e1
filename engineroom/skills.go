package engineroom

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

const (
	maxSkills      = 100
	maxSkillCalls  = 20
	maxSkillErrors = 10
	// maxSearchedSkillCalls bounds the rows of a skill searched for failures.
	maxSearchedSkillCalls = 2000
)

// maxListedSkills bounds the skills on the overview.
const maxListedSkills = 6

// skillHealth formats a skill's health.
type skillHealth struct{ activity.Health }

// Rate is the success rate.
func (h skillHealth) Rate() string {
	if h.SuccessRate == nil {
		return "–"
	}
	return human.Percent(*h.SuccessRate)
}

// P50 is the median duration.
func (h skillHealth) P50() string { return milliseconds(h.P50MS) }

// P95 is the 95th percentile of the duration.
func (h skillHealth) P95() string { return milliseconds(h.P95MS) }

// milliseconds formats a percentile with two digits, which is its precision.
func milliseconds(ms *float64) string {
	if ms == nil {
		return "–"
	}
	if *ms < 10 {
		return human.Millis(int64(*ms + .5))
	}
	unit := math.Pow(10, math.Floor(math.Log10(*ms))-1)
	return human.Millis(int64(math.Round(*ms/unit) * unit))
}

// Since is the start of the counted period.
func (h skillHealth) Since() string {
	return time.Now().UTC().Truncate(time.Hour).AddDate(0, 0, -7).Format("2006-01-02T15:04Z")
}

// healthPart is the panel of the overview.
func (room *Room) healthPart() part {
	return part{name: "health", interval: sumsInterval, refreshOnActivity: true, load: room.healthPanel}
}

// healthPanel lists the least healthy skills.
func (room *Room) healthPanel(ctx context.Context, _ *pageRequest) (any, error) {
	sums, err := activity.CountedHealth(ctx, room.Read, activity.HealthFilter{NoDurations: true})
	if err != nil {
		return nil, err
	}
	list, counts := worstFirst(sums.Lines), map[string]int{}
	for _, h := range list {
		counts[h.Look()]++
	}
	return map[string]any{
		"Skills": list[:min(len(list), maxListedSkills)], "All": len(list), "Until": sums.Until, "Counts": counts,
	}, nil
}

// Look is the state on the page. An enabled skill is failing if its newest 3 or more calls failed, or if its newest
// call and most calls in 7 days failed.
func (h skillHealth) Look() string {
	if h.State == "enabled" && (h.Streak >= monitor.FailingStreak || h.Streak > 0 && 2*h.Failed > h.Calls) {
		return "failing"
	}
	return h.State
}

// worstFirst orders skills: disabled, on trial, failing, then all other skills by failures and calls.
func worstFirst(lines []activity.Health) []skillHealth {
	list := make([]skillHealth, len(lines))
	for i, h := range lines {
		list[i] = skillHealth{h}
	}
	order := []string{"disabled", "on trial", "failing", "enabled"}
	slices.SortStableFunc(list, func(a, b skillHealth) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.Look()), slices.Index(order, b.Look())),
			cmp.Compare(b.Streak, a.Streak), cmp.Compare(b.Failed, a.Failed), cmp.Compare(b.Calls, a.Calls),
			cmp.Compare(a.Skill, b.Skill))
	})
	return list
}

// skillNamePattern matches names of skills.
var skillNamePattern = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// skillsPage lists the skills and their health.
func (room *Room) skillsPage() page {
	return page{
		path: "/skills", name: "skills", navLabel: "Skills", title: "Skills", parallel: true,
		open: func(_ context.Context, req *pageRequest) (string, error) {
			state, err := req.oneOf("state", "", "enabled", "failing", "on trial", "disabled")
			if err != nil {
				return "", err
			}
			name, err := req.textFilter("skill")
			if err != nil {
				return "", err
			}
			after, err := req.textFilter("after")
			req.Subject = activity.HealthFilter{State: state, Skill: name, After: after}
			return "", err
		},
		parts: []part{
			room.filtersPart("/skills", "skill"),
			{name: "list", interval: 5 * time.Second, refreshOnActivity: true, load: room.skillsList},
			{name: "figures", interval: sumsInterval, refreshOnActivity: true, load: room.skillFigures},
		},
	}
}

// failingSkill is a failing skill with its state on the page.
type failingSkill struct {
	activity.Failure
	Look string
}

// maxFigures bounds the failing and the slow skills.
const maxFigures = 50

// skillFigures lists the rows of the views agent_failing_skills and agent_slowest_skills for the last 7 days.
func (room *Room) skillFigures(ctx context.Context, _ *pageRequest) (any, error) {
	figures, err := activity.ReadFigures(ctx, room.Read, activity.ReportFilter{})
	if err != nil {
		return nil, err
	}
	failures, moreFailures := firstN(figures.Failing(), maxFigures)
	list := make([]failingSkill, len(failures))
	for i, f := range failures {
		list[i] = failingSkill{f, skillHealth{activity.Health{
			State: f.State, Calls: f.Calls, Failed: f.Errors, Streak: f.Streak,
		}}.Look()}
	}
	slow, moreSlow := firstN(figures.Slowest(), maxFigures)
	return map[string]any{
		"Failing": map[string]any{"Skills": list, "More": moreFailures},
		"Slowest": map[string]any{"Skills": slow, "More": moreSlow},
	}, nil
}

// listedSkill is a skill in the list.
type listedSkill struct {
	skillHealth
	About skillAbout
}

// skillAbout holds a skill's columns in the list, without its health.
type skillAbout struct {
	Name, Description, Handler, Scope, Trust string
	StateRevision                            int
}

func (room *Room) skillsList(ctx context.Context, req *pageRequest) (any, error) {
	want, _ := req.Subject.(activity.HealthFilter)
	filter := want
	if filter.After, filter.Skill = "", ""; want.State == "failing" {
		filter.State = "enabled"
	}
	sums, err := activity.CountedHealth(ctx, room.Read, filter)
	if err != nil {
		return nil, err
	}
	all := worstFirst(sums.Lines)
	if want.State == "failing" {
		all = slices.DeleteFunc(all, func(h skillHealth) bool { return h.Look() != "failing" })
	}
	if want.Skill != "" {
		part := strings.ToLower(want.Skill)
		all = slices.DeleteFunc(all, func(h skillHealth) bool { return !strings.Contains(strings.ToLower(h.Skill), part) })
	}
	if i := slices.IndexFunc(all, func(h skillHealth) bool { return h.Skill == want.After }); i >= 0 {
		all = all[i+1:]
	}
	healths, more := firstN(all, maxSkills)
	names := make([]string, 0, len(healths))
	for _, h := range healths {
		names = append(names, h.Skill)
	}
	details, err := postgres.Rows[skillAbout](ctx, room.Read, "list skills", `
		select s.name, left(s.description, 160) as description, left(s.handler, 100) as handler, s.scope, s.trust,
		       s.state_revision
		  from agent_skills s where s.name = any (@names::text[])`, postgres.Strict{"names": names})
	if err != nil {
		return nil, err
	}
	aboutByName := map[string]skillAbout{}
	for _, a := range details {
		aboutByName[a.Name] = a
	}
	list := make([]listedSkill, 0, len(healths))
	for _, h := range healths {
		list = append(list, listedSkill{h, aboutByName[h.Skill]})
	}
	next := ""
	if more {
		next = req.withParam("after", names[len(names)-1])
	}
	return map[string]any{"Skills": list, "Want": want, "Until": sums.Until, "Next": next}, nil
}

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
	rows, err := room.Read.Query(ctx, `
		select s.name, left(s.description, 4000) as description, left(s.handler, 300) as handler, s.scope, s.trust,
		       left(s.source, 300) as source, s.disabled_by, left(s.disabled_reason, 2000) as disabled_reason, s.idempotent,
		       s.enabled, s.timeout_ms, s.revision, s.state_revision, s.disabled_at, s.trial_at, s.enabled_at, s.updated_at,
		       case when s.enabled then 'enabled' when s.trial_at is not null then 'on trial' else 'disabled' end as state,
		       left(s.tool_definition::text, 8192) as tool, octet_length(s.tool_definition::text) as tool_size,
		       left(s.config::text, 8192) as config, octet_length(s.config::text) as config_size,
		       left(s.evidence::text, 8192) as evidence, octet_length(s.evidence::text) as evidence_size
		  from agent_skills s where s.name = @name`, postgres.Strict{"name": req.Subject})
	if err != nil {
		return nil, fmt.Errorf("read skill: %w", err)
	}
	skill, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[shownSkill])
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, notFound("the skill has been removed")
	}
	if err != nil {
		return nil, fmt.Errorf("read skill: %w", err)
	}
	return skill, nil
}

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
	c.Points = periodsSince(since, activity.ByDay, func(at time.Time) []float64 {
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
