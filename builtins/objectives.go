package builtins

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

type objectivesArgs struct {
	Status    string `json:"status"`
	Objective string `json:"objective"`
}

// objectiveView is the agent's view of an objective.
type objectiveView struct {
	ID       string    `json:"id"`
	Name     string    `json:"name"`
	Status   string    `json:"status"`
	Done     int       `json:"done"`
	Failed   int       `json:"failed"`
	Pending  int       `json:"pending"`
	Round    int       `json:"round"`
	Priority int       `json:"priority"`
	DueAt    time.Time `json:"due_at"`
	Goal     string    `json:"goal"`
	Note     string    `json:"note,omitempty"`
	// NoteCut reports that the note is longer. A query with the objective's name returns all of it.
	NoteCut  bool       `json:"note_cut,omitempty"`
	Revision int        `json:"revision"`
	TraceID  string     `json:"last_trace_id"`
	Steps    []stepView `json:"steps,omitempty"` // only for a query with the objective's name
}

// stepView is the agent's view of a step.
type stepView struct {
	Title  string `json:"title"`
	Status string `json:"status"`
	Result string `json:"result,omitempty"`
}

func objectivesList(ctx context.Context, db postgres.DB, args objectivesArgs) (any, error) {
	if args.Objective != "" {
		return oneObjective(ctx, db, args.Objective)
	}
	all, err := objectives.List(ctx, db, objectives.Filter{Status: args.Status, Limit: 100})
	if err != nil {
		return nil, err
	}
	list := make([]objectiveView, len(all))
	for i, o := range all {
		list[i] = objectiveViewOf(o)
		list[i].NoteCut = len(o.Note) > maxGoal
		list[i].Note = textcut.Text(o.Note, maxGoal)
	}
	return map[string]any{"objectives": list}, nil
}

const maxGoal = 400

func objectiveViewOf(o objectives.Objective) objectiveView {
	return objectiveView{
		ID: o.ID, Name: o.Name, Status: o.Status, Done: o.Done, Failed: o.Failed, Pending: o.Pending, Round: o.Round,
		Priority: o.Priority, DueAt: o.DueAt, Goal: textcut.Text(o.Goal, maxGoal), Note: o.Note, Revision: o.Revision,
		TraceID: o.LastTraceID,
	}
}

// oneObjective returns one objective with its steps.
func oneObjective(ctx context.Context, db postgres.DB, name string) (any, error) {
	o, err := objectives.Get(ctx, db, name)
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNotFound)
	}
	steps, err := objectives.Steps(ctx, db, o.ID)
	if err != nil {
		return nil, err
	}
	one := objectiveViewOf(o)
	for _, s := range steps {
		one.Steps = append(one.Steps, stepView{s.Title, s.Status, textcut.Text(s.Result, maxGoal)})
	}
	return map[string]any{"objectives": []objectiveView{one}}, nil
}

type objectiveProposeArgs struct {
	Name            string   `json:"name"`
	Goal            string   `json:"goal"`
	SuccessCriteria string   `json:"success_criteria"`
	Steps           []string `json:"steps"`
	Priority        float64  `json:"priority"` // 2.0 is an integer in JSON Schema
	ReviewEvery     string   `json:"review_every"`
}

func objectivePropose(ctx context.Context, db postgres.Beginner, who acting, args objectiveProposeArgs) (any, error) {
	d := objectives.Definition{
		Name: args.Name, Goal: args.Goal, SuccessCriteria: args.SuccessCriteria, Steps: args.Steps,
		Priority: int(args.Priority), ReviewEvery: args.ReviewEvery,
	}
	if err := objectives.Validate(d); err != nil {
		return nil, invalid(err.Error())
	}
	o, err := objectives.Propose(ctx, db, d, who.Agent, who.TraceID)
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNameTaken, objectives.ErrTooMany)
	}
	return map[string]any{"objective": o.Name, "status": o.Status, "note": waitsForAdmin}, nil
}

const waitsForAdmin = "a proposal: nothing is done about it until an administrator accepts it"

// ownedObjective refuses a change of an objective that names another agent, except by the default agent.
func ownedObjective[A interface{ objective() string }](
	directory *agents.Directory, change func(ctx context.Context, db postgres.Beginner, who acting, args A) (any, error),
) func(ctx context.Context, db postgres.Beginner, who acting, args A) (any, error) {
	return func(ctx context.Context, db postgres.Beginner, who acting, args A) (any, error) {
		o, err := objectives.Get(ctx, db, args.objective())
		if err != nil {
			return nil, invalidIf(err, objectives.ErrNotFound)
		}
		all, err := directory.List(ctx, db)
		if err != nil {
			return nil, err
		}
		owner, caller := agents.Acting(all, o.Agent), agents.Acting(all, who.Agent)
		if o.Agent != "" && owner.Name != caller.Name && !caller.Default {
			return nil, invalid(fmt.Sprintf("objective %q belongs to agent %s; only that agent and the default agent change it",
				o.Name, owner.Name))
		}
		return change(ctx, db, who, args)
	}
}

