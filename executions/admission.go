package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Admission bounds how many executions of a flow, or of a surface, are run at once, by all processes together. The others
// stay ready in the queue, by priority and then by age, and can be cancelled there; a place that becomes free is taken at
// once. An execution that waits holds no place, and needs one again when its wait has ended.
//
// Two ways in are not held up, and are counted: runs that are inserted already claimed because somebody waits for them
// (RunNow, RunHere, InsertClaimed: chat turns, for example), and runs that workers outside lock.
type Admission struct {
	Kind    string `json:"kind"` // flow or surface
	Name    string `json:"name"`
	Running int    `json:"running"` // 0 stops them
}

// SetLimits makes the limits what is given, for all processes, and no others. Executions that run already go on.
func (e *Engine) SetLimits(ctx context.Context, limits []Admission) error {
	if limits == nil {
		limits = []Admission{}
	}
	text, err := json.Marshal(limits)
	if err != nil {
		return fmt.Errorf("encode limits: %w", err)
	}
	if _, err := e.pool.Exec(ctx, `select set_agent_limits(@limits)`, postgres.Strict{"limits": json.RawMessage(text)}); err != nil {
		return fmt.Errorf("set limits of executions: %w", err)
	}
	e.Look()
	return nil
}
