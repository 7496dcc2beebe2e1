package webhooks_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestSlackFormat(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	receiver := newReceiver(t, respondWith(http.StatusOK))
	d := webhooks.TargetDefinition{Name: "slack", URL: "${SLACK_URL}", Format: webhooks.FormatSlack, Events: []string{"*"}}
	_, err := webhooks.PutTarget(t.Context(), pool, d)
	require.NoError(t, err)
	client, err := skills.NewGuardedClient([]string{receiver.host(t)}, nil)
	require.NoError(t, err)
	var log bytes.Buffer
	dispatcher := &webhooks.Dispatcher{
		Pool: pool, Client: client, Logger: slog.New(slog.NewTextHandler(&log, nil)), PublicURL: "https://agent.example.com/",
		Getenv: func(name string) string {
			return map[string]string{"SLACK_URL": receiver.URL + "/services/T0/hidden"}[name]
		},
	}
	for _, event := range []string{
		`'verdict.changed', '', '{"state": "degraded", "previous": "working", "why": [{"text": "flow <!channel> failing"}]}'`,
		`'budget.reached', '', '{"scope": "day", "unit": "usd", "percent": 80, "spent": 8.1, "limit": 10}'`,
		`'approval.requested', '', '{"id": "a1", "skill_name": "refund"}'`,
		`'execution.failed', '', '{"id": "e1", "flow": "import", "error_message": "no route"}'`,
	} {
		pgtest.Exec(t, pool, `select lanekeeper.emit_agent_webhook(`+event+`)`)
	}
	stop := testkit.Run(t, dispatcher.Run)
	pgtest.Until(t, pool, 4, `select count(*) from agent_webhook_outbox where status = 'sent'`)
	stop() // the test reads its output below
	got := map[string]bool{}
	for _, body := range receiver.bodies {
		var payload map[string]string
		err := json.Unmarshal([]byte(body), &payload)
		assert.Truef(t, err == nil && len(payload) == 1, "body %s: %v", body, err)
		got[payload["text"]] = true
	}
	for _, want := range []string{
		"The agent is degraded, was working: flow &lt;!channel&gt; failing <https://agent.example.com/|Open>",
		"Today's budget (day) is at 80 %: $8.10 of $10.00 <https://agent.example.com/spend?days=1|Open>",
		"Approval requested: refund <https://agent.example.com/approvals/a1|Open>",
		"execution failed: import: no route <https://agent.example.com/executions/e1|Open>",
	} {
		assert.Truef(t, got[want], "no %q in %v", want, got)
	}
	pgtest.Equal(t, pool, 0, `select count(*) from agent_activity where concat(input, output, error_message) like '%hidden%'`)
	assert.Truef(t, !strings.Contains(log.String(), "hidden"), "the log has the address:\n%s", &log)
	all, err := webhooks.Targets(t.Context(), pool)
	require.NoError(t, err)
	assert.Equal(t, "${SLACK_URL}", all[0].URL)
}
