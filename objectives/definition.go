package objectives

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	maxText         = 4096 // bytes of a goal or of success criteria
	maxTitle        = 500  // bytes of a name or of a step's title
	maxSteps        = 100
	maxPriority     = 9
	minReview       = time.Minute
	maxReview       = 366 * 24 * time.Hour
	defaultPriority = 2
)

// Definition declares an objective in a workspace file.
type Definition struct {
	Name            string `yaml:"name" json:"name"`
	Goal            string `yaml:"goal" json:"goal"`
	SuccessCriteria string `yaml:"success_criteria" json:"success_criteria,omitempty"` // the test of success
	// the agent that works on it; empty for the default agent
	Agent       string   `yaml:"agent" json:"agent,omitempty"`
	Priority    int      `yaml:"priority" json:"priority,omitempty"`         // 1 (first) to 9; 2 when 0
	ReviewEvery string   `yaml:"review_every" json:"review_every,omitempty"` // 12h, 7d; empty: completed with its steps
	Steps       []string `yaml:"steps" json:"steps,omitempty"`               // titles; empty: the model plans them
}

// Validate returns all problems of d, each as "field path: problem", joined as by [errors.Join].
func Validate(d Definition) error {
	var problems fielderr.List
	if err := checkText("name", d.Name, maxTitle); err != nil {
		problems = append(problems, err)
	}
	if err := checkText("goal", d.Goal, maxText); err != nil {
		problems = append(problems, err)
	}
	if d.SuccessCriteria != "" {
		if err := checkText("success_criteria", d.SuccessCriteria, maxText); err != nil {
			problems = append(problems, err)
		}
	}
	if d.Priority < 0 || d.Priority > maxPriority {
		problems.Add("priority", "must be between 1 and %d", maxPriority)
	}
	if _, err := parseReview(d.ReviewEvery); err != nil {
		problems = append(problems, err)
	}
	return errors.Join(append(problems, checkTitles(d.Steps)...)...)
}

func checkTitles(titles []string) fielderr.List {
	var problems fielderr.List
	if len(titles) > maxSteps {
		problems.Add("steps", "are %d; at most %d are taken", len(titles), maxSteps)
	}
	for i, title := range titles {
		path := fmt.Sprintf("steps[%d]", i)
		if err := checkText(path, title, maxTitle); err != nil {
			problems = append(problems, err)
		}
		if slices.Contains(titles[:i], title) {
			problems.Add(path, "%q is there twice", title)
		}
	}
	return problems
}

func checkText(path, text string, most int) error {
	if strings.TrimSpace(text) == "" || len(text) > most || strings.ContainsRune(text, 0) {
		return fmt.Errorf("%s: must have 1 to %d bytes and no NUL character", path, most)
	}
	return nil
}

// parseReview parses a duration, also in days; 0 for none.
func parseReview(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	var d time.Duration
	var err error
	if days, ok := strings.CutSuffix(text, "d"); ok {
		var n float64
		n, err = strconv.ParseFloat(days, 64)
		d = time.Duration(min(n, 1e5) * float64(24*time.Hour))
		if math.IsNaN(n) {
			d = 0
		}
	} else {
		d, err = time.ParseDuration(text)
	}
	if err != nil {
		return 0, fmt.Errorf("review_every: %q is not a duration: write 30m, 12h or 7d", text)
	}
	if d < minReview || d > maxReview {
		return 0, fmt.Errorf("review_every: %s must be between 1m and 366d", text)
	}
	return d, nil
}

// Put stores the declaration d and reports whether it changed anything. The title identifies a step: new steps are
// appended, and all others stay, also those outside the file. Round and results stay. The status stays, except that a
// proposal, also a rejected one, and an objective that [Remove] paused become active. due_at stays, except that a
// change ends a delay ([BackOff]).
func Put(ctx context.Context, db postgres.Beginner, d Definition, source string) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put objective %q: %w", d.Name, err)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		id, fresh, err := putObjective(ctx, tx, d, source)
		if err != nil {
			return err
		}
		added, err := addSteps(ctx, tx, id, d.Steps)
		changed = fresh || len(added) > 0
		return err
	})
	if err != nil {
		return false, fmt.Errorf("put objective %q: %w", d.Name, err)
	}
	return changed, nil
}

// putObjective writes and locks the row.
func putObjective(ctx context.Context, tx pgx.Tx, d Definition, source string) (id string, changed bool, err error) {
	review, err := parseReview(d.ReviewEvery)
	if err != nil {
		return "", false, err
	}
	d.Priority = cmp.Or(d.Priority, defaultPriority)
	args := pgx.StrictNamedArgs{
		"name": d.Name, "goal": strings.TrimSpace(d.Goal), "criteria": strings.TrimSpace(d.SuccessCriteria),
		"priority": d.Priority,
		"agent":    d.Agent, "review": review.Seconds(), "source": source, "pruned": SourcePruned,
	}
	// A declaration accepts a proposal of its name, also a rejected one.
	err = tx.QueryRow(ctx, `
		insert into agent_objectives as o (name, goal, success_criteria, agent, priority, review_every, source)
		values (@name, @goal, @criteria, @agent, @priority, make_interval(secs => nullif(@review::float8, 0)), @source)
		on conflict (name) do update
		   set goal = excluded.goal, success_criteria = excluded.success_criteria, agent = excluded.agent,
		       priority = excluded.priority, review_every = excluded.review_every, source = excluded.source,
		       updated_at = clock_timestamp(),
		       status = case when o.status in ('proposed', 'rejected') or o.status = 'paused' and o.source = @pruned
		                     then 'active' else o.status end,
		       decided_by = case when o.status in ('proposed', 'rejected') then @source else o.decided_by end,
		       decided_reason = case when o.status in ('proposed', 'rejected') then '' else o.decided_reason end,
		       decided_at = case when o.status in ('proposed', 'rejected') then clock_timestamp() else o.decided_at end
		 where (o.goal, o.success_criteria, o.agent, o.priority, o.review_every, o.source)
		       is distinct from (excluded.goal, excluded.success_criteria, excluded.agent, excluded.priority,
		                         excluded.review_every, excluded.source)
		returning id`, args).Scan(&id)
	if !errors.Is(err, pgx.ErrNoRows) {
		return id, true, err
	}
	err = tx.QueryRow(ctx, `select id from agent_objectives where name = @name for update`,
		pgx.StrictNamedArgs{"name": d.Name}).Scan(&id)
	return id, false, err
}

// Remove retires the workspace's objectives except keep. It deletes objectives that were never advanced, and pauses the
// other active objectives, because they hold results. [Put] continues such an objective, unless its status changed
// meanwhile. Remove returns the names of both.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.Values[string](ctx, db, "remove objectives of the workspace", `
		with gone as (
		  select o.id, o.round = 1 and not exists (
		           select from agent_objective_steps s where s.objective_id = o.id
		             and (s.status <> 'pending' or s.attempts > 0)
		         ) as untouched
		    from agent_objectives o
		   where o.source = @source and o.name <> all(@keep::text[])
		     for update),
		deleted as (
		  delete from agent_objectives o using gone where o.id = gone.id and gone.untouched returning o.name),
		paused as (
		  update agent_objectives o set status = 'paused', source = @pruned, updated_at = clock_timestamp()
		    from gone where o.id = gone.id and not gone.untouched and o.status = 'active' returning o.name)
		select name from deleted union all select name from paused order by name`,
		pgx.StrictNamedArgs{
			"source": SourceWorkspace, "pruned": SourcePruned, "keep": append([]string{}, keep...),
		})
}
