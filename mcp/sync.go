package mcp

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Report is the outcome of a sync. Its lists have the names of tools with a changed state.
type Report struct {
	Server      string   `json:"server"`
	About       string   `json:"about"`
	Tools       int      `json:"tools"` // listed by the server
	Mounted     []string `json:"mounted"`
	Quarantined []string `json:"quarantined"`
	Gone        []string `json:"gone"`
	Excluded    []string `json:"excluded"`
	Refused     []string `json:"refused"`
	Error       string   `json:"error,omitempty"` // why the sync failed
}

// changed reports whether any tool changed.
func (r Report) changed() bool {
	return len(r.Mounted)+len(r.Quarantined)+len(r.Gone)+len(r.Excluded)+len(r.Refused) > 0
}

// add counts a tool with a changed state.
func (r *Report) add(t Tool) {
	switch t.State {
	case Mounted:
		r.Mounted = append(r.Mounted, t.Tool)
	case Quarantined:
		r.Quarantined = append(r.Quarantined, t.Tool)
	case Gone:
		r.Gone = append(r.Gone, t.Tool)
	case Excluded:
		r.Excluded = append(r.Excluded, t.Tool)
	case Refused:
		r.Refused = append(r.Refused, t.Tool)
	}
}

// Sync lists a server's tools on a new connection. It mounts, quarantines or disables tools by the rules of the package
// comment. After a failure, Sync only stores the failure in the server's row and returns an error.
func (c *Client) Sync(ctx context.Context, server string) (Report, error) {
	r, err := Get(ctx, c.opts.Pool, server)
	if err != nil {
		return Report{}, err
	}
	var report Report
	conn, err := c.connect(ctx, r, func(cleanup func()) { cleanup() })
	if err == nil {
		defer conn.close()
		err = postgres.InTx(ctx, c.opts.Pool, func(tx pgx.Tx) error {
			report, err = reconcile(ctx, tx, server, c.opts.Agent, conn.listed())
			return err
		})
	}
	if err != nil {
		return Report{Server: server, Error: err.Error()}, errors.Join(fmt.Errorf("sync MCP server %q: %w", server, err),
			c.recordAttempt(ctx, server, cleanText(err.Error(), 500), ""))
	}
	report.About = conn.serverInfo
	return report, c.recordAttempt(ctx, server, "", conn.serverInfo)
}

// recordAttempt records the time and outcome of a sync.
func (c *Client) recordAttempt(ctx context.Context, server, failure, about string) error {
	_, err := c.opts.Pool.Exec(ctx, `
		update agent_mcp_servers
		   set attempted_at = clock_timestamp(), sync_error = @failure,
		       synced_at = case when @failure = '' then clock_timestamp() else synced_at end,
		       about = case when @failure = '' then @about else about end
		 where name = @name`, postgres.Strict{"failure": failure, "about": about, "name": server})
	if err != nil {
		return fmt.Errorf("record sync of MCP server %q: %w", server, err)
	}
	return nil
}

func (c *Client) syncDue(ctx context.Context) {
	due, err := postgres.Values[string](ctx, c.opts.Pool, "find MCP servers to sync", `
		select name from agent_mcp_servers
		 where attempted_at is null or attempted_at < clock_timestamp() - make_interval(secs =>
		       case when sync_error = '' then @every::float8 else @retry::float8 end)
		 order by attempted_at nulls first limit 100`,
		postgres.Strict{"every": syncInterval.Seconds(), "retry": syncRetryInterval.Seconds()})
	if err != nil && ctx.Err() == nil {
		c.log.WarnContext(ctx, "MCP servers not synced", "error", err)
	}
	var group errgroup.Group
	group.SetLimit(maxConcurrentSyncs)
	for _, server := range due {
		group.Go(func() error {
			c.syncAndLog(ctx, server)
			return nil
		})
	}
	_ = group.Wait() // no function of the group returns an error
}

