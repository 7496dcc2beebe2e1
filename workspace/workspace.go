// Package workspace reads an agent's declaration from a folder of YAML files and makes the database match it.
//
// A file has one or more documents separated by ---. Each document names its kind (agent, database, skill, mcp_server,
// objective, automation, flow, webhook, webhook_target, channel or eval). Its other keys are those of the kind's
// Definition. File and folder names do not matter. The reader skips hidden names.
//
// The reader is strict. Unknown or repeated keys, wrong types, duplicate names, aliases, merge keys and errors of the
// kind's Validate are problems. The reader reports the problems of all files at once, with file, line and column. It
// stops reading a file at a syntax error. A workspace with problems is not applied.
//
// [Apply] makes the database match in one transaction. It creates and updates rows. With [Options.Prune], it removes
// rows that came from a workspace (source 'workspace') and that no file declares any more. It is idempotent. It keeps
// the state of the agent and the decisions of admins: enabled states with their reasons, progress of objectives,
// memories, next runs of automations. [Plan] is Apply with a rollback, so both report the same changes. Where the gate
// refuses an apply, Plan returns warnings.
//
// Concurrent applies are safe. Each apply first acquires the same transaction-level advisory lock ([Lock]), so a
// second apply sees the commit of the first. Such a lock works behind PgBouncer, and PostgreSQL releases it if its
// holder dies.
package workspace

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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

// position returns the position of a field, or of the document if it has no source.
func (d Document[D]) position(path string) Position {
	if d.source.node == nil {
		return d.At
	}
	return d.source.at(path)
}
