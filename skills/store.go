package skills

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Put stores the declaration d and reports whether it changed anything. The revision grows unless only the source
// changes. The state (enabled, disabled, evidence) stays. A declaration of the binary never replaces another source, so
// a workspace may override a builtin. For an invalid definition, Put returns an error.
func Put(ctx context.Context, db postgres.DB, d Definition, source string) (changed bool, err error) {
	r, err := resolve(d)
	if err != nil {
		return false, fmt.Errorf("put skill %q: %w", d.Name, err)
	}
	tag, err := db.Exec(ctx, `
		insert into agent_skills as s
		       (name, description, tool_definition, handler, config, scope, trust, four_eyes, idempotent, timeout_ms,
		       source)
		values (@name, @description, @tool, @handler, @config, @scope, @trust, @four_eyes, @idempotent, @timeout_ms,
		       @source)
		on conflict (name) do update
		   set description = excluded.description, tool_definition = excluded.tool_definition,
		       handler = excluded.handler, config = excluded.config, scope = excluded.scope,
		       trust = excluded.trust, four_eyes = excluded.four_eyes, idempotent = excluded.idempotent,
		       timeout_ms = excluded.timeout_ms, source = excluded.source, updated_at = clock_timestamp(),
		       revision = s.revision + (
		           (s.tool_definition, s.handler, s.config, s.scope, s.trust, s.four_eyes, s.idempotent, s.timeout_ms)
		           is distinct from (excluded.tool_definition, excluded.handler, excluded.config, excluded.scope,
		           excluded.trust, excluded.four_eyes, excluded.idempotent, excluded.timeout_ms))::int
		 where (s.source = excluded.source or excluded.source <> @builtin)
		   and (s.tool_definition, s.handler, s.config, s.scope, s.trust, s.four_eyes, s.idempotent, s.timeout_ms, s.source)
		       is distinct from (excluded.tool_definition, excluded.handler, excluded.config, excluded.scope,
		       excluded.trust, excluded.four_eyes, excluded.idempotent, excluded.timeout_ms, excluded.source)`,
		pgx.StrictNamedArgs{
			"name": r.name, "description": r.description, "tool": r.tool, "handler": r.handler, "config": r.config,
			"scope": r.scope, "trust": r.trust, "four_eyes": r.fourEyes, "idempotent": r.idempotent,
			"timeout_ms": r.timeout.Milliseconds(), "source": source, "builtin": SourceBuiltin,
		})
	return postgres.Changed(tag, err, fmt.Sprintf("put skill %q", d.Name))
}

// Remove deletes the workspace's skills except keep, and returns their names. A builtin that a workspace overrode
// returns with the binary's next [Put].
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.DeleteOthers(ctx, db, "skills", "agent_skills", keep)
}

// Delete removes the named skills of source and reports whether any existed.
func Delete(ctx context.Context, db postgres.DB, source string, names ...string) (bool, error) {
	tag, err := db.Exec(ctx, `delete from agent_skills where source = @source and name = any(@names::text[])`,
		pgx.StrictNamedArgs{"source": source, "names": append([]string{}, names...)})
	return postgres.Changed(tag, err, fmt.Sprintf("delete skills of source %s", source))
}

// columns are the columns of a [Skill].
const columns = `id, name, description, tool_definition, handler, config, scope, trust, four_eyes, idempotent,
	timeout_ms, enabled, disabled_reason, disabled_by, disabled_at, enabled_at, trial_at, evidence, revision,
	state_revision, source, created_at, updated_at`

// Get returns one skill, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Skill, error) {
	return postgres.RowOr[Skill](ctx, db, ErrNotFound, fmt.Sprintf("get skill %q", name),
		`select `+columns+` from agent_skills where name = @name`,
		pgx.StrictNamedArgs{"name": name})
}

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Enabled    *bool
	Scope      string // exactly this scope
	Source     string
	DisabledBy string
	Before     string // an id; List returns only older rows
	Limit      int    // 100 when 0, at most 1000
}