func (a objectiveUpdateArgs) objective() string  { return a.Objective }
func (a objectiveAdvanceArgs) objective() string { return a.Objective }

type objectiveUpdateArgs struct {
	Objective string   `json:"objective"`
	Note      string   `json:"note"`
	AddSteps  []string `json:"add_steps"`
	Revision  float64  `json:"revision"`
}

// objectiveUpdate stores an objective's note and plans steps; objective_advance completes them. A note replaces the
// one that the caller has read. After a concurrent change nothing is written, and the answer has both notes. A
// repeated call after a crash finds its own note.
func objectiveUpdate(ctx context.Context, db postgres.Beginner, who acting, args objectiveUpdateArgs) (any, error) {
	if args.Note == "" && len(args.AddSteps) == 0 {
		return nil, invalid("say what to change: note or add_steps")
	}
	var value any
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		o, err := objectives.Get(ctx, tx, args.Objective)
		if err != nil {
			return err
		}
		done := map[string]any{"objective": o.Name, "id": o.ID}
		if args.Note != "" {
			there, err := objectives.SetNote(ctx, tx, o.ID, args.Note, who.TraceID, noteRevision(args.Revision))
			if errors.Is(err, objectives.ErrConflict) && there.Note != args.Note {
				value = noteConflict(args.Note, there)
				return nil
			}
			if err != nil && !errors.Is(err, objectives.ErrConflict) {
				return err
			}
			done["revision"], done["note"] = there.Revision, there.Note
		}
		done["steps_added"], err = addedSteps(ctx, tx, o.ID, args.AddSteps)
		value = done
		return err
	})
	if err != nil {
		return nil, invalidIf(err, objectives.ErrNotFound, objectives.ErrNotActive, objectives.ErrInvalid)
	}
	return value, nil
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

// objectiveAdvance reports a step as done. It looks up the evidence among the calls of this run, and holds the
// objective's lane meanwhile.
func objectiveAdvance(ctx context.Context, db postgres.Beginner, who acting, args objectiveAdvanceArgs) (any, error) {
	o, step, err := findStep(ctx, db, args)
	if err != nil {
		return nil, err
	}
	if _, inside := executions.Current(ctx); inside {
		hold, err := executions.Lane(ctx, "objective:"+o.ID)
		if errors.Is(err, lanes.ErrBusy) {
			return nil, &skills.CallError{
				Class: skills.ClassBusy, Message: "somebody else works on this objective now; leave it to them: " + err.Error(),
			}
		}
		if err != nil {
			return nil, err
		}
		defer func() { _ = hold.Release(ctx) }() // after a failed release, the end of the execution releases the lane
	}
	if step.Status == objectives.Done && step.TraceID == who.TraceID {
		return advanced(ctx, db, o, step) // reported before, by this run
	}
	filter := objectives.EvidenceFilter{TraceID: who.TraceID, ExecutionID: who.ExecutionID}
	calls, err := objectives.FindEvidence(ctx, db, step.ID, filter)
	if err != nil {
		return nil, err
	}
	ok, err := objectives.CompleteStep(ctx, db, step.ID, args.Result, who.TraceID, calls)
	if errors.Is(err, objectives.ErrNoEvidence) {
		return nil, invalid("nothing shows that this step is done: no successful call of yours since it began that " +
			"has not shown another step already. Calls that failed or await approval do not count. Act first, then " +
			"report")
	}
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, invalid(fmt.Sprintf("step %q is no longer pending", step.Title))
	}
	if _, err := objectives.Advanced(ctx, db, o.ID, who.TraceID); err != nil {
		return nil, err
	}
	return advanced(ctx, db, o, step)
}

// advanced returns the answer about a completed step.
func advanced(ctx context.Context, db postgres.DB, o objectives.Objective, step objectives.Step) (any, error) {
	o, err := objectives.Get(ctx, db, o.ID)
	return map[string]any{
		"objective": o.Name, "step": step.Title, "status": "done", "done": o.Done, "total": o.Total,
		"objective_status": o.Status,
		"objectives":       []objectiveView{objectiveViewOf(o)}, // the current state, for a later note
	}, err
}

// findStep finds a step by title or id in an active objective.
func findStep(
	ctx context.Context, db postgres.DB, args objectiveAdvanceArgs,
) (objectives.Objective, objectives.Step, error) {
	o, err := objectives.Get(ctx, db, args.Objective)
	if err != nil {
		return o, objectives.Step{}, invalidIf(err, objectives.ErrNotFound)
	}
	if o.Status != objectives.Active && o.Status != objectives.Completed {
		return o, objectives.Step{},
			invalid(fmt.Sprintf("objective %q is %s: only an active one is advanced", o.Name, o.Status))
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
	return o, objectives.Step{}, invalid(fmt.Sprintf("objective %q has no step %q; its steps are %s", o.Name,
		textcut.Text(args.Step, maxGoal), strings.Join(titles, ", ")))
}
