package flows

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

// Flow is one version of a flow, a row of agent_flows.
type Flow struct {
	Name       string     `json:"name"`
	Version    int        `json:"version"`
	Digest     string     `json:"digest"` // of the definition
	Definition Definition `json:"definition"`
	Source     string     `json:"source"`
	Current    bool       `json:"current"` // a new execution begins with it
	CreatedAt  time.Time  `json:"created_at"`
}

// Put makes d the version with which new executions of d.Name begin, and reports whether anything changed. Executions
// that run keep theirs. Two calls for one name at once must be kept apart by the caller, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition, source string) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put flow %q: %w", d.Name, err)
	}
	text, err := json.Marshal(d)
	if err != nil {
		return false, fmt.Errorf("put flow %q: %w", d.Name, err)
	}
	sum := sha256.Sum256(text)
	tag, err := db.Exec(ctx, `
		with same as (
		  select from agent_flows where name = @name and current and digest = @digest and source = @source),
		before as (
		  update agent_flows set current = false where name = @name and current and not exists (select from same) returning 1)
		insert into agent_flows (name, version, digest, definition, source)
		select @name, coalesce((select max(f.version) from agent_flows f where f.name = @name), 0) + 1, @digest, @definition, @source
		 where (select count(*) from before) >= 0 and not exists (select from same)`,
		postgres.Strict{"name": d.Name, "digest": hex.EncodeToString(sum[:16]), "definition": text, "source": source})
	if err != nil {
		return false, fmt.Errorf("put flow %q: %w", d.Name, err)
	}
	return tag.RowsAffected() > 0, nil
}

// Remove takes the flows of source that are not among keep out of service, and returns their names. Their versions stay, for the
// executions that have begun with them.
func Remove(ctx context.Context, db postgres.DB, source string, keep []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		update agent_flows set current = false where current and source = @source and name <> all(@keep::text[]) returning name`,
		postgres.Strict{"source": source, "keep": append([]string{}, keep...)})
	if err != nil {
		return nil, fmt.Errorf("remove flows of source %s: %w", source, err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("remove flows of source %s: %w", source, err)
	}
	slices.Sort(names)
	return names, nil
}

// Get reads the version of a flow with which new executions begin; [ErrNotFound] when there is none.
func Get(ctx context.Context, db postgres.DB, name string) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows where name = @name and current`,
		postgres.Strict{"name": name})
	return one(rows, err, name)
}

// GetVersion reads one version of a flow, of a removed one, too; [ErrNotFound] when there is none.
func GetVersion(ctx context.Context, db postgres.DB, name string, version int) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": version})
	return one(rows, err, name)
}

func one(rows pgx.Rows, err error, name string) (Flow, error) {
	if err != nil {
		return Flow{}, fmt.Errorf("read flow %s: %w", name, err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Flow])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Flow{}, fmt.Errorf("read flow %s: %w", name, err)
	}
	return got, nil
}

// Filter narrows a listing. The zero value lists the first 100 flows that may begin, by name.
type Filter struct {
	Name   string // all versions of this flow, newest first, instead of the current ones of all
	After  string // the name after which the listing goes on
	Before int    // with Name: only versions before this one
	Limit  int    // 100 when 0, at most 500
}

// List reads flows.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Flow, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where case when @name = '' then current and name > @after else name = @name and (@before = 0 or version < @before) end
		 order by name, version desc limit @limit`,
		postgres.Strict{"name": f.Name, "after": f.After, "before": f.Before, "limit": min(f.Limit, 500)})
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[Flow])
	if err != nil {
		return nil, fmt.Errorf("list flows: %w", err)
	}
	return all, nil
}

// CheckStart says whether an execution of a flow may begin with an input: [ErrRemoved] when the flow was removed,
// *[InvalidInput] when its schema does not take the input. A name that agent_flows has never had is not judged: it
// may be a flow of Go code.
func CheckStart(ctx context.Context, db postgres.DB, name string, input json.RawMessage) error {
	schema, err := startSchema(ctx, db, name)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	compiled, err := compileInput(schema)
	if err != nil {
		return fmt.Errorf("check start of flow %s: %w", name, err)
	}
	_, err = compiled.accept(name, input)
	return err
}

// startSchema reads what a flow takes.
func startSchema(ctx context.Context, db postgres.DB, name string) (schema map[string]any, err error) {
	var current bool
	err = db.QueryRow(ctx, `
		select current, coalesce(definition -> 'input', '{}') from agent_flows where name = @name order by current desc, version desc limit 1`,
		postgres.Strict{"name": name}).Scan(&current, &schema)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("check start of flow %s: %w", name, err)
	case !current:
		return nil, fmt.Errorf("flow %s: %w", name, ErrRemoved)
	}
	return schema, nil
}

// exists reports whether a flow of this name was ever applied.
func exists(ctx context.Context, db postgres.DB, name string) (found bool, err error) {
	err = db.QueryRow(ctx, `select exists (select from agent_flows where name = @name)`, postgres.Strict{"name": name}).Scan(&found)
	if err != nil {
		return false, fmt.Errorf("find flow %s: %w", name, err)
	}
	return found, nil
}
