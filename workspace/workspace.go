// Package workspace reads an agent's declaration from a folder of YAML files and makes the database match it.
//
// A file has one or more documents separated by ---. Each document names its kind (agent, database, skill, mcp_server,
// objective, automation, flow, webhook, webhook_target, channel or eval). Its other keys are those of the kind's
// Definition. File and folder names do not matter. The reader skips hidden names.
//
// The reader is strict. Unknown or repeated keys, wrong types, duplicate names and errors of the kind's Validate are
// problems. The reader reports all problems of all files at once, with file, line and column. A workspace with problems
// is not applied. It rejects aliases and merge keys, so a file has no hidden content.
//
// [Apply] makes the database match in one transaction. It creates and updates rows. It removes rows that came from a
// workspace (source 'workspace') and that no file declares any more. It is idempotent. It keeps the state of the agent
// and the decisions of admins: enabled states with their reasons, progress of objectives, memories, next runs of
// automations. [Plan] is Apply with a rollback, so both agree.
//
// Concurrent applies are safe. Each apply acquires the same transaction-level advisory lock first, so a second apply
// sees the commit of the first. Such a lock works behind PgBouncer and ends with its holder.
package workspace

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Source marks rows that a workspace declared.
const Source = postgres.SourceWorkspace

// Workspace holds the declarations of a folder. The zero value declares nothing.
type Workspace struct {
	Agents      []Document[agents.Definition]
	Databases   []Document[databases.Definition] // beside the agent's own
	Skills      []Document[skills.Definition]
	MCPServers  []Document[mcp.Definition]
	Objectives  []Document[objectives.Definition]
	Automations []Document[automations.Definition]
	Flows       []Document[flows.Definition]
	Webhooks    []Document[webhooks.EndpointDefinition]
	Targets     []Document[webhooks.TargetDefinition] // of outgoing webhooks
	Channels    []Document[channels.Definition]
	Evals       []Document[evals.Definition]

	// AfterApply, if set, runs in the transaction of [Apply], after all writes.
	AfterApply func(ctx context.Context, tx pgx.Tx) error

	// The caller sets the names of flows in Go code. No flow of the workspace may have such a name.
	GoFlows  []string // flows that workspace flows may start
	Reserved []string // flows that only the program itself starts
}

// Document is one declaration with its position.
type Document[D any] struct {
	At         Position
	Definition D

	source source
}

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

// kindReader builds the kind with definitions of type D.
func kindReader[D any](
	name string, validate func(D) error, nameOf func(D) string, list func(*Workspace) *[]Document[D],
) kind {
	return kind{name: name, read: func(l *loader, s source) {
		document := Document[D]{At: position(s.file, s.node), source: s}
		wrong := s.decode(&document.Definition)
		l.problems = append(l.problems, wrong...)
		l.problems = append(l.problems, s.independentProblems(wrong, validate(document.Definition))...)
		l.rejectZero("max_attempts", s)
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

// Position is a place in a file. Line and Column start at 1; 0 is unknown.
type Position struct {
	File   string `json:"file"`
	Line   int    `json:"line"`
	Column int    `json:"column"`
}

// String returns file:line:column, as editors expect.
func (p Position) String() string {
	switch {
	case p.Line == 0:
		return p.File
	case p.Column == 0:
		return fmt.Sprintf("%s:%d", p.File, p.Line)
	}
	return fmt.Sprintf("%s:%d:%d", p.File, p.Line, p.Column)
}

func position(file string, node *yaml.Node) Position {
	return Position{File: file, Line: node.Line, Column: node.Column}
}

// Problem is one error of a workspace.
type Problem struct {
	Position
	Message string `json:"message"`
}

func (p Problem) Error() string { return p.String() + ": " + p.Message }

// Problems lists all errors by file and line. [Load], [LoadDir], [Plan] and [Apply] return it for invalid files.
type Problems []Problem

// Error lists the problems, one per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.Error()
	}
	return strings.Join(lines, "\n")
}

// err returns p sorted, or nil if empty.
func (p Problems) err() error {
	if len(p) == 0 {
		return nil
	}
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	return p
}

func (p *Problems) add(at Position, format string, args ...any) {
	*p = append(*p, Problem{Position: at, Message: fmt.Sprintf(format, args...)})
}

const longestName = 80

// unknownName reports an unknown name with the nearest known name. what is the kind of name, shown its spelling in the
// message.
func unknownName(what, shown, name string, known []string) string {
	known = slices.DeleteFunc(slices.Clone(known), func(k string) bool { return k == "" || k == "-" })
	shown = textcut.Text(shown, longestName)
	if near := suggestion(name, known); near != "" {
		return fmt.Sprintf("unknown %s %q%s", what, shown, near)
	}
	if len(known) == 0 {
		return fmt.Sprintf("unknown %s %q; there is none", what, shown)
	}
	slices.Sort(known)
	return fmt.Sprintf("unknown %s %q; known are %s", what, shown, strings.Join(known, ", "))
}

// suggestion formats the nearest known name, if one is near.
func suggestion(name string, known []string) string {
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
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
			declared: []string{"goal", "success_criteria", "agent", "priority", "review_every_seconds", "steps", "source"},
		},
		kindTable[automations.Definition, automations.Automation]{
			kind: "automation", documents: w.Automations, name: func(d automations.Definition) string { return d.Name },
			get:      automations.Get,
			put:      withTx(automations.Put),
			notFound: automations.ErrNotFound, remove: automations.Remove,
			declared: []string{
				"description", "agent", "trigger", "cron", "timezone", "event", "condition", "signal", "skill_name",
				"arguments", "prompt", "flow",
				"max_attempts", "source",
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
