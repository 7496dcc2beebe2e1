package workspace

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// agentKind is the kind agent. Its instructions may be in a separate file.
func agentKind() kind {
	k := kindReader("agent", agents.Validate, func(d agents.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[agents.Definition] { return &w.Agents })
	read := k.read
	k.read = func(l *loader, s source) {
		read(l, s)
		for _, key := range []string{"iterations", "tokens", "cost_usd", "day_usd"} {
			l.rejectZero(s, "limits."+key, "leave it out for no limit")
		}
		document := &l.workspace.Agents[len(l.workspace.Agents)-1]
		if file := document.Definition.InstructionsFile; file != "" {
			text, err := readText(l.fsys, path.Join(path.Dir(l.name), file), file)
			if err != nil {
				l.problems.add(document.position("instructions_file"), "instructions_file: %s", err)
			}
			document.Definition.Instructions, document.Definition.InstructionsFile = text, ""
			l.problems = append(l.problems, s.independentProblems(nil, agents.Validate(document.Definition))...)
		}
	}
	return k
}

// readText reads a text file of the workspace, with line feeds as the ends of lines and without a byte order mark.
// given is the path as the document names it.
func readText(fsys fs.FS, name, given string) (string, error) {
	if !fs.ValidPath(name) {
		return "", fmt.Errorf("%q is outside the workspace", given)
	}
	raw, err := read(fsys, name)
	switch {
	case err != nil:
		return "", err
	case !utf8.Valid(raw):
		return "", fmt.Errorf("%q is no text in UTF-8", given)
	}
	text := strings.TrimPrefix(string(raw), "\ufeff")
	return strings.TrimSpace(strings.ReplaceAll(text, "\r\n", "\n")), nil
}

// agentRow is an agent in a diff.
type agentRow struct {
	agents.Definition
	Version int    `json:"version"`
	Source  string `json:"source"`
}

// agentTable applies agent documents. Old versions stay, because running turns use them.
func agentTable(w Workspace, o Options) kindApplier {
	return kindTable[agents.Definition, agentRow]{
		kind: "agent", documents: w.Agents, name: func(d agents.Definition) string { return d.Name },
		get: getAgent,
		put: func(ctx context.Context, tx pgx.Tx, d agents.Definition) (bool, error) {
			single, err := isOnlyAgent(ctx, tx, w, o, d.Name)
			if err != nil {
				return false, err
			}
			d.Default = d.Default || single
			return agents.Put(ctx, tx, d)
		},
		notFound: agents.ErrNotFound, remove: agents.Remove,
		declared: []string{
			"description", "default", "instructions", "model", "fallback", "effort", "temperature", "skills", "memory",
			"pinned", "delegates", "keys", "languages", "timezone", "greeting", "limits", "heartbeat", "version", "source",
		},
	}
}

func getAgent(ctx context.Context, db postgres.DB, name string) (agentRow, error) {
	all, err := (&agents.Directory{}).List(ctx, db)
	if err != nil {
		return agentRow{}, err
	}
	for _, a := range all {
		if a.Name == name && a.Declared() {
			return agentRow{a.AsDeclared(), a.Version, a.Source}, nil
		}
	}
	return agentRow{}, agents.ErrNotFound
}

// checkAgents requires exactly one default agent, existing delegates, skill patterns with a match, and names different
// from all flows, in the transaction's state. It returns [Problems].
func checkAgents(ctx context.Context, tx pgx.Tx, w Workspace) error {
	var problems Problems
	if err := checkActors(ctx, tx, w, &problems); err != nil || len(w.Agents) == 0 {
		return cmp.Or(err, problems.err())
	}
	if err := checkDefault(ctx, tx, w.Agents, &problems); err != nil {
		return err
	}
	skills, err := skillNames(ctx, tx)
	if err != nil {
		return err
	}
	flows, err := flowNames(ctx, tx)
	if err != nil {
		return err
	}
	flows = slices.Concat(flows, w.GoFlows, w.Reserved)
	names, err := agentNames(ctx, tx)
	if err != nil {
		return err
	}
	for _, document := range w.Agents {
		d := document.Definition
		if slices.Contains(flows, d.Name) {
			problems.add(document.position("name"),
				"name: %q is the name of a flow; agents and flows share one namespace", d.Name)
		}
		for i, name := range d.Delegates {
			if !slices.Contains(names, name) {
				path := fmt.Sprintf("delegates[%d]", i)
				problems.add(document.position(path), "%s: %s", path, unknownName("agent", name, name, names))
			}
		}
		for i, pattern := range d.Skills {
			if !matchesAny(pattern, skills) {
				path := fmt.Sprintf("skills[%d]", i)
				problems.add(document.position(path), "%s: there is no skill %q%s", path, pattern,
					suggestion(pattern, skills))
			}
		}
	}
	return problems.err()
}

// checkActors requires the agents of objectives, automations and channels to exist.
func checkActors(ctx context.Context, db postgres.DB, w Workspace, problems *Problems) error {
	names, err := agentNames(ctx, db)
	if err != nil {
		return err
	}
	check := func(at Position, name string) {
		if name != "" && !slices.Contains(names, name) {
			problems.add(at, "agent: %s", unknownName("agent", name, name, names))
		}
	}
	for _, document := range w.Objectives {
		check(document.position("agent"), document.Definition.Agent)
	}
	for _, document := range w.Automations {
		check(document.position("agent"), document.Definition.Agent)
	}
	for _, document := range w.Channels {
		check(document.position("agent"), document.Definition.Agent)
	}
	return nil
}

func agentNames(ctx context.Context, db postgres.DB) ([]string, error) {
	all, err := (&agents.Directory{}).List(ctx, db)
	var names []string
	for _, a := range all {
		if a.Declared() {
			names = append(names, a.Name)
		}
	}
	return names, err
}

func matchesAny(pattern string, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		match, err := path.Match(pattern, name)
		return err == nil && match
	})
}

// checkDefault requires one default among all agents. A single agent is implicitly the default.
func checkDefault(
	ctx context.Context, db postgres.DB, documents []Document[agents.Definition], problems *Problems,
) error {
	all, err := (&agents.Directory{}).List(ctx, db)
	if err != nil {
		return err
	}
	var defaults []string
	for _, a := range all {
		if a.Default {
			defaults = append(defaults, a.Name)
		}
	}
	switch {
	case len(defaults) == 0:
		problems.add(documents[0].At, "default: one of the %d agents must have default: true; "+
			"it acts if a request names no agent", len(all))
	case len(defaults) > 1:
		problems.add(documents[0].At, "default: the agents %s all are the default; keep default: true in one of them, "+
			"and remove agents of an earlier workspace with --prune", strings.Join(defaults, ", "))
	}
	return nil
}

// isOnlyAgent reports whether a document declares the only agent, after pending removals.
func isOnlyAgent(ctx context.Context, db postgres.DB, w Workspace, o Options, name string) (bool, error) {
	if len(w.Agents) != 1 {
		return false, nil
	}
	all, err := (&agents.Directory{}).List(ctx, db)
	return !slices.ContainsFunc(all, func(a agents.Agent) bool {
		pruned := a.Source == Source && o.Prune != nil && o.Prune(Item{Kind: "agent", Name: a.Name, Action: Remove})
		return a.Declared() && a.Name != name && !pruned
	}), err
}
