package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestAgentsAreListedShownAndCompared(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	contains(t, p.must("agents", "ls"), "default", "0")
	contains(t, p.must("agents", "show", "agent"), "AGENT_TIMEZONE", "limits.tokens", "AGENT_MAX_TOKENS")
	const sales = "kind: agent\nname: sales\ndefault: true\ndescription: Orders.\ninstructions: You are Nora.\ntimezone: Europe/Madrid\n" +
		"limits: {tokens: 60000, day_usd: 5}\n"
	const billing = "---\nkind: agent\nname: billing\nkeys: [shop]\nmemory: own\n"
	dir := folder(t, map[string]string{"a.yaml": sales + billing})
	p.must("apply", dir)
	p.must("apply", folder(t, map[string]string{"a.yaml": sales + "effort: low\n" + billing}))
	contains(t, p.must("agents", "ls"), "sales", "default", "Orders.", "billing", "shop", "own")
	contains(t, p.must("agents", "show", "sales"), "version 2 of", "2 in all", "Europe/Madrid", "document", "60000", "You are Nora.")
	contains(t, p.must("agents", "diff", "sales"), "--- sales version 1", "+++ sales version 2", "+effort: low")
	contains(t, p.must("agents", "diff", "sales", "2", "2"), "no difference")
	contains(t, p.must("agents", "diff", "billing"), "+name: billing")
	var shown struct {
		Values []agents.Value
		Model  string
	}
	if err := json.Unmarshal([]byte(p.must("agents", "show", "sales", "--json")), &shown); err != nil || len(shown.Values) < 15 {
		t.Errorf("%d values, %v", len(shown.Values), err)
	}
	p.must("heartbeat", "--agent", "billing")
	for _, list := range [][]string{{"executions", "ls"}, {"trace", "ls"}} {
		contains(t, p.must(append(list, "--agent", "billing")...), "hb_")
		contains(t, p.must(append(list, "--agent", "sales")...), "matches")
	}
	contains(t, p.must("threads", "ls", "--agent", "billing"), "no threads")
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"agents", "show", "nobody"}, 1, `there is no agent "nobody"; see agent agents ls`},
		{[]string{"chat", "--agent", "nobody", "hello"}, 1, `find agent "nobody": no such agent; see agent agents ls`},
		{[]string{"agents", "show", "sales", "--version", "9"}, 1, "agent sales has no version 9: the latest is 2"},
		{[]string{"agents", "diff", "sales", "one"}, 2, `"one" is no version`},
	} {
		got := p.run(c.args...)
		if got.code != c.code {
			t.Errorf("%v: %d %s", c.args, got.code, got.err)
		}
		contains(t, got.err, c.want)
	}
	p.must("apply", "--prune", folder(t, map[string]string{"a.yaml": sales}))
	contains(t, p.run("agents", "show", "billing").err, "agent billing was removed; agent agents show billing --version 1 shows what it was")
}

// A person reads the greeting before the first prompt of a conversation, and not when it goes on.
func TestChatOnATerminalBeginsWithTheGreeting(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	p.must("apply", folder(t, map[string]string{"a.yaml": "kind: agent\nname: nora\ngreeting: Hola, soy Nora.\n"}))
	contains(t, p.onTerminal(t, "hello\n\x04", "chat", "--thread", "ana"), "Hola, soy Nora.\r\n> ")
	if screen := p.onTerminal(t, "\x04", "chat", "--thread", "ana"); strings.Contains(screen, "Hola") {
		t.Errorf("greeted again:\n%s", screen)
	}
}
