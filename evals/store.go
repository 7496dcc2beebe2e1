package evals

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNotFound reports an unknown suite or run.
var ErrNotFound = errors.New("no such eval")

// Suite is one version of a suite.
type Suite struct {
	Name       string     `json:"name"`
	Version    int        `json:"version"`
	Definition Definition `json:"definition"`
	Source     string     `json:"source"`
	CreatedAt  time.Time  `json:"created_at"`
}

// Put makes d the current version of d.Name and reports whether anything changed. Runs keep their version. The caller
// serializes calls for one name, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	verb := fmt.Sprintf("put eval %q", d.Name)
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.PutVersion(ctx, db, verb, "agent_evals", d.Name, d, nil)
}

// Remove retires the workspace's suites except keep, and returns their names. Their versions stay, for their runs.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.RetireOthers(ctx, db, "evals", "agent_evals", keep)
}

// Get reads the current version of a suite, or returns [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Suite, error) {
	return postgres.RowOr[Suite](ctx, db, ErrNotFound, fmt.Sprintf("read eval %.100q", name), `
		select name, version, definition, source, created_at from agent_evals where name = @name and current`,
		postgres.Strict{"name": name})
}

// Version reads one version of a suite, or returns [ErrNotFound].
func Version(ctx context.Context, db postgres.DB, name string, version int) (Suite, error) {
	return postgres.RowOr[Suite](ctx, db, ErrNotFound, fmt.Sprintf("read version %d of eval %.100q", version, name), `
		select name, version, definition - 'sample' as definition, source, created_at from agent_evals
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": version})
}

// List returns the current suites by name.
func List(ctx context.Context, db postgres.DB) ([]Suite, error) {
	return postgres.Rows[Suite](ctx, db, "list evals", `
		select name, version, definition, source, created_at from agent_evals where current order by name`)
}

// Listed is a suite in a list, with its newest run.
type Listed struct {
	Name    string `json:"name"`
	Version int    `json:"version"`
	Agent   string `json:"agent"`
	Cases   int    `json:"cases"`
	Trials  int    `json:"trials"`
	Last    *Run   `json:"last_run"`
}

// ListWithRuns returns the current suites by name.
func ListWithRuns(ctx context.Context, db postgres.DB) ([]Listed, error) {
	suites, err := List(ctx, db)
	if err != nil {
		return nil, err
	}
	list, names := make([]Listed, len(suites)), make([]string, len(suites))
	for i, s := range suites {
		d := s.Definition
		names[i] = s.Name
		list[i] = Listed{
			Name: s.Name, Version: s.Version, Agent: d.Agent, Cases: len(d.Cases), Trials: d.TrialCount(),
		}
	}
	runs, err := RunsOfSuites(ctx, db, names, 1)
	if err != nil {
		return nil, err
	}
	for i := range runs {
		list[slices.Index(names, runs[i].Suite)].Last = &runs[i]
	}
	return list, nil
}

// Statuses of a run.
const (
	Running   = "running"
	Passed    = "passed"
	Failed    = "failed"
	Undecided = "undecided"
	// Interrupted is a running run whose process has ended. agent eval run --resume continues it.
	Interrupted = "interrupted"
)

// Kinds of a run.
const (
	OfSuite          = "suite"
	OfCounterfactual = "counterfactual" // of recorded turns
	OfShadow         = "shadow"         // of turns as they complete
)

// RecordedModel is the model of a control run: each case has the model of its recorded turn.
const RecordedModel = "recorded"

// Run is a run of a suite. ControlID is the run of the same cases that it is compared with; empty for none.
type Run struct {
	ID           string     `json:"id"`
	Kind         string     `json:"kind"`
	ControlID    string     `json:"control_id,omitempty"`
	Suite        string     `json:"suite"`
	Version      int        `json:"version"`
	Agent        string     `json:"agent"`
	AgentVersion int        `json:"agent_version"`
	Model        string     `json:"model"`
	Trials       int        `json:"trials"`
	Status       string     `json:"status"`
	CreatedAt    time.Time  `json:"created_at"`
	FinishedAt   *time.Time `json:"finished_at"`
	Candidate    bool       `json:"candidate,omitempty"`  // of a workspace that was not applied
	Background   bool       `json:"background,omitempty"` // servers play the run
}

// runColumns computes the status interrupted for a running run that was not left to servers and that no process has
// played for 30 seconds. Shadows are excluded, because their control often has no turn to play.
const runColumns = `id::text, kind, coalesce(control_id::text, ''), suite, version, agent, agent_version, model, trials,
	case when status = 'running' and served_until is null and kind <> 'shadow'
	      and greatest(began_at, created_at) < clock_timestamp() - interval '30 seconds' and not exists (
	        select from agent_eval_trials t
	         where t.run_id in (id, control_id) and t.finished_at > clock_timestamp() - interval '30 seconds')
	      and not exists (
	        select from (select e.input ->> 'run' as run from agent_executions e
	                       join agent_workers w on w.id = e.claimed_by and w.expires_at > clock_timestamp()
	                      where e.claimed_by is not null and e.surface = 'eval') p
	         where p.run in (id::text, control_id::text))
	     then 'interrupted' else status end,
	created_at, finished_at, candidate, served_until is not null`

// GetRun reads a run, or returns [ErrNotFound].
func GetRun(ctx context.Context, db postgres.DB, id string) (Run, error) {
	rows, err := db.Query(ctx, `select `+runColumns+` from agent_eval_runs where id = @id`, postgres.Strict{"id": id})
	return postgres.CollectOne(rows, err, ErrNotFound, "read run "+id+" of an eval", pgx.RowToStructByPos[Run])
}

// Runs lists the newest runs. A suite that is not empty narrows the list.
func Runs(ctx context.Context, db postgres.DB, suite string, limit int) ([]Run, error) {
	return RunsBefore(ctx, db, suite, "", limit)
}

// RunsBefore lists the newest runs that are older than the run before. A suite that is not empty narrows the list.
func RunsBefore(ctx context.Context, db postgres.DB, suite, before string, limit int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select `+runColumns+` from agent_eval_runs
		 where (@suite = '' or suite = @suite) and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`, postgres.Strict{"suite": suite, "before": before, "limit": limit})
	return postgres.Collect(rows, err, "list runs of evals", pgx.RowToStructByPos[Run])
}

