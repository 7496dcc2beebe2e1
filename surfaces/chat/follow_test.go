package chat_test

import (
	"bufio"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// A process reads a turn that does not run there at most 10 times a second, for all its followers together.
func TestFollowersOfParkedTurnShareItsReads(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("refund", `{}`))
	front, recorder := pgtest.Recorded(t, w.pool)
	p := w.process(t, func(c *chat.Chat) { c.Front, c.KeepAlive = front, 20*time.Millisecond })
	began := time.Now()
	first, err := p.client().CreateChatCompletionStream(t.Context(), says("I want a refund."))
	require.NoError(t, err)
	defer first.Close()
	pgtest.Until(t, w.pool, "waiting", `select status from agent_executions`)
	id := pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
	var group errgroup.Group
	for range 30 {
		group.Go(func() error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
				p.url+"/v1/chat/completions/"+chat.CompletionID(id)+"?stream=true", nil)
			if err != nil {
				return err
			}
			r.Header.Set("Authorization", "Bearer site")
			response, err := http.DefaultClient.Do(r)
			if err != nil {
				return err
			}
			defer response.Body.Close()
			lines := bufio.NewScanner(response.Body)
			for range 100 { // 50 keep-alives
				lines.Scan()
			}
			return lines.Err()
		})
	}
	require.NoError(t, group.Wait())
	reads := 0
	for _, q := range recorder.Queries() {
		if strings.Contains(q.SQL, "from agent_message_drafts") {
			reads++
		}
	}
	most := int(time.Since(began)/(100*time.Millisecond)) + 1
	assert.Truef(t, reads > 0 && reads <= most, "the turn was read %d times, want at most %d", reads, most)
}
