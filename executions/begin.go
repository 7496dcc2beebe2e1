package executions

import (
	"context"
	"time"
)

// startRiver starts River, also when the database goes away in that moment. What had started of it by then River has stopped.
func (e *Engine) startRiver(ctx, living context.Context) error {
	for {
		err := e.river.Start(living)
		if err == nil || !transient(err) || ctx.Err() != nil {
			return err
		}
		e.warnUnavailable(ctx, err)
		if !sleep(ctx, time.Second) {
			return err
		}
	}
}
