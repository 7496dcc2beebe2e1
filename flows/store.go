package flows

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	Current    bool       `json:"current"` // new executions start with it
	CreatedAt  time.Time  `json:"created_at"`
}

// Put makes d the current version of d.Name and reports whether anything changed. Running executions keep their
// version. The caller serializes calls for one name, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	verb := fmt.Sprintf("put flow %q", d.Name)
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.PutVersion(ctx, db, verb, "agent_flows", d.Name, d, nil)
}

// Remove retires the workspace's flows except keep, and returns their names. Their versions stay, for the executions
// that started with them.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.RetireOthers(ctx, db, "flows", "agent_flows", keep)
}

// Get reads the current version of a flow, or returns [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where name = @name and current`,
		postgres.Strict{"name": name})
	return collectFlow(rows, err, name)
}

// GetVersion reads one version of a flow, even of a removed flow, or returns [ErrNotFound].
func GetVersion(ctx context.Context, db postgres.DB, name string, version int) (Flow, error) {
	rows, err := db.Query(ctx, `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": version})
	return collectFlow(rows, err, name)
}

func collectFlow(rows pgx.Rows, err error, name string) (Flow, error) {
	return postgres.CollectOne(rows, err, ErrNotFound, fmt.Sprintf("read flow %s", name), pgx.RowToStructByName[Flow])
}

// Filter narrows a listing. The zero value lists the first 100 current flows, by name.
type Filter struct {
	Name   string // all versions of this flow, newest first, instead of all current ones
	After  string // the listing continues after this name
	Before int    // with Name: only versions before this one
	Limit  int    // 100 when 0, at most 500
}

// List reads flows.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Flow, error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	return postgres.Rows[Flow](ctx, db, "list flows", `
		select name, version, digest, definition, source, current, created_at from agent_flows
		 where case when @name = '' then current and name > @after
		            else name = @name and (@before = 0 or version < @before) end
		 order by name, version desc limit @limit`,
		postgres.Strict{"name": f.Name, "after": f.After, "before": f.Before, "limit": min(f.Limit, 500)})
}

// CheckStart reports whether an execution of a flow can start with an input. It returns [ErrRemoved] for a removed
// flow and *[InvalidInput] for input that violates the schema. A name outside agent_flows may be a flow in Go, so it
// passes.
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
	_, err = compiled.validate(name, input)
	return err
}

// CheckThread returns [ErrNoThread] if a flow talks and the thread is empty. A flow in Go declares nothing and passes.
func CheckThread(ctx context.Context, db postgres.DB, name, thread string) error {
	if thread != "" {
		return nil
	}
	flow, err := Get(ctx, db, name)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case Talks(flow.Definition):
		return fmt.Errorf("flow %s: %w", name, ErrNoThread)
	}
	return nil
}

// startSchema reads a flow's input schema.
func startSchema(ctx context.Context, db postgres.DB, name string) (schema map[string]any, err error) {
	var current bool
	var input exactMap
	err = db.QueryRow(ctx, `
		select current, coalesce(definition -> 'input', '{}') from agent_flows
		 where name = @name order by current desc, version desc limit 1`,
		postgres.Strict{"name": name}).Scan(&current, &input)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("check start of flow %s: %w", name, err)
	case !current:
		return nil, fmt.Errorf("flow %s: %w", name, ErrRemoved)
	}
	return input, nil
}

// exists reports whether a flow of this name was ever applied.
func exists(ctx context.Context, db postgres.DB, name string) (found bool, err error) {
	err = db.QueryRow(ctx, `select exists (select from agent_flows where name = @name)`,
		postgres.Strict{"name": name}).Scan(&found)
	if err != nil {
		return false, fmt.Errorf("find flow %s: %w", name, err)
	}
	return found, nil
}
