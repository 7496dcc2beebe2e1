package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// revisions is what show answers, of any kind.
type revisions struct {
	Revision      int
	StateRevision int `json:"state_revision"`
}

func TestAChangeIsMadeOnlyToWhatWasSeen(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	p.must("objectives", "add", "tidy", "--goal", "be tidy")
	for _, name := range []string{"accepted", "rejected"} {
		p.must("skills", "call", "objective_propose", "--args", fmt.Sprintf(`{"name":%q,"goal":"g"}`, name))
		p.must("skills", "call", "automation_propose", "--args", fmt.Sprintf(`{"name":%q,"cron":"0 9 * * 1-5","skill":"recent_activity"}`, name))
	}
	for _, change := range [][]string{
		{"objectives", "pause", "tidy"},
		{"objectives", "resume", "tidy"},
		{"objectives", "accept", "accepted"},
		{"objectives", "reject", "rejected"},
		{"skills", "disable", "recall"},
		{"skills", "enable", "recall"},
		{"automations", "accept", "accepted"},
		{"automations", "disable", "accepted"},
		{"automations", "enable", "accepted"},
		{"automations", "disable", "rejected"},
		{"objectives", "add", "tidy", "--goal", "be very tidy"},
	} {
		name := strings.Join(change, " ")
		var before, after revisions
		p.mustJSON(&before, change[0], "show", change[2])
		read := before.Revision
		if change[0] == "skills" {
			read = before.StateRevision
		}
		for _, other := range []int{read + 1, max(1, read-1)} {
			if other == read {
				continue
			}
			bad := p.run(append(change, "--if-revision", fmt.Sprint(other))...)
			if bad.code != exitFailed || !strings.Contains(bad.err, "nothing was done") || !strings.Contains(bad.err, change[0]+" show NAME") {
				t.Errorf("%s at %d, not %d: %+v", name, other, read, bad)
			}
		}
		if change[1] != "add" {
			if bad := p.run(append(change, "--if-revision", "0")...); bad.code != exitUsage {
				t.Errorf("%s at 0: %+v", name, bad)
			}
		}
		p.mustJSON(&after, change[0], "show", change[2])
		if after != before {
			t.Errorf("%s was refused, and %+v is %+v", name, before, after)
		}
		contains(t, p.must(change[0], "show", change[2]), "revision", fmt.Sprint(read))
		p.must(append(change, "--if-revision", fmt.Sprint(read))...)
		if p.mustJSON(&after, change[0], "show", change[2]); after == before {
			t.Errorf("%s has changed nothing", name)
		}
		if again := p.run(append(change, "--if-revision", fmt.Sprint(read))...); again.code != exitFailed {
			t.Errorf("%s by two admins who saw the same: %+v", name, again)
		}
	}
	if bad := p.run("objectives", "add", "tidy", "--goal", "other", "--if-revision", "0"); bad.code != exitFailed || !strings.Contains(bad.err, "nothing was done") {
		t.Errorf("an objective that must be new replaced one: %+v", bad)
	}
	p.must("objectives", "add", "new", "--goal", "other", "--if-revision", "0")
}
