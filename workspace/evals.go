package workspace

import (
	"context"
	"fmt"
	"path"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// evalKind is the kind eval. The labels of its judges are in separate files.
func evalKind() kind {
	k := kindReader("eval", evals.Validate, func(d evals.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[evals.Definition] { return &w.Evals })
	read := k.read
	k.read = func(l *loader, s source) {
		read(l, s)
		l.rejectZero(s, "budget.cost_usd", "leave it out for no limit")
		document := l.workspace.Evals[len(l.workspace.Evals)-1]
		for i, c := range document.Definition.Cases {
			for j, e := range c.Expect {
				expect := fmt.Sprintf("cases[%d].expect[%d].", i, j)
				l.rejectZero(s, expect+"called.times", "leave it out for at least one call; not_called forbids calls")
				for _, limit := range []string{"answer.max_words", "within.iterations", "within.cost_usd"} {
					l.rejectZero(s, expect+limit, "leave it out for no limit")
				}
				if e.Judge == nil || e.Judge.Labels == "" {
					continue
				}
				at := expect + "judge.labels"
				text, err := readText(l.fsys, path.Join(path.Dir(l.name), e.Judge.Labels), e.Judge.Labels)
				if err == nil {
					e.Judge.Labelled, err = evals.ReadLabels([]byte(text))
				}
				if err != nil {
					l.problems.add(document.position(at), "%s: %s", at, err)
				}
			}
		}
	}
	return k
}

// evalTable applies eval documents. Old versions stay, because runs keep their version.
func evalTable(w Workspace) kindApplier {
	return kindTable[evals.Definition, evalRow]{
		kind: "eval", documents: w.Evals, name: func(d evals.Definition) string { return d.Name },
		get:      getEval,
		put:      withTx(evals.Put),
		notFound: evals.ErrNotFound, remove: evals.Remove,
		declared: []string{"description", "agent", "surface", "trials", "budget", "gate", "cases", "version", "source"},
	}
}

// evalRow is a suite in a diff.
type evalRow struct {
	evals.Definition
	Version int    `json:"version"`
	Source  string `json:"source"`
}

func getEval(ctx context.Context, db postgres.DB, name string) (evalRow, error) {
	s, err := evals.Get(ctx, db, name)
	return evalRow{s.Definition, s.Version, s.Source}, err
}

// checkEvals requires the agents and skills of suites to exist, in the transaction's state. It returns [Problems].
func checkEvals(ctx context.Context, tx pgx.Tx, w Workspace) error {
	if len(w.Evals) == 0 {
		return nil
	}
	known, err := skillNames(ctx, tx)
	if err != nil {
		return err
	}
	acting, err := agentNames(ctx, tx)
	if err != nil {
		return err
	}
	var problems Problems
	for _, document := range w.Evals {
		if name := document.Definition.Agent; name != "" && !slices.Contains(acting, name) {
			problems.add(document.position("agent"), "agent: %s", unknownName("agent", name, name, acting))
		}
		checkNames(document, evals.Skills(document.Definition), known, unknownSkill, &problems)
	}
	return problems.err()
}

// applyGated locks, applies all kinds, and returns the refusals of the gate. The first apply of a database has no
// refusals, because no earlier version could become worse.
func applyGated(ctx context.Context, tx pgx.Tx, w Workspace, o Options) (Diff, []evals.Refusal, error) {
	if err := Lock(ctx, tx); err != nil {
		return Diff{}, nil, err
	}
	if o.Gate == nil {
		diff, err := applyAll(ctx, tx, w, o)
		return diff, nil, err
	}
	before, err := o.Gate.Installation.Subjects(ctx, tx)
	if err != nil {
		return Diff{}, nil, err
	}
	diff, err := applyAll(ctx, tx, w, o)
	if err != nil || diff.Empty() || diff.Count(Create) == len(diff.Items) {
		return diff, nil, err
	}
	after, err := o.Gate.Installation.Subjects(ctx, tx)
	if err != nil {
		return diff, nil, err
	}
	refused, err := o.Gate.Installation.CheckGate(ctx, tx, before, after)
	return diff, refused, err
}

func gateWarnings(refused []evals.Refusal) (warnings []string) {
	for _, r := range refused {
		warnings = append(warnings, "the gate of eval "+r.String())
	}
	return warnings
}

func refusedSuites(refused []evals.Refusal) []string {
	suites := make([]string, len(refused))
	for i, r := range refused {
		suites[i] = r.Suite
	}
	return suites
}

// CandidateOf returns the candidate of a suite outside the workspace, as if w were applied. It applies nothing.
func CandidateOf(
	ctx context.Context, db postgres.Beginner, w Workspace, o Options, in evals.Installation, s evals.Suite,
) (found evals.Subject, err error) {
	w.AfterApply = func(ctx context.Context, tx pgx.Tx) (err error) {
		found, err = in.Subject(ctx, tx, s)
		return err
	}
	_, err = Plan(ctx, db, w, o)
	return found, err
}

// Candidates returns the suites that [Apply] would make current, each with its candidate, by name. It changes nothing.
func Candidates(
	ctx context.Context, db postgres.Beginner, w Workspace, o Options, in evals.Installation,
) (map[string]evals.Subject, error) {
	var found map[string]evals.Subject
	w.AfterApply = func(ctx context.Context, tx pgx.Tx) (err error) {
		found, err = in.Subjects(ctx, tx)
		return err
	}
	_, err := Plan(ctx, db, w, o)
	return found, err
}
