package agents

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// row is a row of agent_agents.
type row struct {
	Name       string
	Version    int
	Definition Definition
	Source     string
	CreatedAt  time.Time
}

// Put makes d the current version of d.Name, and reports whether anything changed. Turns under way keep theirs. Two
// calls for one name at once must be kept apart by the caller, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition, source string) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put agent %q: %w", d.Name, err)
	}
	text, err := json.Marshal(d)
	if err != nil {
		return false, fmt.Errorf("put agent %q: %w", d.Name, err)
	}
	sum := sha256.Sum256(text)
	tag, err := db.Exec(ctx, `
		with same as (
		  select from agent_agents where name = @name and current and digest = @digest and source = @source),
		before as (
		  update agent_agents set current = false
		   where name = @name and current and not exists (select from same)
		  returning 1)
		insert into agent_agents (name, version, digest, definition, is_default, source)
		select @name, coalesce((select max(a.version) from agent_agents a where a.name = @name), 0) + 1,
		       @digest, @definition, @default, @source
		 where (select count(*) from before) >= 0 and not exists (select from same)`,
		postgres.Strict{
			"name": d.Name, "digest": hex.EncodeToString(sum[:16]), "definition": text, "default": d.Default,
			"source": source,
		})
	if err != nil {
		return false, fmt.Errorf("put agent %q: %w", d.Name, err)
	}
	return tag.RowsAffected() > 0, nil
}

// Remove takes the agents of source that are not among keep out of service, and returns their names. Their versions
// stay, for the turns that have begun with them.
func Remove(ctx context.Context, db postgres.DB, source string, keep []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		update agent_agents set current = false
		 where current and source = @source and name <> all(@keep::text[])
		returning name`,
		postgres.Strict{"source": source, "keep": append([]string{}, keep...)})
	if err != nil {
		return nil, fmt.Errorf("remove agents of source %s: %w", source, err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("remove agents of source %s: %w", source, err)
	}
	slices.Sort(names)
	return names, nil
}

// current reads the agents in service, the default first, then by name.
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
		 where current order by not is_default, name`).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
		if err == nil {
			use(all)
		}
		return err
	})
}

// version reads one version of an agent, of a removed one, too.
func version(ctx context.Context, db postgres.DB, name string, number int) (row, error) {
	rows, err := db.Query(ctx, `
		select name, version, definition, source, created_at from agent_agents
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": number})
	if err != nil {
		return row{}, fmt.Errorf("read agent %s: %w", name, err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[row])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return row{}, fmt.Errorf("read version %d of agent %s: %w", number, name, err)
	}
	return got, nil
}

// Versions lists the versions of an agent, the newest first; [ErrNotFound] when there is none.
func Versions(ctx context.Context, db postgres.DB, name string) ([]int, error) {
	rows, err := db.Query(ctx, `select version from agent_agents where name = @name order by version desc`,
		postgres.Strict{"name": name})
	if err != nil {
		return nil, fmt.Errorf("list versions of agent %s: %w", name, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err == nil && len(all) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("list versions of agent %s: %w", name, err)
	}
	return all, nil
}
