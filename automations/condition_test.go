package automations_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestAConditionThatIsWrongIsRefusedWithItsPlace(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`pending_aprovals > 3`:           "unknown name pending_aprovals (line 1, column 1)",
		`true and failures_24h > "many"`: "mismatched types int and string) (line 1, column 23)",
		`pending_approvals + 1`:          "expected bool",
		`pending_approvals >`:            "unexpected token EOF",
		`pending_approvals = 3`:          `unexpected token "="; write == to compare (line 1, column 19)`,
		`payload.x == 1`:                 "unknown name payload", // a signal has no payload
		`all(1..1000000, # > 0)`:         "(line 1, column",      // no loops
		`repeat("x", 1000000000) == ""`:  "(line 1, column",
		`let a = memories; let b = a + a; let c = b + b; let d = c + c; let e = d + d; let f = e + e; let g = f + f; let h = g + g; let i = h + h; i + i > 0`: "too large",
		strings.Repeat("true and ", 300) + "true": "at most 1000 bytes",
		strings.Repeat("not ", 240) + "true":      "exceeds maximum allowed nodes",
		`memories == 1; let x = 1`:                "(line 1, column",
	} {
		err := automations.Validate(automations.Definition{Name: "a", Signal: text, Skill: "s"})
		assert.Truef(t, err != nil && strings.Contains(err.Error(), want) && strings.HasPrefix(err.Error(), "signal: ") &&
			!strings.Contains(err.Error(), "\n"), "%.40s: %v, want %q", text, err, want)
	}
	d := automations.Definition{Name: "a", Event: "e", When: "payload.a ==\n  nope", Skill: "s"}
	err := automations.Validate(d)
	assert.Truef(t, err != nil && err.Error() == "when: unknown name nope (line 2, column 3)", "got %v", err)
}

func TestAConditionLooksAtTheEventAndTheCounters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `select raise_agent_event('E', 'repo/1', '{}', null, '')`)
	for when, want := range map[string]string{
		``: "true",
		`payload.action == "opened" and payload.issue.labels[0] == "bug"`: "true",
		`payload.issue.number > 6.5 and len(payload.issue.labels) == 2`:   "true",
		`"bug" in payload.issue.labels and memories == 0`:                 "true",
		`event == "E" and key startsWith "repo/" and calls_24h == 0`:      "true",
		`payload.nothing == nil`:                                          "true",
		`payload.action matches "^clo"`:                                   "false",
		`payload.action matches payload.pattern`:                          "must be a text in quotes (line 1, ",
		`payload.nothing.more == 1`:                                       `evaluate condition of automation "a"`,
		`payload.action > 3`:                                              `evaluate condition of automation "a"`,
		`payload`:                                                         "invalid operation: bool",
	} {
		d := automations.Definition{Name: "a", Event: "E", When: when, Skill: "s"}
		if err := automations.Validate(d); err != nil {
			assert.Truef(t, strings.Contains(err.Error(), want), "%s: %v", when, err)
			continue
		}
		a := put(t, pool, d)
		data := `{"action": "opened", "issue": {"number": 7, "labels": ["bug", "ui"]}}`
		pgtest.Exec(t, pool, `select raise_agent_event('E', 'repo/1', '`+data+`', null, '')`)
		runs, err := automations.Runs(t.Context(), pool, automations.RunFilter{AutomationID: a.ID, Limit: 1})
		require.True(t, err == nil && len(runs) == 1, runs, err)
		meant, err := automations.ConditionHolds(t.Context(), pool, a, runs[0].ID, func() (automations.Counters, error) {
			return automations.ReadCounters(t.Context(), pool)
		})
		got := fmt.Sprint(meant)
		if err != nil {
			got = err.Error()
		}
		assert.Truef(t, strings.Contains(got, want), "%s: got %s, want %s", when, got, want)
	}
}

