package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestThreadsFromTheCommandLine(t *testing.T) {
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