// List returns skills, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Skill, error) {
	return postgres.Rows[Skill](ctx, db, "list skills", `
		select `+columns+` from agent_skills
		 where (@enabled::boolean is null or enabled = @enabled)
		   and (@scope = '' or scope = @scope)
		   and (@source = '' or source = @source)
		   and (@disabled_by = '' or disabled_by = @disabled_by)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"enabled": f.Enabled, "scope": f.Scope, "source": f.Source, "disabled_by": f.DisabledBy,
			"before": f.Before, "limit": postgres.PageSize(f.Limit, 100, 1000),
		})
}

// InScope returns the skills of the given scopes and of [ScopeBoth], including disabled skills, by name. No scope means
// all scopes.
func InScope(ctx context.Context, db postgres.DB, scopes []string) ([]Skill, error) {
	return inScope(ctx, db, scopes, false)
}

func inScope(ctx context.Context, db postgres.DB, scopes []string, enabled bool) ([]Skill, error) {
	return postgres.Rows[Skill](ctx, db, "list available skills", `
		select `+columns+` from agent_skills
		 where (enabled or not @enabled::bool)
		   and (scope = 'both' or scope = any(@scopes::text[]) or cardinality(@scopes::text[]) = 0)
		 order by name`, pgx.StrictNamedArgs{"scopes": append([]string{}, scopes...), "enabled": enabled})
}

// QueueCallable queues a read of the callable skills of the given scopes and of [ScopeBoth], by name. Enabled skills
// are callable, and so are disabled skills with an open trial.
func QueueCallable(b *pgx.Batch, scopes []string, into *[]Skill) {
	b.Queue(`
		select `+columns+` from agent_skills
		 where (scope = 'both' or scope = any(@scopes::text[]))
		   and (enabled
		        or trial_at is not null
		           -- no other call has the trial now
		           and (evidence #>> '{trial,until}')::timestamptz > clock_timestamp() is not true)
		 order by name`, pgx.StrictNamedArgs{"scopes": scopes}).Query(func(rows pgx.Rows) (err error) {
		*into, err = postgres.Collect(rows, nil, "list callable skills", pgx.RowToStructByName[Skill])
		return err
	})
}

// marshalEvidence encodes evidence; nil is the empty object.
func marshalEvidence(evidence any) (json.RawMessage, error) {
	if evidence == nil {
		return json.RawMessage(`{}`), nil
	}
	return encodeResult(evidence)
}

// Enable enables a disabled skill and ends its trial. Earlier failures no longer count. Enable stores by and reason as
// evidence; the caller writes the activity. It returns false for an enabled skill, and [ErrNotFound] for an unknown
// one.
func Enable(ctx context.Context, db postgres.DB, name, by, reason string) (bool, error) {
	evidence, err := marshalEvidence(map[string]string{"enabled_by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("enable skill %q: %w", name, err)
	}
	tag, err := db.Exec(ctx, `
		update agent_skills
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, trial_at = null,
		       enabled_at = clock_timestamp(), evidence = @evidence, updated_at = clock_timestamp()
		 where name = @name and not enabled`, pgx.StrictNamedArgs{"name": name, "evidence": evidence})
	if err != nil {
		return false, fmt.Errorf("enable skill %q: %w", name, err)
	}
	return wasChanged(ctx, db, name, tag.RowsAffected())
}

// Disable disables a skill. by names the actor and must not be empty: "self_heal", "mcp" or an admin. evidence encodes
// as a JSON object; nil is the empty one. For a disabled skill, Disable returns false and changes nothing. An exception
// is a skill that self-heal or mcp disabled: an admin may disable it, too, so that only an admin enables it again.
// Disable returns [ErrNotFound] for an unknown skill.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string, evidence any) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("disable skill %q: an actor is required", name)
	}
	encoded, err := marshalEvidence(evidence)
	if err != nil {
		return false, fmt.Errorf("disable skill %q: write the evidence: %w", name, err)
	}
	tag, err := db.Exec(ctx, `
		update agent_skills
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(),
		       trial_at = null, evidence = @evidence, updated_at = clock_timestamp()
		 where name = @name
		   and (enabled or disabled_by in ('self_heal', 'mcp') and @by not in ('self_heal', 'mcp'))`,
		pgx.StrictNamedArgs{"name": name, "by": replaceNUL(by), "reason": replaceNUL(reason), "evidence": encoded})
	if err != nil {
		return false, fmt.Errorf("disable skill %q: %w", name, err)
	}
	return wasChanged(ctx, db, name, tag.RowsAffected())
}

func wasChanged(ctx context.Context, db postgres.DB, name string, rows int64) (bool, error) {
	if rows > 0 {
		return true, nil
	}
	_, err := Get(ctx, db, name)
	return false, err
}

// FailTrial ends a failed trial and restarts the cool-down. It returns false for a skill that is not on trial.
func FailTrial(ctx context.Context, db postgres.DB, name, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_skills
		   set trial_at = null, disabled_at = clock_timestamp(), disabled_reason = @reason, updated_at = clock_timestamp()
		 where name = @name and not enabled and trial_at is not null`,
		pgx.StrictNamedArgs{"name": name, "reason": replaceNUL(reason)})
	return postgres.Changed(tag, err, fmt.Sprintf("fail trial of skill %q", name))
}

// LockRevision locks a skill until the transaction ends. It returns a [*postgres.StaleError] if the skill's state has
// another revision, and [ErrNotFound] if there is no such skill. For revision 0, LockRevision does nothing.
func LockRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	return postgres.LockRevision(ctx, tx, "skill", `
		select state_revision from agent_skills where name = @name for update`, name, revision, ErrNotFound)
}
