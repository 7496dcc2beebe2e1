package mcp

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Remote is a row of agent_mcp_servers: a server with mounted tools.
type Remote struct {
	ID          string         `json:"id"`
	Name        string         `json:"name"`
	Transport   string         `json:"transport"`
	URL         string         `json:"url"`
	Command     []string       `json:"command"`
	Headers     map[string]any `json:"headers"`
	Env         map[string]any `json:"env"`
	Scope       string         `json:"scope"`
	Trust       string         `json:"trust"`
	Auto        []string       `json:"auto"`
	Include     []string       `json:"include"`
	Exclude     []string       `json:"exclude"`
	Idempotent  []string       `json:"idempotent"`
	TimeoutMS   int            `json:"timeout_ms"`
	Revision    int            `json:"revision"`
	Source      string         `json:"source"`
	AttemptedAt *time.Time     `json:"attempted_at"`
	SyncedAt    *time.Time     `json:"synced_at"`
	SyncError   string         `json:"sync_error"`
	About       string         `json:"about"`
	CreatedAt   time.Time      `json:"created_at"`
	UpdatedAt   time.Time      `json:"updated_at"`
}

const remoteColumns = `id::text, name, transport, url, command, headers, env, scope, trust, auto, include, exclude,
	idempotent, timeout_ms, revision, source, attempted_at, synced_at, sync_error, about, created_at, updated_at`

// Put stores the declaration d and reports whether it changed anything. Mounted tools get the new scope, trust and
// timeout at once. For an invalid definition, Put returns the error of [Validate].
func Put(ctx context.Context, db postgres.Beginner, d Definition) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put MCP server %q: %w", d.Name, err)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if changed, err = d.write(ctx, tx); err != nil || !changed {
			return err
		}
		return remount(ctx, tx, d.Name)
	})
	if err != nil {
		return false, fmt.Errorf("put MCP server %q: %w", d.Name, err)
	}
	return changed, nil
}

func (d Definition) write(ctx context.Context, tx pgx.Tx) (bool, error) {
	return postgres.Upsert(ctx, tx, "write the declaration", "agent_mcp_servers", "name", postgres.Strict{
		"name": d.Name, "transport": d.transport(), "url": d.URL, "command": nonNilList(d.Command),
		"headers": nonNilMap(d.Headers), "env": nonNilMap(d.Env), "scope": d.scope(), "trust": d.trust(),
		"auto": nonNilList(d.Auto), "include": nonNilList(d.Include), "exclude": nonNilList(d.Exclude),
		"idempotent": nonNilList(d.Idempotent), "timeout_ms": d.timeout().Milliseconds(),
		"source": postgres.SourceWorkspace,
	}, "revision = t.revision + 1", "attempted_at = null")
}

func nonNilList(s []string) []string { return append([]string{}, s...) }

func nonNilMap(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return m
}

// Remove deletes the workspace's servers except keep, with their mounted skills, and returns their names.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		with gone as (
		  delete from agent_mcp_servers where source = @source and name <> all(@keep::text[]) returning name)
		select g.name, coalesce(array_agg(t.skill_name) filter (where t.skill_name is not null), '{}')
		  from gone g
		  left join agent_mcp_tools t on t.server = g.name
		 group by g.name
		 order by g.name`,
		postgres.Strict{"source": postgres.SourceWorkspace, "keep": nonNilList(keep)})
	type removed struct {
		Name   string
		Skills []string
	}
	removedServers, err := postgres.Collect(rows, err, "remove MCP servers of the workspace",
		pgx.RowToStructByPos[removed])
	if err != nil {
		return nil, err
	}
	var names []string
	for _, server := range removedServers {
		if _, err := skills.Delete(ctx, db, Source, server.Skills...); err != nil {
			return nil, err
		}
		names = append(names, server.Name)
	}
	return names, nil
}

// Get reads one server, or returns [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Remote, error) {
	return postgres.RowOr[Remote](ctx, db, ErrNotFound, fmt.Sprintf("read MCP server %q", name),
		`select `+remoteColumns+` from agent_mcp_servers where name = @name`, postgres.Strict{"name": name})
}

// List reads the servers, by name, at most 1000.
func List(ctx context.Context, db postgres.DB) ([]Remote, error) {
	return postgres.Rows[Remote](ctx, db, "list MCP servers",
		`select `+remoteColumns+` from agent_mcp_servers order by name limit 1000`)
}

// Tool is a row of agent_mcp_tools: a tool and its mounted skill.
type Tool struct {
	Server     string          `json:"server"`
	Tool       string          `json:"tool"`
	Skill      string          `json:"skill"`
	State      string          `json:"state"` // mounted, quarantined, gone, excluded or refused
	Reason     string          `json:"reason"`
	Pin        string          `json:"pin"`        // hash of the accepted definition
	Definition json.RawMessage `json:"definition"` // the accepted definition
	SeenPin    string          `json:"seen_pin"`   // hash of the server's current definition, if different
	Seen       json.RawMessage `json:"seen"`
	CreatedAt  time.Time       `json:"created_at"`
	UpdatedAt  time.Time       `json:"updated_at"`
}

// States of a tool.
const (
	Mounted     = "mounted"     // its skill calls the tool
	Quarantined = "quarantined" // the tool changed; an admin must accept it
	Gone        = "gone"        // the server removed the tool
	Excluded    = "excluded"    // the workspace excludes the tool
	Refused     = "refused"     // the tool cannot become a skill
)

const toolColumns = `server, tool, skill_name, state, reason, pin, definition, seen_pin, seen, created_at, updated_at`

// Tools reads the tools of a server, or of all servers when server is empty, by server and name.
func Tools(ctx context.Context, db postgres.DB, server string) ([]Tool, error) {
	rows, err := db.Query(ctx, `
		select `+toolColumns+` from agent_mcp_tools where @server = '' or server = @server order by server, tool`,
		postgres.Strict{"server": server})
	return postgres.Collect(rows, err, "list MCP tools", pgx.RowToStructByPos[Tool])
}
