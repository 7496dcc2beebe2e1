package logging_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/logging"
)

// A new error is news. The end of the failures says how many there were.
func TestFailuresAreLoggedOnceUntilTheyEnd(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	ended, end := context.WithCancel(t.Context())
	end()
	var f logging.Failures
	try := func(ctx context.Context, err error) string {
		out.Reset()
		f.Log(ctx, log, "not read", err, "queue", "chat")
		_, line, _ := strings.Cut(out.String(), " ")
		return line
	}
	refused, full := errors.New("refused"), errors.New("full")
	assert.Equal(t, "", try(t.Context(), nil))
	assert.Equal(t, "level=WARN msg=\"not read\" queue=chat error=refused\n", try(t.Context(), refused))
	assert.Equal(t, "", try(t.Context(), refused))
	assert.Equal(t, "level=WARN msg=\"not read\" queue=chat error=full\n", try(t.Context(), full))
	assert.Equal(t, "", try(t.Context(), refused)+try(ended, errors.New("cut off")))
	assert.Equal(t, "level=INFO msg=\"working again\" queue=chat after=\"not read\" failures=4\n", try(t.Context(), nil))
	assert.Equal(t, "level=WARN msg=\"not read\" queue=chat error=refused\n", try(t.Context(), refused))
}