// Baseline returns the newest finished run of the same suite before a run, or [ErrNotFound].
func Baseline(ctx context.Context, db postgres.DB, r Run) (Run, error) {
	rows, err := db.Query(ctx, `
		select `+runColumns+` from agent_eval_runs
		 where suite = @suite and id < @id::uuid and status <> 'running' order by id desc limit 1`,
		postgres.Strict{"suite": r.Suite, "id": r.ID})
	return postgres.CollectOne(rows, err, ErrNotFound, "find an earlier run of "+r.Suite, pgx.RowToStructByPos[Run])
}

// Verdict is the result of a trial.
type Verdict string

// The verdicts.
const (
	Pass           Verdict = "pass"
	Fail           Verdict = "fail"
	Diverged       Verdict = "diverged"  // a call had no stub
	Error          Verdict = "error"     // the trial ended without an answer
	UndecidedTrial Verdict = "undecided" // nothing decided it, such as after the budget was used up
)

// Trial is one trial of a case. Verdict is empty until it is decided.
type Trial struct {
	Case       string          `json:"case"`
	Trial      int             `json:"trial"`
	TraceID    string          `json:"trace_id"`
	Verdict    Verdict         `json:"verdict"`
	Reasons    []string        `json:"reasons"`
	Answer     string          `json:"answer"`
	Calls      json.RawMessage `json:"calls"`
	Iterations int             `json:"iterations"`
	Tokens     int64           `json:"tokens"`
	CostUSD    float64         `json:"cost_usd"`
	DurationMS int64           `json:"duration_ms"`

	Judgements  []Judgement `json:"judgements"`
	JudgeTokens int64       `json:"judge_tokens"` // besides Tokens
	JudgeUSD    float64     `json:"judge_usd"`    // besides CostUSD
}

const (
	trialColumns = `case_name, trial, trace_id, coalesce(verdict, ''), reasons, answer, calls, iterations, tokens,
	cost_usd::float8, duration_ms, judgements, judge_tokens, judge_usd::float8`
	briefColumns = `case_name, trial, trace_id, coalesce(verdict, ''), reasons, '', '[]'::jsonb, iterations, tokens,
	cost_usd::float8, duration_ms, '[]'::jsonb, judge_tokens, judge_usd::float8`
)

// Trials lists the trials of a run by number, and trials of one number in the order of the suite.
func Trials(ctx context.Context, db postgres.DB, run string) ([]Trial, error) {
	rows, err := db.Query(ctx, `
		select `+trialColumns+` from agent_eval_trials where run_id = @run order by trial, position`,
		postgres.Strict{"run": run})
	return postgres.Collect(rows, err, "list trials of run "+run, pgx.RowToStructByPos[Trial])
}

