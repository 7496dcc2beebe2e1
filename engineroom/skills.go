package engineroom

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strings"
	"time"

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

// skillsList reads a page of skills in the order of worstFirst. A page begins after the skill named after, or at the
// first skill if that skill no longer matches.
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
	if want.State != "" {
		all = slices.DeleteFunc(all, func(h skillHealth) bool { return h.Look() != want.State })
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
