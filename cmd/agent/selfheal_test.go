package main

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

const broken = "broken_on_purpose"

// makeDue makes the broken automation due now.
func makeDue(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	pgtest.Exec(t, db, `
		update agent_automations set next_run_at = clock_timestamp() - interval '1 second'
		 where name = 'broken on purpose' and next_run_at is not null`)
}

// state is the state of the broken skill and its automation.
type state struct {
	enabled            bool
	by, reason         string
	failures           int // as the evidence names them
	automationEnabled  bool
	automationDisabler string
	calls              int
}

func stateOf(t *testing.T, db *pgxpool.Pool) state {
	t.Helper()
	var s state
	err := db.QueryRow(t.Context(), `
		select s.enabled, s.disabled_by, s.disabled_reason, coalesce(jsonb_array_length(s.evidence -> 'failures'), 0),
		       a.enabled, a.disabled_by,
		       (select count(*) from agent_activity c where c.skill_name = s.name and c.status = 'error')
		  from agent_skills s, agent_automations a
		 where s.name = 'broken_on_purpose' and a.name = 'broken on purpose'`).
		Scan(&s.enabled, &s.by, &s.reason, &s.failures, &s.automationEnabled, &s.automationDisabler, &s.calls)
	require.NoError(t, err)
	return s
}

// Self-heal disables the caretaker's broken skill after its third failure, with reason and evidence, and pauses its
// automation. Enabling restores both, and self-heal does not disable it again at once.
func TestSelfHealDisablesAndRestores(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := connect(t, url)
	p := newProgram(t, url)
	p.must("apply", caretaker)

	for call := 1; call <= 3; call++ {
		makeDue(t, db)
		p.must("heartbeat")
		require.Equal(t, call, stateOf(t, db).calls)
		got := stateOf(t, db)
		require.Truef(t, call >= 3 || got.enabled, "disabled after %d failed calls: %+v", call, got)
		shown := p.must("skills", "show", broken)
		failed := regexp.MustCompile(`last failed 2\S+ \S+ \w+: .*caretaker_notes.* \(agent trace hb_`)
		assert.Truef(t, failed.MatchString(shown), "after %d failed calls: %s", call, shown)
	}
	makeDue(t, db)
	p.must("heartbeat")
	got := stateOf(t, db)
	assert.Truef(t, !got.enabled && got.by == "self_heal" && got.failures == 3 && got.calls == 3,
		"after the third failed call: %+v", got)
	assert.Contains(t, got.reason, "3 consecutive failures", "caretaker_notes")
	assert.Truef(t, !got.automationEnabled && got.automationDisabler == "self_heal", "its automation: %+v", got)
	assert.Contains(t, p.must("trace", "last", "--surface", "heartbeat"), "heal_skill")
	assert.Contains(t, p.must("skills", "show", broken), "disabled by self_heal: 3 consecutive failures",
		"evidence", "caretaker_notes")
	assert.Contains(t, p.must("skills", "ls"), "disabled", "self_heal")
	refused := p.run("skills", "call", broken)
	assert.Truef(t, refused.code == 1 && strings.Contains(refused.err, "agent skills enable "+broken),
		"a call of the disabled skill: exit %d, stderr %q", refused.code, refused.err)

	restored := p.must("skills", "enable", broken)
	assert.Contains(t, restored, broken+" is in service\n", "automation broken on purpose runs again\n")
	assert.Truef(t, !strings.Contains(restored, "daily sizes"),
		"enabling restored what self-heal had not paused: %s", restored)
	for range 2 {
		assert.Contains(t, p.must("selfheal"), " skills checked, 0 taken out of service\n")
		got := stateOf(t, db)
		require.Truef(t, got.enabled && got.automationEnabled && got.by == "" && got.reason == "" && got.failures == 0,
			"self-heal after the enabling: %+v", got)
	}
	makeDue(t, db)
	p.must("heartbeat")
	assert.Contains(t, p.must("selfheal"), "0 taken out of service")
	got = stateOf(t, db)
	assert.Truef(t, got.enabled && got.calls == 4, "after one failure since the enabling: %+v", got)
}

// agent selfheal does the same as a heartbeat's first phase.
func TestSelfHealCommand(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	p.must("apply", caretaker)
	for range 3 {
		if got := p.run("skills", "call", broken, "--json"); got.code != 1 || !strings.Contains(got.err, `"trace_id":"op_`) {
			t.Fatalf("a call of the broken skill: exit %d, stderr %q", got.code, got.err)
		}
	}
	assert.Contains(t, p.must("selfheal"), "21 skills checked, 1 taken out of service\n", "  "+broken+
		": 3 consecutive failures",
		"    automation broken on purpose paused\n")
	var again struct {
		Checked        int
		Healed, Trials []any
	}
	p.mustJSON(&again, "selfheal")
	assert.Truef(t, again.Checked == 20 && again.Healed != nil && len(again.Healed) == 0 && again.Trials != nil,
		"a second self-heal: %+v", again)
}

// The report replays the set of the release, a file, or the local history. Only the history needs a database.
func TestSelfHealReport(t *testing.T) {
	t.Parallel()
	p := newProgram(t, "postgres://127.0.0.1:1/none")
	assert.Contains(t, p.must("selfheal", "report"), "the set of this release: 240 traces", "self-heal ", "3 in a row ",
		"one_bad_caller", "held out")
	var report healReport
	p.mustJSON(&report, "selfheal", "report")
	if own, other := report.Rules[0].Held, report.Rules[1].Held; *own.Precision.Value <= *other.Precision.Value ||
		*own.Recall.Value <= *other.Recall.Value || own.Recall.Low <= 0.5 {
		t.Errorf("self-heal %+v, 3 in a row %+v", own, other)
	}
	set := filepath.Join(t.TempDir(), "set.jsonl")
	testkit.WriteFile(t, set, `{"name":"a","shape":"mine","out":true,"from":1,"by":3,"skill":"sss","caller":"abc",`+
		`"result":"ttt","gap":"111"}`)
	assert.Contains(t, p.must("selfheal", "report", "--set", set), "1 trace\n", "mine", "1.00")
	testkit.WriteFile(t, set+".bad", "{}")
	p.mustFail(1, "line 1 of the set", "selfheal", "report", "--set", set+".bad")
	p.mustFail(2, "there is no file none.jsonl", "selfheal", "report", "--set", "none.jsonl")
	p.mustFail(2, "exclude each other", "selfheal", "report", "--set", set, "--since", "30d")
	assert.Contains(t, newProgram(t, pgtest.URL(t)).must("selfheal", "report", "--since", "30d"), ": 0 traces")
}
