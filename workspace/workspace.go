// Package workspace reads what an agent is made of from a folder of YAML files, and makes the database match it.
//
// A file has one or more documents, separated by ---. Each says what it is with kind: (agent, database, skill,
// mcp_server,
// objective, automation, flow, webhook or webhook_target); its other keys are those of the kind's Definition. Which file a document is in does not matter, nor in
// which folder; skills/, automations.yaml and the like are a custom. Names that begin with a dot are left out.
//
// Reading is strict. An unknown key, a key given twice, a value of the wrong type, a second document of the same name
// is a problem, and so is everything that the kind's own Validate finds. All problems of all files are reported at
// once, each with file, line and column, and then nothing is read. YAML's aliases and merge keys are refused: a
// file means what it shows.
//
// [Apply] makes the database match in one transaction: what is new is created, what differs is updated, and what came from
// a workspace (source 'workspace') and is no longer in it is removed. It is idempotent: applied again, a workspace
// changes no row. What the agent learned and an admin decided is not a workspace's: whether a skill or an automation is
// in service and why, an objective's progress, memories, when an automation runs next. [Plan] is Apply with its
// transaction rolled back, so the two cannot disagree.
//
// Why two applies at once are safe: each takes the same transaction-level lock first, so the second sees what the first
// committed. A lock of a transaction works behind PgBouncer and ends with its holder.
package workspace

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Source marks the rows that a workspace declared.
const Source = skills.SourceWorkspace

// Workspace is what the files of a folder declare. The zero value declares nothing.
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

	// Also, where set, is called in the transaction of [Apply], after everything is written.
	Also func(ctx context.Context, tx pgx.Tx) error

	// The names of flows in Go code are the caller's to say, not a file's. No flow of the workspace may have one of them.
	GoFlows  []string // those that flows of the workspace may start
	Reserved []string // those that only the program itself starts
}

// Document is one declaration and where it stands.
type Document[D any] struct {
	At         Position
	Definition D

	source source
}
