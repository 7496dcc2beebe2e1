// Package sleep waits for time to pass.
package sleep

import (
	"context"
	"time"
)

// For waits for d. It returns false when ctx has ended first.
func For(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
