package automations

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// PausedFor lists the automations that are paused for a skill, by name. The database pauses them when the skill is disabled, whoever
// disables it, and resumes exactly those when it is enabled: one whose time came meanwhile is due once.
func PausedFor(ctx context.Context, db postgres.DB, skill string) ([]string, error) {
	rows, err := db.Query(ctx, `
		select name from agent_automations where skill_name = @skill and paused_for = @skill and not enabled`,
		pgx.StrictNamedArgs{"skill": skill})
	return sortedNames(rows, err, "list automations paused for skill "+skill)
}

// Enable puts an automation into service, whoever took it out. False when it is in service already;
// [ErrNotFound] when there is none, [ErrProposal] when nobody has accepted it yet, [ErrSkillDisabled] while its skill is
// disabled. On error nothing is changed.
func Enable(ctx context.Context, db postgres.DB, name string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automations a
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '', updated_at = clock_timestamp()
		 where a.name = @name and not a.enabled and a.disabled_by <> 'proposal'
		   and not exists (select from agent_skills k where k.name = a.skill_name and not k.enabled)`, pgx.StrictNamedArgs{"name": name})
	if err != nil {
		return false, fmt.Errorf("enable automation %q: %w", name, err)
	}
	a, err := Get(ctx, db, name)
	switch {
	case err != nil:
		return false, err
	case a.DisabledBy == Proposal:
		return false, fmt.Errorf("enable automation %q: %w", name, ErrProposal)
	case !a.Enabled:
		return false, fmt.Errorf("enable automation %q: enable skill %s first: %w", name, a.SkillName, ErrSkillDisabled)
	}
	return tag.RowsAffected() > 0, nil
}

// Disable takes an automation out of service, by an admin's word; it does not resume with its skill, also
// when it was paused for that. A proposal is refused that way. False when an admin has disabled it already; [ErrNotFound]
// when there is none.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" || by == SelfHeal || by == Proposal {
		return false, fmt.Errorf("disable automation %q: %w", name, errors.New("name the admin who does it"))
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(), paused_for = '',
		       decided_by = case when disabled_by = 'proposal' then @by else decided_by end, updated_at = clock_timestamp()
		 where name = @name and (enabled or paused_for <> '' or disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"name": name, "by": clip(by), "reason": clip(reason)})
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
