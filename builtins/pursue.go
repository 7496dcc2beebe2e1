package builtins

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

type objectiveProposeArgs struct {
	Name            string   `json:"name"`
	Goal            string   `json:"goal"`
	SuccessCriteria string   `json:"success_criteria"`
	Steps           []string `json:"steps"`
	Priority        float64  `json:"priority"` // 2.0 is an integer to JSON Schema
	ReviewEvery     string   `json:"review_every"`
}

func objectivePropose(ctx context.Context, db postgres.Beginner, who acting, args objectiveProposeArgs) (any, error) {
	d := objectives.Definition{
		Name: args.Name, Goal: args.Goal, SuccessCriteria: args.SuccessCriteria, Steps: args.Steps, Priority: int(args.Priority),
		ReviewEvery: args.ReviewEvery,
	}
	if err := objectives.Validate(d); err != nil {
		return nil, refuse(err.Error())
	}
	o, err := objectives.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, mistake(err, objectives.ErrTaken, objectives.ErrTooMany)
	}
	return map[string]any{"objective": o.Name, "status": o.Status, "note": waitsForAdmin}, nil
}

const waitsForAdmin = "a proposal: nothing is done about it until an administrator accepts it"

type objectiveUpdateArgs struct {
	Objective string   `json:"objective"`
	Note      string   `json:"note"`
	AddSteps  []string `json:"add_steps"`
	Revision  float64  `json:"revision"`
}

// objectiveUpdate writes down how far an objective is, and plans; what is done it cannot say (objective_advance). A
// note replaces the one that the caller has read; where others have changed the objective since, nothing is written,
// and the answer has both. A call that is made again after a crash finds its own note.
func objectiveUpdate(ctx context.Context, db postgres.Beginner, who acting, args objectiveUpdateArgs) (any, error) {
	if args.Note == "" && len(args.AddSteps) == 0 {
		return nil, refuse("say what to change: note or add_steps")
	}
	var said any
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		o, err := objectives.Get(ctx, tx, args.Objective)
		if err != nil {
			return err
		}
		done := map[string]any{"objective": o.Name, "id": o.ID}
		if args.Note != "" {
			there, err := objectives.SetNote(ctx, tx, o.ID, args.Note, who.TraceID, readRevision(args.Revision))
			if errors.Is(err, objectives.ErrConflict) && there.Note != args.Note {
				said = noteConflict(args.Note, there)
				return nil
			}
			if err != nil && !errors.Is(err, objectives.ErrConflict) {
				return err
			}
			done["revision"], done["note"] = there.Revision, there.Note
		}
		done["steps_added"], err = addedSteps(ctx, tx, o.ID, args.AddSteps)
		said = done
		return err
	})
	if err != nil {
		return nil, mistake(err, objectives.ErrNotFound, objectives.ErrNotActive)
	}
	return said, nil
}

// noteConflict is the answer of a note that would have replaced another one that the caller has not read.
func noteConflict(note string, there objectives.Objective) any {
	yours, _ := json.Marshal(note) // a string is JSON
	return conflicted{
		Error: ClassConflict, Yours: yours, Theirs: pursuedOf(there),
		Message: "Nothing was changed: somebody else changed this objective since you read it, or you have not read it. " +
			"Compare its note with yours. Then, if it is still right, make the call again with what both say.",
	}
}

func addedSteps(ctx context.Context, tx pgx.Tx, objectiveID string, titles []string) ([]string, error) {
	added := []string{}
	if len(titles) == 0 {
		return added, nil
	}
	steps, err := objectives.AddSteps(ctx, tx, objectiveID, titles)
	for _, s := range steps {
		added = append(added, s.Title)
	}
	return added, err
}

type objectiveAdvanceArgs struct {
	Objective string `json:"objective"`
	Step      string `json:"step"`
	Result    string `json:"result"`
}

