package workspace

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
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

// CheckBuiltins wants every builtin: handler to name one of known, the builtins of the binary that is to run the
// workspace. Neither the files nor the database know them: a library's user has builtins of their own. The
// error is [Problems].
func (w Workspace) CheckBuiltins(known []string) error {
	names := make(map[string]bool, len(known))
	for _, name := range known {
		names[name] = true
	}
	var problems Problems
	for _, document := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(document.Definition.Handler), ":")
		if name = strings.TrimSpace(name); kind == "builtin" && !names[name] {
			problems.add(document.place("handler"), "handler: %s", unknown("builtin", name, name, known))
		}
	}
	return problems.err()
}

func databaseKind() kind {
	return reader("database", databases.Validate, func(d databases.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[databases.Definition] { return &w.Databases })
}

// databaseTable is how database documents meet their table.
func databaseTable(w Workspace) matcher {
	return table[databases.Definition, databases.Database]{
		kind: "database", documents: w.Databases, name: func(d databases.Definition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (databases.Database, error) {
			return databases.Get(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d databases.Definition) (bool, error) {
			return databases.Put(ctx, tx, d, Source)
		},
		notFound: databases.ErrNotFound, remove: databases.Remove,
		declared: []string{"description", "url_env", "access", "role", "source"},
	}
}

// mcpServers is how mcp_server documents meet their table. The skills that are mounted from a server are not the
// workspace's: a sync makes them, and they go with their server.
func mcpServers(w Workspace) matcher {
	return table[mcp.Definition, mcp.Remote]{
		kind: "mcp_server", documents: w.MCPServers, name: func(d mcp.Definition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (mcp.Remote, error) { return mcp.Get(ctx, tx, name) },
		put: func(ctx context.Context, tx pgx.Tx, d mcp.Definition) (bool, error) {
			return mcp.Put(ctx, tx, d, Source)
		},
		notFound: mcp.ErrNotFound, remove: mcp.Remove,
		declared: []string{
			"transport", "url", "command", "headers", "env", "scope", "trust", "auto", "include", "exclude", "idempotent",
			"timeout_ms", "source",
		},
	}
}

// webhookEndpoints is the kind webhook. Whether one is in service is the admin's.
func webhookEndpoints(w Workspace) matcher {
	return table[webhooks.EndpointDefinition, webhooks.Endpoint]{
		kind: "webhook", documents: w.Webhooks, name: func(d webhooks.EndpointDefinition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (webhooks.Endpoint, error) {
			return webhooks.GetEndpoint(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d webhooks.EndpointDefinition) (bool, error) {
			return webhooks.PutEndpoint(ctx, tx, d, Source)
		},
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveEndpoints,
		declared: []string{"description", "scheme", "secrets", "settings", "actions", "source"},
	}
}

// webhookTargets is the kind webhook_target. Whether one is in service, and how it fares, is not a file's.
func webhookTargets(w Workspace) matcher {
	return table[webhooks.TargetDefinition, webhooks.Target]{
		kind: "webhook_target", documents: w.Targets, name: func(d webhooks.TargetDefinition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (webhooks.Target, error) {
			return webhooks.GetTarget(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d webhooks.TargetDefinition) (bool, error) {
			return webhooks.PutTarget(ctx, tx, d, Source)
		},
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveTargets,
		declared: []string{"description", "url", "secrets", "events", "max_failures", "source"},
	}
}

// checkCalls wants every automation's skill to exist, in the workspace or beside it, and to take its arguments. It
// looks at the rows as they are about to be, and returns [Problems].
func checkCalls(ctx context.Context, tx pgx.Tx, all []Document[automations.Definition]) error {
	registry, err := skills.New(skills.Options{})
	if err != nil {
		return err
	}
	var problems Problems
	for _, document := range all {
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

func checkCall(ctx context.Context, tx pgx.Tx, registry *skills.Registry, document Document[automations.Definition]) (Problems, error) {
	var problems Problems
	called := document.Definition.Skill
	skill, err := skills.Get(ctx, tx, called)
	if errors.Is(err, skills.ErrNotFound) {
		names, err := skillNames(ctx, tx)
		problems.add(document.place("skill"), "skill: there is no skill %q%s", called, hint(called, names))
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
		problems.add(document.place("skill"), "skill: %s", err)
	}
	if ok {
		for _, v := range invalid.Violations {
			path := "arguments" + strings.ReplaceAll(v.Path, "/", ".")
			problems.add(document.place(path), "%s: %s (skill %s)", path, v.Message, called)
		}
	}
	return problems, nil
}

func skillNames(ctx context.Context, db postgres.DB) ([]string, error) {
	all, err := skills.List(ctx, db, skills.Filter{Limit: 1000})
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return names, err
}

// place is where a field of the document stands; the document itself when it was not read from a file.
func (d Document[D]) place(path string) Position {
	if d.source.node == nil {
		return d.At
	}
	return d.source.at(path)
}
