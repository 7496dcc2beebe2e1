package workspace

import (
	"context"
	"encoding/json"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// kind reads one kind of documents.
type kind struct {
	name string
	read func(l *loader, s source)
}

// kinds lists the kinds in the order of application.
func kinds() []kind {
	return []kind{
		agentKind(), databaseKind(),
		kindReader("skill", skills.Validate, func(d skills.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[skills.Definition] { return &w.Skills }),
		kindReader("mcp_server", mcp.Validate, func(d mcp.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[mcp.Definition] { return &w.MCPServers }),
		kindReader("objective", objectives.Validate, func(d objectives.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[objectives.Definition] { return &w.Objectives }),
		kindReader("automation", automations.Validate, func(d automations.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[automations.Definition] { return &w.Automations }),
		kindReader("flow", flows.Validate, func(d flows.Definition) string { return d.Name },
			func(w *Workspace) *[]Document[flows.Definition] { return &w.Flows }),
		kindReader("webhook", webhooks.ValidateEndpoint, func(d webhooks.EndpointDefinition) string { return d.Name },
			func(w *Workspace) *[]Document[webhooks.EndpointDefinition] { return &w.Webhooks }),
		kindReader("webhook_target", webhooks.ValidateTarget, func(d webhooks.TargetDefinition) string { return d.Name },
			func(w *Workspace) *[]Document[webhooks.TargetDefinition] { return &w.Targets }),
		channelKind(),
		evalKind(),
	}
}

// kindReader builds a kind whose documents are definitions of type D. list selects the list to which it appends them.
func kindReader[D any](
	name string, validate func(D) error, nameOf func(D) string, list func(*Workspace) *[]Document[D],
) kind {
	return kind{name: name, read: func(l *loader, s source) {
		document := Document[D]{At: position(s.file, s.node), source: s}
		decoding := s.decode(&document.Definition)
		l.problems = append(l.problems, decoding...)
		l.problems = append(l.problems, s.independentProblems(decoding, validate(document.Definition))...)
		l.rejectZero(s, "max_attempts", "write at least 1, or leave it out for the default")
		l.addName(name, nameOf(document.Definition), s)
		to := list(&l.workspace)
		*to = append(*to, document)
	}}
}

func kindNames() []string {
	var names []string
	for _, k := range kinds() {
		names = append(names, k.name)
	}
	return names
}

// kindList formats the kinds for a message: "skill, automation or objective".
func kindList() string {
	names := kindNames()
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// kindApplier applies the documents of one kind.
type kindApplier interface {
	apply(ctx context.Context, tx pgx.Tx, o Options) ([]Item, error)
}

// kindTables lists the kinds in the order of application.
func kindTables(w Workspace, o Options) []kindApplier {
	return []kindApplier{
		databaseTable(w),
		kindTable[skills.Definition, skill]{
			kind: "skill", documents: w.Skills, name: func(d skills.Definition) string { return d.Name },
			get: getSkill,
			put: func(ctx context.Context, tx pgx.Tx, d skills.Definition) (bool, error) {
				return skills.Put(ctx, tx, d, Source)
			},
			notFound: skills.ErrNotFound, remove: skills.Remove,
			declared: []string{
				"description", "parameters", "handler", "config", "scope", "trust", "four_eyes", "idempotent",
				"timeout_ms", "source",
			},
		},
		mcpServers(w), agentTable(w, o),
		kindTable[objectives.Definition, objective]{
			kind: "objective", documents: w.Objectives, name: func(d objectives.Definition) string { return d.Name },
			get: getObjective,
			put: func(ctx context.Context, tx pgx.Tx, d objectives.Definition) (bool, error) {
				return objectives.Put(ctx, tx, d, Source)
			},
			notFound: objectives.ErrNotFound, remove: objectives.Remove,
			declared: []string{
				"goal", "success_criteria", "agent", "priority", "review_every_seconds", "steps", "status", "source",
			},
		},
		kindTable[automations.Definition, automations.Automation]{
			kind: "automation", documents: w.Automations, name: func(d automations.Definition) string { return d.Name },
			get:      automations.Get,
			put:      withTx(automations.Put),
			notFound: automations.ErrNotFound, remove: automations.Remove,
			declared: []string{
				"description", "agent", "trigger", "cron", "timezone", "event", "condition", "signal", "skill_name",
				"arguments", "prompt", "flow", "max_attempts", "source",
			},
		},
		flowTable(w), webhookEndpoints(w), webhookTargets(w), channelTable(w), evalTable(w),
	}
}

// skill is a skill with its parameters in a diff.
type skill struct {
	skills.Skill
	Parameters json.RawMessage `json:"parameters"`
}

func getSkill(ctx context.Context, db postgres.DB, name string) (skill, error) {
	s, err := skills.Get(ctx, db, name)
	return skill{Skill: s, Parameters: s.Parameters()}, err
}

// objective is an objective with its steps' titles in a diff.
type objective struct {
	objectives.Objective
	Steps []string `json:"steps"`
}

func getObjective(ctx context.Context, db postgres.DB, name string) (objective, error) {
	o, err := objectives.Get(ctx, db, name)
	if err != nil {
		return objective{}, err
	}
	steps, err := objectives.Steps(ctx, db, o.ID)
	found := objective{Objective: o, Steps: []string{}}
	for _, step := range steps {
		found.Steps = append(found.Steps, step.Title)
	}
	return found, err
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