// objectiveAdvance reports a step as done. What shows it is looked up among the calls of this run, never
// believed; and the run holds the objective's lane meanwhile.
func objectiveAdvance(ctx context.Context, db postgres.Beginner, who acting, args objectiveAdvanceArgs) (any, error) {
	o, step, err := findStep(ctx, db, args)
	if err != nil {
		return nil, err
	}
	if _, inside := executions.Current(ctx); inside {
		hold, err := executions.Lane(ctx, "objective:"+o.ID)
		if errors.Is(err, lanes.ErrBusy) {
			return nil, &skills.CallError{Class: skills.ClassBusy, Message: "somebody else works on this objective now; leave it to them: " + err.Error()}
		}
		if err != nil {
			return nil, err
		}
		defer func() { _ = hold.Release(ctx) }() // a release that is lost is covered by the lane's end with the execution
	}
	if step.Status == objectives.Done && step.TraceID == who.TraceID {
		return advanced(ctx, db, o, step) // said before, by this work
	}
	calls, err := objectives.FindEvidence(ctx, db, step.ID, objectives.Where{TraceID: who.TraceID, ExecutionID: who.ExecutionID})
	if err != nil {
		return nil, err
	}
	ok, err := objectives.CompleteStep(ctx, db, step.ID, args.Result, who.TraceID, calls)
	if errors.Is(err, objectives.ErrNoEvidence) {
		return nil, refuse("nothing shows that this step is done: no successful call of yours since it began that has not shown " +
			"another step already. Calls that failed or await approval do not count. Act first, then report")
	}
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, refuse(fmt.Sprintf("step %q is not pending any more", step.Title))
	}
	if _, err := objectives.Advanced(ctx, db, o.ID, who.TraceID); err != nil {
		return nil, err
	}
	return advanced(ctx, db, o, step)
}

func advanced(ctx context.Context, db postgres.DB, o objectives.Objective, step objectives.Step) (any, error) {
	o, err := objectives.Get(ctx, db, o.ID)
	return map[string]any{
		"objective": o.Name, "step": step.Title, "status": "done", "done": o.Done, "total": o.Total, "objective_status": o.Status,
		"objectives": []pursued{pursuedOf(o)}, // as it is now: a note may follow
	}, err
}

// findStep looks a step up by its title, or its id, in an active objective.
func findStep(ctx context.Context, db postgres.DB, args objectiveAdvanceArgs) (objectives.Objective, objectives.Step, error) {
	o, err := objectives.Get(ctx, db, args.Objective)
	if err != nil {
		return o, objectives.Step{}, mistake(err, objectives.ErrNotFound)
	}
	if o.Status != objectives.Active && o.Status != objectives.Completed {
		return o, objectives.Step{}, refuse(fmt.Sprintf("objective %q is %s: only an active one is advanced", o.Name, o.Status))
	}
	steps, err := objectives.Steps(ctx, db, o.ID)
	if err != nil {
		return o, objectives.Step{}, err
	}
	var titles []string
	for _, s := range steps {
		if s.ID == args.Step || s.Title == strings.TrimSpace(args.Step) {
			return o, s, nil
		}
		titles = append(titles, fmt.Sprintf("%q", s.Title))
	}
	return o, objectives.Step{}, refuse(fmt.Sprintf("objective %q has no step %q; its steps are %s", o.Name, clip(args.Step, maxGoal), strings.Join(titles, ", ")))
}

type automationProposeArgs struct {
	Name        string         `json:"name"`
	Description string         `json:"description"`
	Cron        string         `json:"cron"`
	Timezone    string         `json:"timezone"`
	Event       string         `json:"event"`
	When        string         `json:"when"`
	Signal      string         `json:"signal"`
	Skill       string         `json:"skill"`
	Arguments   map[string]any `json:"arguments"`
	Prompt      string         `json:"prompt"`
}

func automationPropose(ctx context.Context, db postgres.Beginner, who acting, args automationProposeArgs) (any, error) {
	d := automations.Definition{
		Name: args.Name, Description: args.Description, Cron: args.Cron, Timezone: args.Timezone, Event: args.Event, When: args.When,
		Signal: args.Signal, Skill: args.Skill, Arguments: args.Arguments, Prompt: args.Prompt,
	}
	if err := automations.Validate(d); err != nil {
		return nil, refuse(err.Error())
	}
	if args.Skill != "" {
		if _, err := skills.Get(ctx, db, args.Skill); err != nil {
			return nil, mistake(err, skills.ErrNotFound)
		}
	}
	a, err := automations.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, mistake(err, automations.ErrTaken, automations.ErrTooMany)
	}
	status := automations.Proposal
	if a.DisabledBy != automations.Proposal {
		status = "decided"
	}
	return map[string]any{"automation": a.Name, "status": status, "note": waitsForAdmin}, nil
}
