package skills

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Enable puts a disabled skill back into service: its trial is cleared, and failures before now do
// not count. by and reason are kept as the evidence; the caller writes the activity. False when it is in
// service already; [ErrNotFound] when there is none.
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
	return settled(ctx, db, name, tag.RowsAffected())
}

// Disable takes a skill out of service. by is who does it ("self_heal", an admin) and is not empty;
// evidence is anything that encodes as JSON. False when it is out of service already, and then
// nothing changes, except that an admin's word replaces self-heal's, which makes it permanent; [ErrNotFound] when there is none.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string, evidence any) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("disable skill %q: %w", name, errors.New("nobody is named who does it"))
	}
	encoded, err := marshalEvidence(evidence)
	if err != nil {
		return false, fmt.Errorf("disable skill %q: write the evidence: %w", name, err)
	}
	tag, err := db.Exec(ctx, `
		update agent_skills
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(),
		       trial_at = null, evidence = @evidence, updated_at = clock_timestamp()
		 where name = @name and (enabled or (disabled_by = 'self_heal' and @by <> 'self_heal'))`,
		pgx.StrictNamedArgs{"name": name, "by": noNUL(by), "reason": noNUL(reason), "evidence": encoded})
	if err != nil {
		return false, fmt.Errorf("disable skill %q: %w", name, err)
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

// FailTrial ends a trial, which self-heal began, that failed: the cool-down begins anew. False when the skill is not on trial, and then
// nothing changes.
func FailTrial(ctx context.Context, db postgres.DB, name, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_skills
		   set trial_at = null, disabled_at = clock_timestamp(), disabled_reason = @reason, updated_at = clock_timestamp()
		 where name = @name and not enabled and trial_at is not null`,
		pgx.StrictNamedArgs{"name": name, "reason": noNUL(reason)})
	if err != nil {
		return false, fmt.Errorf("fail trial of skill %q: %w", name, err)
	}
	return tag.RowsAffected() > 0, nil
}
