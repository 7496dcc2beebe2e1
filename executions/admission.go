package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Admission limits how many executions of a flow or surface run at once, over all processes. All other executions stay
// in the queue, by priority and age. A cancel ends them there. A notification lets the next execution use a free slot
// at once. A waiting execution holds no slot.
//
// Admission counts but never delays two kinds of runs. RunSync and InsertClaimed insert claimed executions because a
// caller waits, as for a chat turn. External workers lock executions themselves.
type Admission struct {
	Kind    string `json:"kind"` // flow or surface
	Name    string `json:"name"`
	Running int    `json:"running"` // 0 stops them
}

// SetLimits replaces all limits, for all processes. Running executions continue.
func (e *Engine) SetLimits(ctx context.Context, limits []Admission) error {
	if limits == nil {
		limits = []Admission{}
	}
	text, err := json.Marshal(limits)
	if err != nil {
		return fmt.Errorf("encode limits: %w", err)
	}
	if _, err := e.pool.Exec(ctx, `select set_agent_limits(@limits)`,
		postgres.Strict{"limits": json.RawMessage(text)}); err != nil {
		return fmt.Errorf("set limits of executions: %w", err)
	}
	e.Poll()
	return nil
}
