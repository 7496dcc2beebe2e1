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

// agentKind is the kind agent, whose instructions may stand in a file of their own.
func agentKind() kind {
	k := reader("agent", agents.Validate, func(d agents.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[agents.Definition] { return &w.Agents })
	read := k.read
	k.read = func(l *loader, s source) {
		read(l, s)
		document := &l.workspace.Agents[len(l.workspace.Agents)-1]
		if file := document.Definition.InstructionsFile; file != "" {
			text, err := instructions(l.fsys, path.Join(path.Dir(l.name), file), file)
			if err != nil {
				l.problems.add(document.place("instructions_file"), "instructions_file: %s", err)
			}
			document.Definition.Instructions, document.Definition.InstructionsFile = text, ""
			l.problems = append(l.problems, s.beside(nil, agents.Validate(document.Definition))...)
		}
	}
	return k
}

// instructions reads a text file of the workspace.
func instructions(fsys fs.FS, name, given string) (string, error) {
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
	return strings.TrimSpace(string(raw)), nil
}

// agentRow is an agent as a diff shows it.
type agentRow struct {
	agents.Definition
	Version int    `json:"version"`
	Source  string `json:"source"`
}

// agentTable is how agent documents meet their table. Every version stays, for the turns that have begun with it.
func agentTable(w Workspace, o Options) matcher {
	return table[agents.Definition, agentRow]{
		kind: "agent", documents: w.Agents, name: func(d agents.Definition) string { return d.Name },
		get: getAgent,
		put: func(ctx context.Context, tx pgx.Tx, d agents.Definition) (bool, error) {
			single, err := alone(ctx, tx, w, o, d.Name)
			if err != nil {
				return false, err
			}
			d.Default = d.Default || single
			return agents.Put(ctx, tx, d, Source)
		},
		notFound: agents.ErrNotFound, remove: agents.Remove,
		declared: []string{
			"description", "default", "instructions", "model", "fallback", "effort", "temperature", "skills", "memory",
			"pinned",
			"delegates", "keys", "languages", "timezone", "greeting", "limits", "heartbeat", "version", "source",
		},
	}
}

func getAgent(ctx context.Context, tx pgx.Tx, name string) (agentRow, error) {
	all, err := (&agents.Directory{}).List(ctx, tx)
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

// checkAgents wants exactly one default agent, delegates that exist, patterns of skills that match some, and names that
// no flow has. It returns [Problems].
func checkAgents(ctx context.Context, db postgres.DB, w Workspace) error {
	var problems Problems
	if err := checkActing(ctx, db, w, &problems); err != nil || len(w.Agents) == 0 {
		return cmp.Or(err, problems.err())
	}
	if err := oneDefault(ctx, db, w.Agents, &problems); err != nil {
		return err
	}
	skills, err := skillNames(ctx, db)
	if err != nil {
		return err
	}
	flows, err := flowNames(ctx, db)
	if err != nil {
		return err
	}
	flows = slices.Concat(flows, w.GoFlows, w.Reserved)
	names := make([]string, len(w.Agents))
	for i, document := range w.Agents {
		names[i] = document.Definition.Name
	}
	for _, document := range w.Agents {
		d := document.Definition
		if slices.Contains(flows, d.Name) {
			problems.add(document.place("name"),
				"name: %q is the name of a flow; agents and flows share one namespace", d.Name)
		}
		for i, name := range d.Delegates {
			if !slices.Contains(names, name) {
				at := fmt.Sprintf("delegates[%d]", i)
				problems.add(document.place(at), "%s: %s", at, unknown("agent", name, name, names))
			}
		}
		for i, pattern := range d.Skills {
			if !matchesAny(pattern, skills) {
				at := fmt.Sprintf("skills[%d]", i)
				problems.add(document.place(at), "%s: there is no skill %q%s", at, pattern, hint(pattern, skills))
			}
		}
	}
	return problems.err()
}

// checkActing wants the agents of objectives and automations to be in service.
func checkActing(ctx context.Context, db postgres.DB, w Workspace, problems *Problems) error {
	names, err := agentNames(ctx, db)
	if err != nil {
		return err
	}
	check := func(at Position, name string) {
		if name != "" && !slices.Contains(names, name) {
			problems.add(at, "agent: %s", unknown("agent", name, name, names))
		}
	}
	for _, document := range w.Objectives {
		check(document.place("agent"), document.Definition.Agent)
	}
	for _, document := range w.Automations {
		check(document.place("agent"), document.Definition.Agent)
	}
	return nil
}

// agentNames lists the declared agents in service.
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

// oneDefault wants one of all agents in service to be the default. A single agent need not say so.
func oneDefault(
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
			"it acts where nobody names another", len(all))
	case len(defaults) > 1:
		problems.add(documents[0].At, "default: the agents %s all are the default; keep default: true in one of them, "+
			"and remove agents of an earlier workspace with --prune", strings.Join(defaults, ", "))
	}
	return nil
}

// alone reports whether a document is that of the only agent in service, once what is to be removed is gone.
func alone(ctx context.Context, db postgres.DB, w Workspace, o Options, name string) (bool, error) {
	if len(w.Agents) != 1 {
		return false, nil
	}
	all, err := (&agents.Directory{}).List(ctx, db)
	return !slices.ContainsFunc(all, func(a agents.Agent) bool {
		goes := a.Source == Source && o.Prune != nil && o.Prune(Item{Kind: "agent", Name: a.Name, Action: Remove})
		return a.Declared() && a.Name != name && !goes
	}), err
}
