package channels

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// slowFiles is a transport whose files take ten seconds each.
type slowFiles struct{ Transport }

func (slowFiles) Fetch(ctx context.Context, _ File, _ int64) ([]byte, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(10 * time.Second):
		return []byte("content"), nil
	}
}

// Slow files leave time for the turn in the last attempt to read them.
func TestSlowFilesDoNotStopTheirMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), claimTTL-5*time.Second)
		defer cancel()
		w := &worker{Runner: &Runner{Logger: slog.New(slog.DiscardHandler)}, transport: slowFiles{}}
		text, files, err := w.fetchFiles(ctx, entry{Files: make([]File, maxFiles), Attempts: maxFetches})
		require.NoError(t, err)
		assert.Equal(t, maxFiles, len(files)+strings.Count(text, "is missing"))
		assert.True(t, len(files) > 2, len(files))
		assert.NoError(t, ctx.Err())
	})
}
