package selfheal

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Restored is how a skill came back, or did not; it has what an activity row needs.
type Restored struct {
	Skill       string   `json:"skill"`
	Settled     bool     `json:"settled"` // something was decided now
	Enabled     bool     `json:"enabled"`
	By          string   `json:"by"`
	Reason      string   `json:"reason"`
	WasReason   string   `json:"was_reason"`  // why it was disabled
	Automations []string `json:"automations"` // put back into service
}

// Reenable puts a disabled skill back into service, whoever disabled it, and with it exactly the
// automations that were paused for it. The count starts afresh: nothing before now counts. A
// skill in service stays so. by and reason go into the activity that the caller writes. The error wraps
// skills.ErrNotFound.
func Reenable(ctx context.Context, db postgres.Beginner, skill, by, reason string) (Restored, error) {
	restored := Restored{Skill: skill, Enabled: true, By: by, Reason: reason, Automations: []string{}}
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		before, err := skills.Get(ctx, tx, skill)
		if err != nil {
			return err
		}
		restored.WasReason = before.DisabledReason
		if restored.Automations, err = automations.PausedFor(ctx, tx, skill); err != nil {
			return err
		}
		restored.Settled, err = skills.Enable(ctx, tx, skill, by, reason)
		return err
	})
	if err != nil {
		return Restored{Skill: skill, Automations: []string{}}, fmt.Errorf("re-enable skill %s: %w", skill, err)
	}
	return restored, nil
}
