package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

const hooks = `
kind: webhook
name: shop
scheme: standard
secrets: ["${SHOP_SECRET}"]
actions: [{event: EVENT_COMPLETED, key: "order-{body.id}"}]
---
kind: webhook_target
name: ops
url: https://example.com/hook
secrets: ["${OPS_SECRET}"]
events: [execution.failed]
`

func TestWebhooksOnTheCommandLine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "hooks.yaml"), []byte(hooks), 0o600); err != nil {
		t.Fatal(err)
	}
	p.must("apply", dir)
	db := connect(t, url)
	_, err := db.Exec(t.Context(), `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body, body_sha256, error_message)
		values ('shop', 'msg_1', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'dead', '{"X-Shop": ["a"]}',
		        '{"id": 7, "password": "hunter2", "text": "\\u001b[2J"}', 'abc', 'action 1: it failed')`)
	if err != nil {
		t.Fatal(err)
	}
	for command, wants := range map[string][]string{
		"endpoints":                        {"shop", "standard", "/webhooks/shop", "set the environment variable SHOP_SECRET"},
		"targets":                          {"ops", "https://example.com/hook", "execution.failed"},
		"ls --status dead --endpoint shop": {"msg_1", "action 1: it failed"},
		"ls --json":                        {`"delivery_id": "msg_1"`, `"next_cursor": null`},
		"show msg_1":                       {"X-Shop", `"id": 7`, "first trace", `\u001b[2J`},
		"show msg_1 --json":                {`"body": {`},
		"enable ops --target":              {"target ops is enabled already\n"},
		"ls --status done":                 {"no delivery matches"},
	} {
		got := p.must(append([]string{"webhooks"}, strings.Fields(command)...)...)
		for _, want := range wants {
			if !strings.Contains(got, want) {
				t.Errorf("webhooks %s has no %q:\n%s", command, want, got)
			}
		}
		if strings.Contains(got, "hunter2") || strings.Contains(got, "\x1b") {
			t.Errorf("webhooks %s shows a secret", command)
		}
	}
	for _, want := range []string{"endpoint shop is disabled\n", "endpoint shop is disabled already\n"} {
		if got := p.must("webhooks", "disable", "shop"); got != want {
			t.Errorf("disable: %q, want %q", got, want)
		}
	}
	if got := p.must("webhooks", "replay", "msg_1"); !strings.Contains(got, "replay 1 of") {
		t.Errorf("replay: %s", got)
	}
	for command, code := range map[string]int{
		"replay msg_1": 1, "show none": 1, "ls --status lost": 2, "enable none": 1, "replay": 2,
	} {
		if got := p.run(append([]string{"webhooks"}, strings.Fields(command)...)...); got.code != code || got.err == "" {
			t.Errorf("webhooks %s: exit %d, %s", command, got.code, got.err)
		}
	}
	var status string
	if err := db.QueryRow(t.Context(), `select status from agent_executions where flow = 'webhook'`).Scan(&status); err != nil || status != "pending" {
		t.Errorf("its execution is %q, %v", status, err)
	}
}
