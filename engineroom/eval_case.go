package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// evalCasePage shows two trials of a case side by side, and takes labels.
func (room *Room) evalCasePage() page {
	return page{
		path: "/evals/runs/{id}/cases/{case}", name: "evalcase", open: room.openEvalCase,
		parts: []part{
			{name: "trials", every: 2 * time.Second, load: room.caseTrials},
			{name: "sides", every: 2 * time.Second, load: room.caseSides},
			{name: "judges", every: 5 * time.Second, load: room.caseJudges},
			{name: "label", every: 2 * time.Second, load: room.caseLabel},
			{name: "case", load: room.caseDefinition},
		},
	}
}

// evalCaseAbout is the subject of the page.
type evalCaseAbout struct {
	evalRunAbout
	Case    string
	Subject evals.Subject
	Defined *evals.Case   // nil when the run's suite lacks the case
	Steps   []caseStep    // the trials of the run; trials of this case are adjacent
	Trials  []evals.Trial // of this case
	Trial   int
	Other   int // trial of Against, or of the run itself; 0 for none
}

// caseStep is a trial of a run, in the order of the keys j and k.
type caseStep struct {
	Case  string
	Trial int
}

func (room *Room) openEvalCase(ctx context.Context, v *visit) (string, error) {
	about := evalCaseAbout{Case: v.path("case")}
	var err error
	if about.evalRunAbout, err = room.readEvalRun(ctx, v); err != nil {
		return "", err
	}
	all, err := evals.BriefTrials(ctx, room.Read, about.Run.ID, "")
	if err != nil {
		return "", err
	}
	about.setTrials(all)
	if len(about.Trials) == 0 {
		return "", missing("the run has no case %.100q", about.Case)
	}
	if err := about.choose(v); err != nil {
		return "", err
	}
	about.Subject, err = evals.SubjectOf(ctx, room.Read, about.Run)
	if err != nil && !errors.Is(err, evals.ErrNotFound) {
		return "", err
	}
	if c, has := about.Subject.Suite.Definition.Case(about.Case); has {
		about.Defined = &c
	}
	v.About = about
	return "Case " + cut(80, about.Case), nil
}

// setTrials stores the trials of the case, and the order of all trials.
func (a *evalCaseAbout) setTrials(all []evals.Trial) {
	var names []string
	byCase := map[string][]caseStep{}
	for _, t := range all {
		if byCase[t.Case] == nil {
			names = append(names, t.Case)
		}
		byCase[t.Case] = append(byCase[t.Case], caseStep{t.Case, t.Trial})
		if t.Case == a.Case {
			a.Trials = append(a.Trials, t)
		}
	}
	for _, name := range names {
		a.Steps = append(a.Steps, byCase[name]...)
	}
}