func TestAConditionOnTheEventReadsNoCounters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := put(t, pool, automations.Definition{Name: "a", Event: "E", When: "payload.n > 1", Skill: "s"})
	for n, want := range map[int]bool{1: false, 2: true} {
		pgtest.Exec(t, pool, `select raise_agent_event('E', 'k', jsonb_build_object('n', $1::int), null, '')`, n)
		runs, err := automations.Runs(t.Context(), pool, automations.RunFilter{Limit: 1})
		require.True(t, err == nil && len(runs) == 1, runs, err)
		holds, err := automations.ConditionHolds(t.Context(), pool, a, runs[0].ID, func() (automations.Counters, error) {
			return automations.Counters{}, errors.New("the counters were read")
		})
		assert.Truef(t, err == nil && holds == want, "%d: %v, %v", n, holds, err)
	}
}

func TestAProposalIsOutOfServiceUntilAnAdminAcceptsIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := automations.Definition{Name: "watch", Cron: "*/5 * * * *", Prompt: "look"}
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			_, err := automations.Propose(t.Context(), pool, d, "agent", traceID)
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	a := get(t, pool, "watch")
	assert.Truef(t, !a.Enabled && a.DisabledBy == automations.Proposal && a.NextRunAt == nil && a.LastTraceID == traceID,
		"got %+v", a)
	for name, change := range map[string]func(*automations.Definition){
		"prompt":   func(d *automations.Definition) { d.Prompt = "do something else" },
		"timezone": func(d *automations.Definition) { d.Timezone = "Europe/Madrid" },
		"attempts": func(d *automations.Definition) { d.MaxAttempts = 7 },
	} {
		other := d
		change(&other)
		_, err := automations.Propose(t.Context(), pool, other, "agent", traceID)
		assert.ErrorIs(t, err, automations.ErrNameTaken, name)
	}
	ok, err := automations.Enable(t.Context(), pool, "watch")
	assert.Truef(t, !ok && errors.Is(err, automations.ErrProposal), "enabled: %v, %v", ok, err)
	_, err = pool.Exec(t.Context(), `update agent_automations set enabled = true, disabled_by = ''`)
	assert.Truef(t, postgres.IsCode(err, "23514"), "the database let it pass: %v", err)
	var wins atomic.Int32
	for range 32 {
		wg.Go(func() {
			ok, err := automations.Accept(t.Context(), pool, "watch", "ana")
			assert.NoError(t, err)
			if ok {
				wins.Add(1)
			}
		})
	}
	wg.Wait()
	if a = get(t, pool, "watch"); wins.Load() != 1 || !a.Enabled || a.DecidedBy != "ana" || a.NextRunAt == nil {
		t.Errorf("%d accepted it, %+v", wins.Load(), a)
	}
	var open atomic.Int32
	for i := range 32 {
		wg.Go(func() {
			_, err := automations.Propose(t.Context(), pool, automations.Definition{
				Name: fmt.Sprint("p", i), Cron: "@daily",
				Prompt: "x",
			}, "agent", traceID)
			switch {
			case err == nil:
				open.Add(1)
			case !errors.Is(err, automations.ErrTooMany):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 20, open.Load())
}

func TestUpcomingTimesAreInTheAutomationsZone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, automations.Definition{Name: "a", Cron: "30 2 * * *", Timezone: "Europe/Madrid"})
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '2099-03-28T01:30:00Z'`)
	a := get(t, pool, "a")
	var got []string
	for _, at := range a.Upcoming(3) {
		got = append(got, at.Format(time.RFC3339))
	}
	assert.Truef(t, len(got) == 3 && got[0] == "2099-03-28T02:30:00+01:00" && strings.HasSuffix(got[2], "+02:00"),
		"got %v", got)
	pgtest.Exec(t, pool, `update agent_automations set next_run_at = '2020-01-01T01:30:00Z'`)
	missed := get(t, pool, "a").Upcoming(3) // run once
	assert.Truef(t, len(missed) == 3 && missed[0].Year() == 2020 && missed[1].After(time.Now()) &&
		missed[2].After(missed[1]), "missed times: %v", missed)
	a.Enabled = false
	assert.Equal(t, 0, len(a.Upcoming(3)))
	put(t, pool, automations.Definition{Name: "b", Cron: "CRON_TZ=Europe/Madrid 30 2 * * *"})
	for _, at := range get(t, pool, "b").Upcoming(3) {
		assert.Equal(t, "02:30 Europe/Madrid", at.Format("15:04 ")+at.Location().String())
	}
}
