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
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// agentKind is the kind agent. Its instructions may be in a separate file.
func agentKind() kind {
	k := kindReader("agent", agents.Validate, func(d agents.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[agents.Definition] { return &w.Agents })
	read := k.read
	k.read = func(l *loader, s source) {
		read(l, s)
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

// readText reads a text file of the workspace.
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
	return strings.TrimSpace(string(raw)), nil
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
			"pinned",
			"delegates", "keys", "languages", "timezone", "greeting", "limits", "heartbeat", "version", "source",
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
// from all flows. It returns [Problems].
func checkAgents(ctx context.Context, db postgres.DB, w Workspace) error {
	var problems Problems
	if err := checkActors(ctx, db, w, &problems); err != nil || len(w.Agents) == 0 {
		return cmp.Or(err, problems.err())
	}
	if err := checkDefault(ctx, db, w.Agents, &problems); err != nil {
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
			problems.add(document.position("name"),
				"name: %q is the name of a flow; agents and flows share one namespace", d.Name)
		}
		for i, name := range d.Delegates {
			if !slices.Contains(names, name) {
				at := fmt.Sprintf("delegates[%d]", i)
				problems.add(document.position(at), "%s: %s", at, unknownName("agent", name, name, names))
			}
		}
		for i, pattern := range d.Skills {
			if !matchesAny(pattern, skills) {
				at := fmt.Sprintf("skills[%d]", i)
				problems.add(document.position(at), "%s: there is no skill %q%s", at, pattern, suggestion(pattern, skills))
			}
		}
	}
	return problems.err()
}

// checkActors requires the agents of objectives and automations to exist.
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

func databaseKind() kind {
	return kindReader("database", databases.Validate, func(d databases.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[databases.Definition] { return &w.Databases })
}

// databaseTable applies database documents.
func databaseTable(w Workspace) kindApplier {
	return kindTable[databases.Definition, databases.Database]{
		kind: "database", documents: w.Databases, name: func(d databases.Definition) string { return d.Name },
		get:      databases.Get,
		put:      withTx(databases.Put),
		notFound: databases.ErrNotFound, remove: databases.Remove,
		declared: []string{"description", "url_env", "access", "role", "source"},
	}
}

// mcpServers applies mcp_server documents. A sync mounts a server's skills; removal of the server removes the skills.
func mcpServers(w Workspace) kindApplier {
	return kindTable[mcp.Definition, mcp.Remote]{
		kind: "mcp_server", documents: w.MCPServers, name: func(d mcp.Definition) string { return d.Name },
		get:      mcp.Get,
		put:      func(ctx context.Context, tx pgx.Tx, d mcp.Definition) (bool, error) { return mcp.Put(ctx, tx, d) },
		notFound: mcp.ErrNotFound, remove: mcp.Remove,
		declared: []string{
			"transport", "url", "command", "headers", "env", "scope", "trust", "auto", "include", "exclude", "idempotent",
			"timeout_ms", "source",
		},
	}
}

// webhookEndpoints applies webhook documents. The admin enables and disables endpoints.
func webhookEndpoints(w Workspace) kindApplier {
	return kindTable[webhooks.EndpointDefinition, webhooks.Endpoint]{
		kind: "webhook", documents: w.Webhooks, name: func(d webhooks.EndpointDefinition) string { return d.Name },
		get:      webhooks.GetEndpoint,
		put:      withTx(webhooks.PutEndpoint),
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveEndpoints,
		declared: []string{"description", "scheme", "secrets", "settings", "actions", "source"},
	}
}

// webhookTargets applies webhook_target documents. The admin enables and disables targets.
func webhookTargets(w Workspace) kindApplier {
	return kindTable[webhooks.TargetDefinition, webhooks.Target]{
		kind: "webhook_target", documents: w.Targets, name: func(d webhooks.TargetDefinition) string { return d.Name },
		get:      webhooks.GetTarget,
		put:      withTx(webhooks.PutTarget),
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveTargets,
		declared: []string{"description", "url", "secrets", "events", "format", "max_failures", "source"},
	}
}

func channelKind() kind {
	return kindReader("channel", channels.Validate, func(d channels.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[channels.Definition] { return &w.Channels })
}

// channelTable applies channel documents. The admin enables and disables channels.
func channelTable(w Workspace) kindApplier {
	return kindTable[channels.Definition, channels.Channel]{
		kind: "channel", documents: w.Channels, name: func(d channels.Definition) string { return d.Name },
		get:      channels.Get,
		put:      withTx(channels.Put),
		notFound: channels.ErrNotFound, remove: channels.Remove,
		declared: []string{"description", "type", "agent", "secrets", "settings", "pairing", "report_to", "source"},
	}
}

// checkCalls requires every automation's skill to exist and accept its arguments, in the transaction's state. It
// returns [Problems].
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

func skillNames(ctx context.Context, db postgres.DB) ([]string, error) {
	all, err := skills.List(ctx, db, skills.Filter{Limit: 1000})
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return names, err
}

// position returns the position of a field, or of the document if it has no source.
func (d Document[D]) position(path string) Position {
	if d.source.node == nil {
		return d.At
	}
	return d.source.at(path)
}