// choose selects the shown trials. The default is the first failed trial beside the first trial with another verdict.
func (a *evalCaseAbout) choose(v *visit) error {
	number := func(name string) (int, error) {
		text := v.Query.Get(name)
		if text == "" {
			return 0, nil
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 1000 {
			return 0, problem.BadParameter("%s is %.60q; it is the number of a trial", name, text)
		}
		return n, nil
	}
	var err error
	if a.Trial, err = number("trial"); err != nil {
		return err
	}
	if a.Other, err = number("other"); err != nil {
		return err
	}
	if a.Trial == 0 {
		a.Trial = a.Trials[max(0, slices.IndexFunc(a.Trials, failed))].Trial
	}
	i := slices.IndexFunc(a.Trials, func(t evals.Trial) bool { return t.Trial == a.Trial })
	if i < 0 {
		return missing("the case has no trial %d in this run", a.Trial)
	}
	if a.Other == 0 && a.Against != nil {
		a.Other = 1
	}
	if a.Other == 0 && a.Trials[i].Verdict != "" {
		other := slices.IndexFunc(a.Trials, func(t evals.Trial) bool {
			return t.Verdict != "" && t.Verdict != a.Trials[i].Verdict
		})
		if other >= 0 {
			a.Other = a.Trials[other].Trial
		}
	}
	return nil
}

func failed(t evals.Trial) bool { return t.Verdict != "" && t.Verdict != evals.Pass }

// step returns the address of the trial by steps further; empty past the ends.
func (a *evalCaseAbout) step(by int) string {
	i := slices.Index(a.Steps, caseStep{a.Case, a.Trial}) + by
	if i < 0 || i >= len(a.Steps) {
		return ""
	}
	return casePath(a.Run.ID, a.Steps[i].Case, a.Steps[i].Trial, a.Against)
}

func (room *Room) caseTrials(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(evalCaseAbout)
	rows, _, err := room.trialRows(ctx, about.evalRunAbout, about.Case)
	return map[string]any{
		"About": about, "Trials": rows, "Previous": about.step(-1), "Next": about.step(1),
	}, err
}

// side is one of two trials.
type side struct {
	evals.Trial
	Run    evals.Run
	steps  []evals.Call
	Answer shownValue
}

// versusRow is a call of both trials, or the answer. Differs marks the first difference.
type versusRow struct {
	Word        string
	Left, Right versusCell
	Differs     bool
	What        string     // differs
	Lines       []diffLine // of arguments or answers
}

// versusCell is a call; no call without a skill.
type versusCell struct {
	Skill, State string
	Args         string
	Answer       bool
}

// versus is two trials side by side, or a single trial.
type versus struct {
	Prompt      string
	Left        *side
	Right       *side // nil for none
	Rows        []versusRow
	Same        bool // no difference
	Undecidable bool // one trial has no verdict yet
}

func (room *Room) caseSides(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(evalCaseAbout)
	shown := versus{}
	if c := about.Defined; c != nil && len(c.Messages) > 0 {
		shown.Prompt = redact.Text(c.Messages[len(c.Messages)-1].User, maxPre)
	}
	left, err := room.side(ctx, about.Run, about.Case, about.Trial)
	if err != nil {
		return nil, err
	}
	shown.Left = &left
	if about.Other > 0 {
		run := about.Run
		if about.Against != nil {
			run = *about.Against
		}
		right, err := room.side(ctx, run, about.Case, about.Other)
		switch {
		case errors.Is(err, evals.ErrNotFound): // the compared run lacks the case or the trial
		case err != nil:
			return nil, err
		default:
			shown.Right = &right
		}
	}
	shown.compare()
	return shown, nil
}

func (room *Room) side(ctx context.Context, run evals.Run, of string, trial int) (side, error) {
	t, err := evals.GetTrial(ctx, room.Read, run.ID, of, trial)
	s := side{Trial: t, Run: run, Answer: shownText(t.Answer, int64(len(t.Answer)))}
	if json.Unmarshal(t.Calls, &s.steps) != nil {
		s.steps = nil
	}
	return s, err
}

// maxVersus bounds the compared calls.
const maxVersus = 100

// compare makes the rows, and marks the first difference: a call, its arguments, or the answer.
func (s *versus) compare() {
	calls := len(s.Left.steps)
	if s.Right != nil {
		calls = max(calls, len(s.Right.steps))
		s.Undecidable = s.Left.Verdict == "" || s.Right.Verdict == ""
	}
	marked := s.Right == nil || s.Undecidable
	for i := range min(calls, maxVersus) {
		row := versusRow{Word: fmt.Sprintf("call %d", i+1), Left: s.Left.cell(i)}
		if s.Right != nil {
			row.Right = s.Right.cell(i)
		}
		if !marked && row.Left != row.Right {
			marked = true
			row.mark()
		}
		s.Rows = append(s.Rows, row)
	}
	answer := versusRow{Word: "answer", Left: versusCell{Answer: true}, Right: versusCell{Answer: s.Right != nil}}
	if !marked && s.Left.Trial.Answer != s.Right.Trial.Answer {
		marked, answer.Differs, answer.What = true, true, "the answer"
		answer.Lines, _ = compare(s.Left.Answer.Text, s.Right.Answer.Text)
	}
	s.Rows = append(s.Rows, answer)
	s.Same = !marked
}

// mark marks the differences.
func (r *versusRow) mark() {
	r.Differs = true
	switch l, o := r.Left, r.Right; {
	case l.Skill == "" || o.Skill == "":
		r.What = "only one calls"
	case l.Skill != o.Skill:
		r.What = "another skill"
	case l.Args != o.Args:
		r.What = "the arguments"
		r.Lines, _ = compare(l.Args, o.Args)
	default:
		r.What = "how the call ended"
	}
}

// cell returns a call of a trial; empty past the last call.
func (s *side) cell(i int) versusCell {
	if i >= len(s.steps) {
		return versusCell{}
	}
	c := s.steps[i]
	cell := versusCell{Skill: c.Skill, State: c.Approval, Args: shownJSON(string(c.Args), int64(len(c.Args))).Text}
	if c.Refused {
		cell.State = "refused"
	}
	return cell
}

// shownJudgement is a judge's verdict about a trial, with the judge's current agreement with people.
type shownJudgement struct {
	evals.Judgement
	Rubric      string
	Calibration *evals.Calibration // nil when the suite lacks the judge
}

// Verdict is the judge's verdict as a state.
func (j shownJudgement) Verdict() string {
	switch {
	case !j.Decided:
		return "undecided"
	case j.Pass:
		return "pass"
	}
	return "fail"
}

// caseJudges reads the judges' verdicts about the trial, and how far each judge agrees with people.
func (room *Room) caseJudges(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(evalCaseAbout)
	trial, err := evals.GetTrial(ctx, room.Read, about.Run.ID, about.Case, about.Trial)
	if err != nil {
		return nil, err
	}
	list := make([]shownJudgement, len(trial.Judgements))
	for i, j := range trial.Judgements {
		list[i] = shownJudgement{Judgement: j}
		if about.Defined == nil {
			continue
		}
		rule, has := about.Defined.Judges()[j.Expect]
		if !has {
			continue
		}
		c, _, err := evals.CalibrationOf(ctx, room.Read, about.Subject, rule)
		if err != nil {
			return nil, err
		}
		list[i].Rubric, list[i].Calibration = rule.Rubric, &c
	}
	return map[string]any{"Judges": list, "Trial": about.Trial}, nil
}

// caseLabel reads the labels of the trial, for the form.
func (room *Room) caseLabel(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(evalCaseAbout)
	trial, err := evals.GetTrial(ctx, room.Read, about.Run.ID, about.Case, about.Trial)
	if err != nil {
		return nil, err
	}
	labels, err := evals.Labels(ctx, room.Read, "", about.Run.ID, about.Case, maxTrialRows)
	return map[string]any{
		"Run": about.Run, "Trial": trial, "Labels": labelsOf(labels, trial), "Here": v.URL,
		"Reached": trial.Verdict != "",
	}, err
}

func (room *Room) caseDefinition(_ context.Context, v *visit) (any, error) {
	about, _ := v.About.(evalCaseAbout)
	if about.Defined == nil {
		return shownValue{}, nil
	}
	text, err := about.Defined.YAML()
	return shownText(text, int64(len(text))), err
}

// caseFromPage makes a case from a trace.
func (room *Room) caseFromPage() page {
	return page{
		path: "/evals/from/{id}", name: "casefrom", open: room.openCaseFrom,
		parts: []part{{name: "case", load: room.caseFrom}},
	}
}

// newCase is a case made from a trace, as a file of the workspace has it.
type newCase struct {
	Trace, Suite string
	Suites       []string
	Text         string // text of the case, or of a whole suite without Suite
	Why          string // the reason why there is no case
}

func (room *Room) openCaseFrom(ctx context.Context, v *visit) (string, error) {
	made, err := room.readCase(ctx, v.path("id"), v.Query.Get("suite"))
	v.About = made
	return "A case from a trace", err
}

// readCase makes the case. An unknown suite counts as no suite.
func (room *Room) readCase(ctx context.Context, id, suite string) (newCase, error) {
	made := newCase{Trace: id}
	story := activity.Trace{TraceID: id}
	rows, err := room.Read.Query(ctx, `
		select a.kind, a.skill_name, a.status, a.input, a.output, a.error_message, a.error_class, a.created_at
		  from agent_activity a where a.trace_id = @trace and a.kind in ('model', 'call')
		 order by a.created_at, a.id limit @most`, freshPlan, postgres.Strict{"trace": id, "most": maxCaseCalls})
	story.Activities, err = postgres.Collect(rows, err, "read trace "+id, pgx.RowToStructByNameLax[activity.Row])
	if err != nil {
		return made, err
	}
	if len(story.Activities) == 0 {
		return made, missing("there is no trace %.60q with model calls", id)
	}
	list, err := evals.List(ctx, room.Read)
	if err != nil {
		return made, err
	}
	for _, s := range list[:min(len(list), maxSuites)] {
		made.Suites = append(made.Suites, s.Name)
	}
	if slices.Contains(made.Suites, suite) {
		made.Suite = suite
	}
	c, err := evals.FromTrace(story, "")
	if errors.Is(err, evals.ErrNoCase) {
		made.Why = err.Error()
		return made, nil
	}
	if err != nil {
		return made, err
	}
	if made.Text, err = c.YAML(); made.Suite == "" {
		made.Text = "kind: eval\nname: " + newSuiteName + "\ncases:\n" + made.Text
	}
	return made, err
}

// maxCaseCalls bounds the calls of a case.
const maxCaseCalls = 500

// newSuiteName is the name of a new suite.
const newSuiteName = "from-traces"

func (room *Room) caseFrom(_ context.Context, v *visit) (any, error) { return v.About, nil }

// Command adds the case in a terminal.
func (c newCase) Command() string { return "agent eval add " + c.Trace + " --to FILE" }

// Download is the address of the text as a file.
func (c newCase) Download() string {
	path := "/evals/from/" + url.PathEscape(c.Trace) + "/case.yaml"
	if c.Suite != "" {
		path += "?suite=" + url.QueryEscape(c.Suite)
	}
	return path
}

// downloadCase serves a case made from a trace as a file.
func (room *Room) downloadCase(w http.ResponseWriter, r *http.Request) {
	made, err := room.readCase(r.Context(), r.PathValue("id"), r.URL.Query().Get("suite"))
	if err == nil && made.Why != "" {
		err = problem.New(http.StatusNotFound, "%s", made.Why)
	}
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	h := w.Header()
	guard(h)
	h.Set("Content-Type", "application/yaml; charset=utf-8")
	h.Set("Content-Disposition", `attachment; filename="case.yaml"`)
	h.Set("Cache-Control", "no-store")
	if _, err := strings.NewReader(made.Text).WriteTo(w); err != nil {
		room.Logger.DebugContext(r.Context(), "case not sent", "error", err)
	}
}
