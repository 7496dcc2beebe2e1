package channels

import (
	"log/slog"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A killed worker leaves a message whose code was stored, and maybe sent. The next attempt of that message sends
// another code.
func TestARepeatedAttemptSendsACode(t *testing.T) {
	t.Parallel()
	transport := &provider{}
	w := &worker{
		Runner: &Runner{Pool: pgtest.DB(t), Logger: slog.New(slog.DiscardHandler)}, name: "team", transport: transport,
	}
	for _, test := range []struct {
		sender        string
		attempt, sent int
	}{
		{"U1", 1, 1}, {"U1", 1, 1}, {"U2", 1, 2}, {"U3", 1, 3}, {"U1", 2, 4}, {"U4", 1, 4}, {"U4", 2, 4},
	} {
		paired, err := w.checkSender(t.Context(), entry{Sender: test.sender, Attempts: test.attempt})
		require.NoError(t, err)
		assert.True(t, !paired)
		assert.Equal(t, test.sent, transport.sent, test)
	}
}
