package cuts_test

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// exception is an end that differs from that of the undisturbed run, or that somebody outside had to ask again, for a
// reason.
type exception struct {
	name  string         // as docs/exceptions.md has it
	story string         // "" for any
	at    *regexp.Regexp // the text of the message
	way   way            // pass for both
	shows *regexp.Regexp // what is seen
}

// releasedWithTheEnd is that a lane was freed by the end of its run.
var releasedWithTheEnd = regexp.MustCompile(`: agent_events .*"locks_released":[12],.*"event":"AGENT_COMPLETED"`)

// exceptions are all of them. docs/exceptions.md gives the reasons.
var exceptions = []exception{
	{
		name: "A process that starts", story: "", way: pass,
		at: regexp.MustCompile(
			`^(prepare: )?(connect$|select pg_backend_pid|select current_setting|select clock_timestamp|insert into agent_schedules|` +
				`select set_agent_limits|select extract\(epoch from \(select min\(next_run_at\))`),
		shows: regexp.MustCompile(`^the process ended when it started, and was started again$`),
	},
	{
		name: "A lane whose release is lost", story: "heartbeat", way: before,
		at:    regexp.MustCompile(`lanekeeper\.release_agent_lock\(`),
		shows: releasedWithTheEnd,
	},
	{ // that it is prepared releases nothing
		name: "A lane whose release is lost", story: "heartbeat", way: pass,
		at:    regexp.MustCompile(`^prepare: .*lanekeeper\.release_agent_lock\(`),
		shows: releasedWithTheEnd,
	},
}

// covers reports whether the exception is what was seen in a trial.
func (e exception) covers(x trial, what string) bool {
	return (e.story == "" || e.story == x.story.name) && e.shows.MatchString(what) &&
		slices.ContainsFunc(x.cuts, func(c cut) bool {
			return (e.way == pass || e.way == c.way) && e.at.MatchString(c.text)
		})
}

// The table and the document have the same exceptions.
func TestExceptionsAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/exceptions.md")
	require.NoError(t, err)
	listed := map[string]bool{}
	for _, e := range exceptions {
		listed[e.name] = true
	}
	for _, heading := range regexp.MustCompile(`(?m)^## (.*)$`).FindAllStringSubmatch(string(text), -1) {
		if name := heading[1]; !listed[name] && name != "Not an exception, but to be known" {
			t.Errorf("docs/exceptions.md has %q, which the table does not have", name)
		}
		delete(listed, heading[1])
	}
	for name := range listed {
		t.Errorf("docs/exceptions.md does not have %q", name)
	}
}
