package mcp

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Sync asks a server for its tools, on a connection of its own, and mounts, quarantines or disables them as the package
// comment says. That the server cannot be reached is noted in its row and is the error; nothing else changes then.
func (c *Client) Sync(ctx context.Context, server string) (Report, error) {
	r, err := Get(ctx, c.opts.Pool, server)
	if err != nil {
		return Report{}, err
	}
	conn, err := c.connect(ctx, r, func(tidy func()) { tidy() })
	if err != nil {
		noted := c.noteAttempt(ctx, server, cleanText(err.Error(), 500), "")
		return Report{Server: server, Error: err.Error()}, errors.Join(fmt.Errorf("sync MCP server %q: %w", server, err), noted)
	}
	defer conn.close()
	var report Report
	err = postgres.InTx(ctx, c.opts.Pool, func(tx pgx.Tx) error {
		report, err = settle(ctx, tx, server, c.opts.Agent, conn.listed)
		return err
	})
	if err != nil {
		return report, fmt.Errorf("sync MCP server %q: %w", server, err)
	}
	report.About = conn.about
	return report, c.noteAttempt(ctx, server, "", conn.about)
}

// noteAttempt says when a server was asked, and what came of it.
func (c *Client) noteAttempt(ctx context.Context, server, failure, about string) error {
	_, err := c.opts.Pool.Exec(ctx, `
		update agent_mcp_servers
		   set attempted_at = clock_timestamp(), sync_error = @failure,
		       synced_at = case when @failure = '' then clock_timestamp() else synced_at end,
		       about = case when @failure = '' then @about else about end
		 where name = @name`, postgres.Strict{"failure": failure, "about": about, "name": server})
	if err != nil {
		return fmt.Errorf("note sync of MCP server %q: %w", server, err)
	}
	return nil
}

// Run syncs the servers that are due, at once and then every so often, until ctx ends; then it closes the client. A server is due
// when it was declared anew, when its last sync is a quarter of an hour ago, and a minute after a failure. Nothing
// waits for it, and it returns nil.
func (c *Client) Run(ctx context.Context) error {
	defer c.Close()
	ticker := time.NewTicker(retryEvery / 4)
	defer ticker.Stop()
	for {
		c.syncDue(ctx)
		c.prune(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// prune forgets calls from outside whose answers were collected long ago.
func (c *Client) prune(ctx context.Context) {
	_, err := c.opts.Pool.Exec(ctx, `
		delete from agent_mcp_calls where collected_at < clock_timestamp() - make_interval(secs => @life)`,
		postgres.Strict{"life": keepCalls.Seconds()})
	if err != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "old MCP calls not removed", "error", err)
	}
}

func (c *Client) syncDue(ctx context.Context) {
	rows, err := c.opts.Pool.Query(ctx, `
		select name from agent_mcp_servers
		 where attempted_at is null or attempted_at < clock_timestamp() - make_interval(secs =>
		       case when sync_error = '' then @every::float8 else @retry::float8 end)
		 order by attempted_at nulls first limit 100`,
		postgres.Strict{"every": syncEvery.Seconds(), "retry": retryEvery.Seconds()})
	var due []string
	if err == nil {
		due, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "MCP servers not looked for", "error", err)
	}
	for _, server := range due {
		if ctx.Err() != nil {
			return
		}
		report, err := c.Sync(ctx, server)
		switch {
		case err != nil && ctx.Err() == nil:
			c.log.WarnContext(ctx, "MCP server not synced", "server", server, "error", err)
		case len(report.Quarantined) > 0:
			c.log.WarnContext(ctx, "MCP tools changed and are quarantined", "server", server, "tools", report.Quarantined)
		case err == nil:
			c.log.InfoContext(ctx, "MCP server synced", "server", server, "tools", report.Tools)
		}
	}
}
