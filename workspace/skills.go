package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// checkCalls requires every automation's skill to exist and accept its arguments, in the transaction's state. It
// returns [Problems].
func checkCalls(ctx context.Context, tx pgx.Tx, w Workspace) error {
	registry, err := skills.New(skills.Options{})
	if err != nil {
		return err
	}
	var problems Problems
	for _, document := range w.Automations {
		if document.Definition.Skill == "" {
			continue
		}
		found, err := checkCall(ctx, tx, registry, document)
		if err != nil {
			return err
		}
		problems = append(problems, found...)
	}
	return problems.err()
}

func checkCall(
	ctx context.Context, tx pgx.Tx, registry *skills.Registry, document Document[automations.Definition],
) (Problems, error) {
	var problems Problems
	called := document.Definition.Skill
	skill, err := skills.Get(ctx, tx, called)
	if errors.Is(err, skills.ErrNotFound) {
		names, err := skillNames(ctx, tx)
		problems.add(document.position("skill"), "skill: there is no skill %q%s", called, suggestion(called, names))
		return problems, err
	}
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(document.Definition.Arguments)
	if err != nil {
		return nil, fmt.Errorf("check arguments of %s: %w", called, err)
	}
	if document.Definition.Arguments == nil {
		raw = nil
	}
	err = registry.Check(skill, raw)
	invalid, ok := errors.AsType[*skills.InvalidParams](err)
	if !ok && err != nil {
		problems.add(document.position("skill"), "skill: %s", err)
	}
	if ok {
		for _, v := range invalid.Violations {
			path := "arguments" + strings.ReplaceAll(v.Path, "/", ".")
			problems.add(document.position(path), "%s: %s (skill %s)", path, v.Message, called)
		}
	}
	return problems, nil
}

// CheckBuiltins requires every builtin: handler to be in known, the builtins of the executing binary. The error is
// [Problems].
func (w Workspace) CheckBuiltins(known []string) error {
	names := make(map[string]bool, len(known))
	for _, name := range known {
		names[name] = true
	}
	var problems Problems
	for _, document := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(document.Definition.Handler), ":")
		if name = strings.TrimSpace(name); kind == "builtin" && !names[name] {
			problems.add(document.position("handler"), "handler: %s", unknownName("builtin", name, name, known))
		}
	}
	return problems.err()
}

// skillNames lists all skills in the database, disabled ones included. A page of skills.List is bounded.
func skillNames(ctx context.Context, db postgres.DB) ([]string, error) {
	all, err := skills.InScope(ctx, db, nil)
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return names, err
}
