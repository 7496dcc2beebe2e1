package workspace

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/mcp"
)

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
