package sleep_test

import (
	"context"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

func TestEndedContextEndsWait(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	assert.True(t, sleep.For(ctx, time.Nanosecond), "the time did not pass")
	cancel()
	assert.True(t, !sleep.For(ctx, time.Hour), "the time passed")
}