func (c *Client) syncAndLog(ctx context.Context, server string) {
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

// reconcile updates the rows and skills of a server's tools to match the server's list, and records the changes.
func reconcile(ctx context.Context, tx pgx.Tx, server, agent string, snapshots map[string]snapshot) (Report, error) {
	report := Report{
		Server: server, Tools: len(snapshots), Mounted: []string{}, Quarantined: []string{}, Gone: []string{},
		Excluded: []string{}, Refused: []string{},
	}
	r, tools, err := lockServer(ctx, tx, server)
	if err != nil {
		return report, err
	}
	rows := make(map[string]Tool, len(tools))
	for _, t := range tools {
		rows[t.Tool] = t
	}
	for name := range snapshots {
		if _, ok := rows[name]; !ok {
			rows[name] = Tool{Server: server, Tool: name, Skill: skillName(server, name), Definition: json.RawMessage(`{}`)}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) { // a fixed lock order avoids deadlocks
		old := rows[name]
		var current *snapshot
		if s, ok := snapshots[name]; ok {
			current = &s
		}
		next, err := writeState(ctx, tx, r, nextState(r, old, current))
		if err != nil {
			return report, err
		}
		if next.State != old.State || next.SeenPin != old.SeenPin {
			report.add(next)
		}
	}
	if !report.changed() {
		return report, nil
	}
	return report, recordActivity(ctx, tx, agent, "mcp_sync", map[string]any{"server": server}, report)
}

// lockServer locks a server's row, and reads the row and the server's tools.
func lockServer(ctx context.Context, tx pgx.Tx, server string) (r Remote, tools []Tool, err error) {
	if _, err := tx.Exec(ctx, `select from agent_mcp_servers where name = @name for update`,
		postgres.Strict{"name": server}); err != nil {
		return r, nil, fmt.Errorf("lock MCP server %q: %w", server, err)
	}
	if r, err = Get(ctx, tx, server); err == nil {
		tools, err = Tools(ctx, tx, server)
	}
	return r, tools, err
}

// writeState writes a tool's row and updates its skill accordingly.
func writeState(ctx context.Context, tx pgx.Tx, r Remote, t Tool) (Tool, error) {
	if t.State == Mounted {
		if problem, err := mountProblem(ctx, tx, r, t); err != nil {
			return t, err
		} else if problem != "" {
			t.State, t.Reason = Refused, problem
		}
	}
	if err := writeTool(ctx, tx, t); err != nil {
		return t, err
	}
	switch t.State {
	case Mounted:
		return t, mount(ctx, tx, r, t)
	case Quarantined, Gone:
		return t, unmount(ctx, tx, t)
	}
	_, err := skills.Delete(ctx, tx, Source, t.Skill)
	return t, err
}

// mountProblem returns the reason why a tool cannot become a skill; empty if it can.
func mountProblem(ctx context.Context, tx pgx.Tx, r Remote, t Tool) (string, error) {
	d, err := t.skillDefinition(r)
	if err != nil {
		return cleanText(err.Error(), 500), nil
	}
	if err := skills.Validate(d); err != nil {
		return cleanText(err.Error(), 500), nil
	}
	switch s, err := skills.Get(ctx, tx, t.Skill); {
	case errors.Is(err, skills.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	case s.Source != Source:
		return fmt.Sprintf("a skill %s from another source exists", t.Skill), nil
	}
	return "", nil
}

func (t Tool) skillDefinition(r Remote) (skills.Definition, error) {
	var d definition
	if err := json.Unmarshal(t.Definition, &d); err != nil {
		return skills.Definition{}, fmt.Errorf("read the definition of %s: %w", t.Tool, err)
	}
	return r.skill(t.Tool, t.Skill, t.Pin, d), nil
}

// mount stores the skill, and enables it if this package had disabled it.
func mount(ctx context.Context, tx pgx.Tx, r Remote, t Tool) error {
	d, err := t.skillDefinition(r)
	if err != nil {
		return err
	}
	if _, err := skills.Put(ctx, tx, d, Source); err != nil {
		return err
	}
	s, err := skills.Get(ctx, tx, t.Skill)
	if err != nil || s.Enabled || s.DisabledBy != Actor {
		return err
	}
	_, err = skills.Enable(ctx, tx, t.Skill, Actor, "the tool matches its accepted definition")
	return err
}

// unmount disables a skill and records both versions as evidence.
func unmount(ctx context.Context, tx pgx.Tx, t Tool) error {
	reason := fmt.Sprintf("tool %s of the MCP server %s: %s", t.Tool, t.Server, t.Reason)
	if t.State == Quarantined {
		reason += fmt.Sprintf("; see agent mcp show %s %s", t.Server, t.Tool)
	}
	if t.State == Quarantined && t.SeenPin != "" {
		reason += fmt.Sprintf(", then agent mcp accept %s %s", t.Server, t.Tool)
	}
	_, err := skills.Disable(ctx, tx, t.Skill, Actor, reason, map[string]any{
		"state": t.State, "pin": t.Pin, "accepted": t.Definition, "seen_pin": t.SeenPin, "seen": t.Seen,
	})
	if errors.Is(err, skills.ErrNotFound) {
		return nil
	}
	return err
}

func writeTool(ctx context.Context, tx pgx.Tx, t Tool) error {
	verb := fmt.Sprintf("write MCP tool %s/%s", t.Server, t.Tool)
	_, err := postgres.Upsert(ctx, tx, verb, "agent_mcp_tools", "server, tool", postgres.Strict{
		"server": t.Server, "tool": t.Tool, "skill_name": t.Skill, "state": t.State, "reason": t.Reason, "pin": t.Pin,
		"definition": t.Definition, "seen_pin": t.SeenPin, "seen": t.Seen,
	})
	return err
}

// remount applies a changed declaration's scope, trust and timeout to a server's tools. A newly included tool without
// an accepted version waits for the next sync.
func remount(ctx context.Context, tx pgx.Tx, server string) error {
	r, all, err := lockServer(ctx, tx, server)
	if err != nil {
		return err
	}
	for _, t := range all {
		switch included := r.includes(t.Tool); {
		case !included && t.State != Excluded:
			t = nextState(r, t, nil)
		case included && t.State == Mounted, included && t.State == Excluded && t.Pin != "":
			t.State, t.Reason = Mounted, ""
		default:
			continue
		}
		if _, err := writeState(ctx, tx, r, t); err != nil {
			return err
		}
	}
	return nil
}

// Accept accepts the current version of a quarantined tool, enables its skill, and records an activity. pin, if not
// empty, is the hash of the version that the admin read. Accept returns [ErrNothingToAccept] if the hash differs, the
// tool is not in quarantine, or it can no longer be a skill, and [ErrNotFound] for an unknown tool.
func Accept(ctx context.Context, db postgres.Beginner, server, tool, pin, agent string) (Tool, error) {
	var accepted Tool
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		r, all, err := lockServer(ctx, tx, server)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(t Tool) bool { return t.Tool == tool || t.Skill == tool })
		if i < 0 {
			return ErrNotFound
		}
		old := all[i]
		switch {
		case old.State != Quarantined:
			return fmt.Errorf("%w: it is %s", ErrNothingToAccept, old.State)
		case old.SeenPin == "":
			return fmt.Errorf("%w: %s", ErrNothingToAccept, old.Reason)
		case pin != "" && pin != old.SeenPin:
			return fmt.Errorf("%w: another version is current; see agent mcp show %s %s", ErrNothingToAccept, server, tool)
		}
		next := old
		next.State, next.Reason, next.Pin, next.Definition = Mounted, "", old.SeenPin, old.Seen
		next.SeenPin, next.Seen = "", json.RawMessage(`{}`)
		switch problem, err := mountProblem(ctx, tx, r, next); {
		case err != nil:
			return err
		case problem != "":
			return fmt.Errorf("it cannot be a skill: %s", problem)
		}
		if accepted, err = writeState(ctx, tx, r, next); err != nil {
			return err
		}
		return recordActivity(ctx, tx, agent, "mcp_accept",
			map[string]any{"server": server, "tool": old.Tool, "pin": old.Pin, "accepted": next.Pin},
			map[string]any{"was": old.Reason})
	})
	if err != nil {
		return Tool{}, fmt.Errorf("accept MCP tool %s/%s: %w", server, tool, err)
	}
	return accepted, nil
}

// recordActivity writes the activity of a change to mounted tools, under the trace of ctx or a new one.
func recordActivity(ctx context.Context, db postgres.DB, agent, skill string, input, output any) error {
	e := activity.Entry{Skill: skill, Input: input}
	if x, ok := executions.Current(ctx); ok {
		e.Claim = x.Claim
	}
	span, _ := trace.From(ctx)
	e.Agent = cmp.Or(span.Agent, agent)
	if span.TraceID == "" {
		e.TraceID, e.Surface = string(trace.New(trace.Operate)), string(trace.Operate)
	}
	_, err := activity.Note(ctx, db, e, activity.Outcome{Output: output})
	return err
}
