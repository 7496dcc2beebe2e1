package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// PutEndpoint makes the endpoint d.Name say what d declares and reports whether anything changed. Whether it is in
// service stays as an admin decided.
func PutEndpoint(ctx context.Context, db postgres.DB, d EndpointDefinition, source string) (changed bool, err error) {
	e, err := d.resolve()
	if err != nil {
		return false, fmt.Errorf("put webhook %q: %w", d.Name, err)
	}
	settings, err := json.Marshal(e.Settings)
	if err != nil {
		return false, fmt.Errorf("put webhook %q: %w", d.Name, err)
	}
	actions, err := json.Marshal(e.Actions)
	if err != nil {
		return false, fmt.Errorf("put webhook %q: %w", d.Name, err)
	}
	tag, err := db.Exec(ctx, `
		insert into agent_webhook_endpoints as e (name, description, scheme, secrets, settings, actions, source)
		values (@name, @description, @scheme, @secrets, @settings, @actions, @source)
		on conflict (name) do update
		   set description = excluded.description, scheme = excluded.scheme, secrets = excluded.secrets,
		       settings = excluded.settings, actions = excluded.actions, source = excluded.source, updated_at = clock_timestamp()
		 where (e.description, e.scheme, e.secrets, e.settings, e.actions, e.source) is distinct from
		       (excluded.description, excluded.scheme, excluded.secrets, excluded.settings, excluded.actions, excluded.source)`,
		postgres.Strict{
			"name": e.Name, "description": e.Description, "scheme": string(e.Scheme), "secrets": e.Secrets,
			"settings": settings, "actions": actions, "source": source,
		})
	if err != nil {
		return false, fmt.Errorf("put webhook %q: %w", d.Name, err)
	}
	return tag.RowsAffected() > 0, nil
}

// GetEndpoint reads an endpoint by name; [ErrNotFound] when there is none.
func GetEndpoint(ctx context.Context, db postgres.DB, name string) (Endpoint, error) {
	if !utf8.ValidString(name) || strings.ContainsRune(name, 0) { // PostgreSQL has no such text
		return Endpoint{}, fmt.Errorf("read webhook %q: %w", name, ErrNotFound)
	}
	rows, err := db.Query(ctx, `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by, disabled_at,
		       source, created_at, updated_at
		  from agent_webhook_endpoints where name = @name`, postgres.Strict{"name": name})
	if err != nil {
		return Endpoint{}, fmt.Errorf("read webhook %q: %w", name, err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Endpoint])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Endpoint{}, fmt.Errorf("read webhook %q: %w", name, err)
	}
	return got, nil
}

// Endpoints lists all endpoints by name.
func Endpoints(ctx context.Context, db postgres.DB) ([]Endpoint, error) {
	rows, err := db.Query(ctx, `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by, disabled_at,
		       source, created_at, updated_at
		  from agent_webhook_endpoints order by name`)
	if err != nil {
		return nil, fmt.Errorf("list webhooks: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[Endpoint])
	if err != nil {
		return nil, fmt.Errorf("list webhooks: %w", err)
	}
	return got, nil
}

// RemoveEndpoints deletes the endpoints of source that are not among keep, and returns their names. What they received
// stays.
func RemoveEndpoints(ctx context.Context, db postgres.DB, source string, keep []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		delete from agent_webhook_endpoints where source = @source and name <> all(@keep::text[]) returning name`,
		postgres.Strict{"source": source, "keep": append([]string{}, keep...)})
	return sortedNames(rows, err, "remove webhooks of source "+source)
}

// SetEndpoint takes an endpoint in or out of service, by an admin's word. False when it was so already.
func SetEndpoint(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_webhook_endpoints
		   set enabled = @enabled, disabled_by = case when @enabled then '' else @by end,
		       disabled_reason = case when @enabled then '' else @reason end,
		       disabled_at = case when @enabled then null else clock_timestamp() end, updated_at = clock_timestamp()
		 where name = @name and enabled <> @enabled`,
		postgres.Strict{"name": name, "enabled": enabled, "by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("change webhook %q: %w", name, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	_, err = GetEndpoint(ctx, db, name)
	return false, err
}

func sortedNames(rows pgx.Rows, err error, what string) ([]string, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	slices.Sort(names)
	return names, nil
}
