package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestThreadsFromTheCommandLine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	contains(t, p.must("threads", "clean"), "nothing to free")
	db := connect(t, url)
	for _, sql := range []string{
		`insert into agent_threads (id, channel, participant) values ('maria', 'chat', 'Maria')`,
		`select acquire_agent_lock('thread:maria', 'somebody', 600)`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if got := p.must("threads", "send", "maria", "a word from the office"); got != "queued behind somebody\n" {
		t.Errorf("send: %q", got)
	}
	locks := p.must("threads", "locks")
	for _, want := range []string{"maria", "Maria", "somebody", "active", "QUEUED", "1"} {
		contains(t, locks, want)
	}
	contains(t, p.must("threads", "locks", "--stale"), "no thread is held")
	contains(t, p.must("threads", "show", "maria"), "maria  chat, Maria\n", "queued")
	if _, err := db.Exec(t.Context(), `update agent_locks set expires_at = clock_timestamp() - interval '2 minutes'`); err != nil {
		t.Fatal(err)
	}
	contains(t, p.must("threads", "locks", "--stale"), "stale")
	if got := p.must("threads", "clean", "--json"); !strings.Contains(got, `"thread_id": "maria"`) || !strings.Contains(got, `"idle_seconds": 72`) {
		t.Errorf("clean: %s", got)
	}
	contains(t, p.must("threads", "show", "maria"), "a word from the office")
	contains(t, p.must("threads", "send", "maria", "and another"), "sent as message 2")
	if got := p.must("threads", "send", "maria", "a third", "--json"); !strings.Contains(got, `"success": true`) || !strings.Contains(got, `"queued": false`) {
		t.Errorf("send: %s", got)
	}
	if got := p.run("threads", "send", "nobody", "hello"); got.code == 0 || !strings.Contains(got.err, "no such thread") {
		t.Errorf("to nobody: %+v", got)
	}
	if got := p.run("threads", "send", "maria", " "); got.code == 0 || !strings.Contains(got.err, "content") {
		t.Errorf("nothing: %+v", got)
	}
}

// Who cannot be let in is refused, with what to do, and what is not there is named.
func TestThreadsOpenRefusesWhoCannotBeLetIn(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	if _, err := connect(t, url).Exec(t.Context(), `insert into agent_threads (id, channel, owner_kind) values ('maria', 'chat', 'admin')`); err != nil {
		t.Fatal(err)
	}
	p := on(t, url, "AGENT_CHAT_KEY=shop=the-keys-own-secret-0123456789abcdef,site=another-secret-of-0123456789abcdef", "AGENT_CHAT_BROWSER_KEYS=site")
	for name, test := range map[string]struct {
		args []string
		says string
	}{
		"an unknown key":      {[]string{"threads", "open", "maria", "--key", "shpo"}, `there is no chat key named "shpo"; AGENT_CHAT_KEY has shop, site`},
		"a browser's key":     {[]string{"threads", "open", "maria", "--key", "site"}, "agent threads invite"},
		"an unknown endpoint": {[]string{"threads", "open", "maria", "--webhook", "nope"}, "nope"},
		"an unknown thread":   {[]string{"threads", "access", "mario"}, "agent threads ls"},
		"an unknown access":   {[]string{"threads", "revoke", "maria", "0192a000-0000-7000-8000-000000000000"}, "the thread has no such access; see agent threads access maria"},
	} {
		if got := p.run(test.args...); got.code == 0 || !strings.Contains(got.err, test.says) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	contains(t, p.must("threads", "open", "maria", "--key", "shop"), "open to key shop")
}
