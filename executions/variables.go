package executions

import (
	"context"
	"encoding/json"
	"fmt"
)

// SetVariables replaces the execution's variables, the state that it shows to others: an object. It is written together
// with the next durable write of the run (a checkpoint, a wait, the end), so it costs no round trip and is lost with
// that write alone. It is not a step: code that replays sets the same variables again.
func SetVariables(ctx context.Context, variables any) error {
	r, err := runOf(ctx)
	if err != nil {
		return err
	}
	text, err := json.Marshal(variables)
	if err != nil {
		return fmt.Errorf("encode variables: %w", err)
	}
	r.mu.Lock()
	r.variables = text
	r.mu.Unlock()
	return nil
}
