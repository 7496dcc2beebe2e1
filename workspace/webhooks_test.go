package workspace_test

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/webhooks"
	"github.com/lanekeeper/lanekeeper/workspace"
)

const hooks = `
kind: webhook
name: github
scheme: github
secrets: ["${GITHUB_SECRET}", "file:/run/secrets/github"]
max_bytes: 26214400
actions:
  - when: {header.x-github-event: issues, body.action: [opened, reopened]}
    event: EVENT_COMPLETED
    key: "issue-{body.issue.number}"
    data: {title: body.issue.title}
  - when: {header.x-github-event: push}
    prompt: Look at the push to {body.ref}.
---
kind: webhook_target
name: ops
url: https://example.com/hook
secrets: ["${OPS_SECRET}"]
events: [execution.failed, "webhook.*"]
`

func loadText(t *testing.T, text string) (workspace.Workspace, error) {
	t.Helper()
	return workspace.Load(fstest.MapFS{"hooks.yaml": {Data: []byte(text)}})
}

func TestApplyWebhooks(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w, err := loadText(t, hooks)
	require.NoError(t, err)
	apply(t, pool, w)
	diff := apply(t, pool, w)
	assert.Truef(t, diff.Empty(), "applied again it changes something: %+v", diff)
	e, err := webhooks.GetEndpoint(t.Context(), pool, "github")
	require.NoError(t, err)
	assert.NoDiff(t, w.Webhooks[0].Definition.Actions, e.Actions)
	_, err = webhooks.SetEndpoint(t.Context(), pool, "github", false, "admin", "noisy")
	require.NoError(t, err)
	w, err = loadText(t, strings.Replace(hooks, "execution.failed", "execution.completed", 1))
	require.NoError(t, err)
	w.Webhooks[0].Definition.MaxAttempts = 9
	var changed []string
	for _, item := range apply(t, pool, w).Items {
		for _, c := range item.Changes {
			changed = append(changed, item.Kind+" "+c.Field)
		}
	}
	assert.NoDiff(t, []string{"webhook settings.max_attempts", "webhook_target events"}, changed)
	if e, err = webhooks.GetEndpoint(t.Context(), pool, "github"); err != nil || e.Enabled || e.Settings.MaxAttempts != 9 {
		t.Errorf("enabled %v, %d attempts, %v", e.Enabled, e.Settings.MaxAttempts, err)
	}
	assert.Equal(t, 2, apply(t, pool, workspace.Workspace{}).Count(workspace.Remove))
}

func TestInvalidWebhooks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ old, new, want string }{
		"a literal secret":        {`"${GITHUB_SECRET}"`, `whsec_AAAA`, `hooks.yaml:5:11: secrets[0]: is not a reference`},
		"a relative file":         {`file:/run/secrets/github`, `file:github`, `secrets[1]: is not a reference`},
		"an unknown scheme":       {`scheme: github`, `scheme: sha1`, `scheme: "sha1" is not one of`},
		"a decision":              {`EVENT_COMPLETED`, `APPROVAL_DECIDED`, `"APPROVAL_DECIDED" is not an event that a webhook may raise`},
		"the end of an execution": {`event: EVENT_COMPLETED`, `resume: agent`, `resume: "agent" is not one of`},
		"a Go template":           {`{body.issue.number}`, `{{.body.issue.number}}`, `braces that are not a placeholder`},
		"a misspelt root":         {`{body.issue.number}`, `{bdy.issue.number}`, `key: has braces that are not a placeholder`},
		"a path that is none":     {`body.action:`, `payload.action:`, `"payload.action" is not a path`},
		"two actions in one":      {`    prompt:`, "    automation: x\n    prompt:", `exactly one of`},
		"no key":                  {`    key: "issue-{body.issue.number}"`, ``, `key: is empty`},
		"too many bytes":          {`26214400`, `26214401`, `max_bytes: must be between`},
		"a user in the URL":       {`https://example.com`, `https://u:p@example.com`, `contains a user or a password`},
		"an unknown challenge":    {`scheme: github`, "scheme: github\nchallenge: x", `challenge: must be slack or meta`},
		"a literal token": {
			`scheme: github`, "scheme: github\nchallenge: meta\nverify_token: whsec_AAAA", `verify_token: must be a reference`,
		},
		"an id that is not signed": {
			`scheme: github`, "scheme: hmac\nhmac: {id_header: X-Id, signed: \"{body}\"}", `hmac.signed: needs`,
		},
		"an unknown event": {`execution.failed`, `execution.fialed`, `is not an event of the agent`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := loadText(t, strings.Replace(hooks, c.old, c.new, 1))
			assert.ErrorContains(t, err, c.want)
			assert.True(t, err == nil || !strings.Contains(err.Error(), "whsec_AAAA"), "the error has the secret")
		})
	}
}

// Apply accepts the channels of an example, and names every mistake in one.
func TestApplyChannels(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w, err := workspace.LoadDir("../examples/telegram")
	require.NoError(t, err)
	apply(t, pool, w)
	diff := apply(t, pool, w)
	assert.Truef(t, diff.Empty(), "applied again it changes something: %+v", diff)
	_, err = loadText(t, `
kind: channel
name: support
type: telegram
secrets: {token: literal, key: "${KEY}"}
settings: {mode: pigeon}
pairing: maybe
`)
	for _, want := range []string{
		"token is no reference", `"key" is unknown`, "mode must be polling or webhook", "pairing: must be required or open",
	} {
		assert.ErrorContains(t, err, want)
	}
}
