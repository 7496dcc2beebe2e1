package automations

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Pause takes the enabled automations of a skill out of service, for self-heal, and returns their names.
func Pause(ctx context.Context, db postgres.DB, skill, reason string) ([]string, error) {
	rows, err := db.Query(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(),
		       paused_for = @skill, updated_at = clock_timestamp()
		 where skill_name = @skill and enabled
		returning name`, pgx.StrictNamedArgs{"skill": skill, "reason": clip(reason), "by": SelfHeal})
	return sortedNames(rows, err, "pause automations of skill "+skill)
}

// Resume puts the automations that [Pause] paused for a skill back into service, exactly those, and
// returns their names. One whose time came meanwhile is due once.
func Resume(ctx context.Context, db postgres.DB, skill string) ([]string, error) {
	rows, err := db.Query(ctx, `
		update agent_automations
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '', updated_at = clock_timestamp()
		 where paused_for = @skill and not enabled and disabled_by = @by
		returning name`, pgx.StrictNamedArgs{"skill": skill, "by": SelfHeal})
	return sortedNames(rows, err, "resume automations of skill "+skill)
}

// Enable puts an automation into service, whoever took it out. False when it is in service already;
// [ErrNotFound] when there is none, [ErrProposal] when nobody has accepted it yet.
func Enable(ctx context.Context, db postgres.DB, name string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '', updated_at = clock_timestamp()
		 where name = @name and not enabled and disabled_by <> 'proposal'`, pgx.StrictNamedArgs{"name": name})
	if err != nil {
		return false, fmt.Errorf("enable automation %q: %w", name, err)
	}
	if a, err := Get(ctx, db, name); err == nil && a.DisabledBy == Proposal {
		return false, fmt.Errorf("enable automation %q: %w", name, ErrProposal)
	}
	return settled(ctx, db, name, tag.RowsAffected())
}

// Disable takes an automation out of service, by an admin's word; self-heal will not resume it, also
// when it was self-heal that had paused it. A proposal is refused that way. False when an admin has disabled it already; [ErrNotFound]
// when there is none.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" || by == SelfHeal || by == Proposal {
		return false, fmt.Errorf("disable automation %q: %w", name, errors.New("name the admin who does it"))
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(), paused_for = '',
		       decided_by = case when disabled_by = 'proposal' then @by else decided_by end, updated_at = clock_timestamp()
		 where name = @name and (enabled or disabled_by in (@self_heal, 'proposal'))`,
		pgx.StrictNamedArgs{"name": name, "by": clip(by), "reason": clip(reason), "self_heal": SelfHeal})
	if err != nil {
		return false, fmt.Errorf("disable automation %q: %w", name, err)
	}
	return settled(ctx, db, name, tag.RowsAffected())
}

func settled(ctx context.Context, db postgres.DB, name string, rows int64) (bool, error) {
	if rows > 0 {
		return true, nil
	}
	_, err := Get(ctx, db, name)
	return false, err
}
