package agents

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Put makes d the current version of d.Name and reports whether anything changed. Running turns keep their version.
// The caller serializes calls for one name, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	verb := fmt.Sprintf("put agent %q", d.Name)
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.PutVersion(ctx, db, verb, "agent_agents", d.Name, d, postgres.Strict{"is_default": d.Default})
}

// Remove retires the workspace's agents except keep, and returns their names. Their versions stay, for running turns.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.RetireOthers(ctx, db, "agents", "agent_agents", keep)
}

// row is a row of agent_agents.
type row struct {
	Name       string
	Version    int
	Definition Definition
	Source     string
	CreatedAt  time.Time
}

// current reads the current agents: the default first, then by name.
func current(ctx context.Context, db postgres.DB) (all []row, err error) {
	b := &pgx.Batch{}
	queueCurrent(b, func(rows []row) { all = rows })
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	return all, nil
}

func queueCurrent(b *pgx.Batch, use func([]row)) {
	b.Queue(`
		select name, version, definition, source, created_at from agent_agents
		 where current order by not is_default, name collate "C"`).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
		if err == nil {
			use(all)
		}
		return err
	})
}

// version reads one version of an agent, even of a removed one.
func version(ctx context.Context, db postgres.DB, name string, number int) (row, error) {
	return postgres.RowOr[row](ctx, db, ErrNotFound, fmt.Sprintf("read version %d of agent %s", number, name), `
		select name, version, definition, source, created_at from agent_agents
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": number})
}

// Versions lists the versions of an agent, the newest first, or returns [ErrNotFound].
func Versions(ctx context.Context, db postgres.DB, name string) ([]int, error) {
	all, err := postgres.Values[int](ctx, db, "list versions of agent "+name,
		`select version from agent_agents where name = @name order by version desc`,
		postgres.Strict{"name": name})
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("list versions of agent %s: %w", name, ErrNotFound)
	}
	return all, err
}