// BriefTrials is [Trials] without answers, calls and judgements. A caseName that is not empty narrows the list.
func BriefTrials(ctx context.Context, db postgres.DB, run, caseName string) ([]Trial, error) {
	rows, err := db.Query(ctx, `
		select `+briefColumns+` from agent_eval_trials
		 where run_id = @run and (@case = '' or case_name = @case) order by trial, position`,
		postgres.Strict{"run": run, "case": caseName})
	return postgres.Collect(rows, err, "list trials of run "+run, pgx.RowToStructByPos[Trial])
}

// GetTrial reads one trial of a run, or returns [ErrNotFound].
func GetTrial(ctx context.Context, db postgres.DB, run, caseName string, number int) (Trial, error) {
	rows, err := db.Query(ctx, `
		select `+trialColumns+` from agent_eval_trials where run_id = @run and case_name = @case and trial = @trial`,
		postgres.Strict{"run": run, "case": caseName, "trial": number})
	return postgres.CollectOne(rows, err, ErrNotFound, "read a trial of run "+run, pgx.RowToStructByPos[Trial])
}

// RecordedRuns lists the newest runs of recorded turns.
func RecordedRuns(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select `+runColumns+` from agent_eval_runs
		 where kind <> 'suite' and control_id is not null order by id desc limit @limit`, postgres.Strict{"limit": limit})
	return postgres.Collect(rows, err, "list runs of recorded turns", pgx.RowToStructByPos[Run])
}

// RunsOfSuites lists the newest runs of each suite, at most perSuite of each.
func RunsOfSuites(ctx context.Context, db postgres.DB, suites []string, perSuite int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select `+runColumns+` from unnest(@suites::text[]) s (name) cross join lateral (
		  select * from agent_eval_runs r where r.suite = s.name order by r.id desc limit @per_suite) r
		 order by suite, id desc`, postgres.Strict{"suites": suites, "per_suite": perSuite})
	return postgres.Collect(rows, err, "list runs of suites", pgx.RowToStructByPos[Run])
}

// Outcomes is [Summaries] with the comparison of runs of recorded turns with their controls, for [Report.State].
func Outcomes(ctx context.Context, db postgres.DB, runs []Run) ([]Report, error) {
	both := slices.Clone(runs)
	for _, r := range runs {
		if r.recorded() {
			both = append(both, Run{ID: r.ControlID})
		}
	}
	reports, err := Summaries(ctx, db, both)
	if err != nil || len(both) == len(runs) {
		return reports, err
	}
	control := len(runs)
	for i, r := range runs {
		if !r.recorded() {
			continue
		}
		suite, err := Version(ctx, db, r.Suite, r.Version)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
		reports[i].CompareControl(reports[control], suite.Definition.Margin())
		control++
	}
	return reports[:len(runs)], nil
}

// Control reports whether the run is the control of another run of recorded turns.
func (r Run) Control() bool { return r.Kind != OfSuite && r.ControlID == "" }

// recorded reports whether a run plays recorded turns and has a control. Its result is the comparison with the control.
func (r Run) recorded() bool { return r.Kind != OfSuite && r.ControlID != "" }

// Summaries returns a report of each run with its cases, but without trials and control. The order is that of runs.
func Summaries(ctx context.Context, db postgres.DB, runs []Run) ([]Report, error) {
	ids := make([]string, len(runs))
	for i, r := range runs {
		ids[i] = r.ID
	}
	rows, err := db.Query(ctx, `
		select run_id::text, case_name,
		       count(*) filter (where verdict = 'pass'),
		       count(*) filter (where verdict <> 'undecided'),
		       count(*) filter (where verdict is null or verdict = 'undecided'),
		       sum(cost_usd)::float8, sum(tokens)::bigint
		  from agent_eval_trials
		 where run_id = any (@ids::uuid[])
		 group by run_id, case_name
		 order by run_id, min(position), case_name`, postgres.Strict{"ids": ids})
	type row struct {
		Run, Case                 string
		Passed, Trials, Undecided int
		CostUSD                   float64
		Tokens                    int64
	}
	list, err := postgres.Collect(rows, err, "summarize runs", pgx.RowToStructByPos[row])
	reports := make([]Report, len(runs))
	for i, run := range runs {
		reports[i].Run = run
		for _, r := range list {
			if r.Run != run.ID {
				continue
			}
			c := CaseResult{
				Case: r.Case, Passed: r.Passed, Trials: r.Trials, Undecided: r.Undecided, CostUSD: r.CostUSD, Tokens: r.Tokens,
			}
			c.estimate()
			reports[i].Cases = append(reports[i].Cases, c)
			reports[i].CostUSD += r.CostUSD
			reports[i].Tokens += r.Tokens
		}
	}
	return reports, err
}
