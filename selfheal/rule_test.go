package selfheal_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/selfheal"
)

// parseCalls parses calls, oldest first in words, and returns them newest first, a minute apart. A word has the skill,
// the caller, and + or - for success or failure.
func parseCalls(words string) (calls []selfheal.Call) {
	for i, w := range strings.Fields(words) {
		calls = append(calls, selfheal.Call{
			Skill: w[:1], Caller: w[1:2], Failed: w[2] == '-', At: time.Unix(0, 0).Add(time.Duration(i) * time.Minute),
		})
	}
	slices.Reverse(calls)
	return calls
}

func TestDecide(t *testing.T) {
	t.Parallel()
	const others = "sa+ sb+ sc+ "
	worked := "sa+ ta+ ua+ "
	for name, test := range map[string]struct{ calls, rule string }{
		"old successes hide no rate":                {repeat(20, "sa+ sb+") + repeat(5, "sc- sd+ sd- sc+"), "rate"},
		"old failures are no rate":                  {repeat(10, "sa- sb+") + repeat(12, "sc+"), ""},
		"one caller alone":                          {others + "sd- sd- sd- sd-", ""},
		"one caller and a second one":               {others + "sd- sd- sd- sa-", "streak"},
		"one caller, and it works for few":          {"sa+ sb+ sd- sd- sd-", "streak"},
		"one caller, and it works for none else":    {"sd+ sd- sd- sd-", "streak"},
		"a rate of one caller":                      {others + repeat(12, "sd- sa+"), ""},
		"a rate of one caller and some more":        {others + repeat(5, "sd- sa- sd- sb- sb+ sa+ sd-"), "rate"},
		"a rate of as many callers as calls":        {others + "sd- se+ sf- sg+ sh- si+ sj- sk+ sl- sm+ sn- so+ sp- sq+ sr- ss+ st- su+ sv- sw+", "rate"},
		"an outage":                                 {worked + "sb- tb- ub- sc- sd- sb-", ""},
		"an outage that is over":                    {worked + "sb- tb- ub- sc- sd- sb- ta+ sb- sc- sd-", "streak"},
		"an outage does not hide what never worked": {"ta+ ua+ va+ sb- tb- ub- vb- sc- sd-", "streak"},
		"two skills are no outage":                  {worked + "sb- tb- sc- sd-", "streak"},
		"another skill still works":                 {worked + "sb- tb- ub- ta+ sc- sd- sa-", "streak"},
		"a success during it":                       {worked + "sb- tb- ub- sc- sd+ sb- sc-", ""},
		"an outage leaves the rate":                 {worked + repeat(6, "sb- tb- ub-") + repeat(14, "sc+"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := selfheal.Default().Decide("s", time.Time{}, parseCalls(test.calls))
			rule := ""
			if d.ByRate {
				rule = "rate"
			}
			if d.ByStreak {
				rule = "streak"
			}
			assert.Equal(t, test.rule, rule, d)
		})
	}
}

func TestFailuresBeforeEnableDoNotCount(t *testing.T) {
	t.Parallel()
	calls := parseCalls("sa- sb- sc-")
	d := selfheal.Default().Decide("s", calls[1].At, calls)
	assert.Truef(t, !d.Tripped() && d.Streak == 2, "decided %+v", d)
}

// Run reads the callers and the calls of other skills from the activity log.
func TestExcusedFailures(t *testing.T) {
	t.Parallel()
	callers := func(t *testing.T, db postgres.DB) {
		t.Helper()
		insertCalls(t, db, skillName, 5*time.Minute, "success success success")
		pgtest.Exec(t, db, "update agent_activity set thread_id = id::text, trace_id = 'ch_a'")
		insertCalls(t, db, skillName, 0, "http_status http_status http_status")
		pgtest.Exec(t, db, `update agent_activity set thread_id = 'one', trace_id = 'ch_' || id where status = 'error'`)
	}
	t.Run("one caller", func(t *testing.T) {
		t.Parallel()
		db := pgtest.DB(t)
		insertSkill(t, db, skillName)
		callers(t, db)
		report := runHealing(t, db, selfheal.Default())
		assert.Truef(t, len(report.Healed) == 0, "disabled for one thread: %+v", report.Healed)
		insertCalls(t, db, skillName, 0, "http_status")
		if report := runHealing(t, db, selfheal.Default()); len(report.Healed) != 1 || report.Healed[0].Evidence.Streak != 4 {
			t.Errorf("not disabled for a second caller: %+v", report.Healed)
		}
	})
	t.Run("outage", func(t *testing.T) {
		t.Parallel()
		db := pgtest.DB(t)
		for _, name := range []string{skillName, "post", "read"} {
			insertSkill(t, db, name)
			insertCalls(t, db, name, 10*time.Minute, "success")
			insertCalls(t, db, name, 0, "network network network")
		}
		if report := runHealing(t, db, selfheal.Default()); len(report.Healed) > 0 {
			t.Errorf("disabled for an outage: %+v", report.Healed)
		}
		insertCalls(t, db, "post", 0, "success")
		insertCalls(t, db, skillName, -3*time.Minute, "network network network")
		report := runHealing(t, db, selfheal.Default())
		assert.Truef(t, len(report.Healed) == 1 &&
			report.Healed[0].Skill == skillName && report.Healed[0].Evidence.Streak == 3,
			"after the outage: %+v", report.Healed)
	})
}

func TestReasonOfRecentRate(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insertSkill(t, db, skillName)
	insertCalls(t, db, skillName, 0, repeat(30, "success")+repeat(10, "timeout success"))
	want := "10 of the last 20 calls failed (50 %), last: timeout: it broke"
	if report := runHealing(t, db, selfheal.Default()); len(report.Healed) != 1 || report.Healed[0].Reason != want {
		t.Errorf("healed %+v, want the reason %q", report.Healed, want)
	}
}
