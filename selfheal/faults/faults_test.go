package faults_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/selfheal/faults"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The rule finds more faults than a limit of 3 failures in a row, and more of its alarms are right. That holds in both
// halves of the set.
func TestTheRuleIsBetterThanThreeInARow(t *testing.T) {
	t.Parallel()
	all, err := faults.Embedded()
	require.NoError(t, err)
	all = faults.CountedOnly(all)
	require.Truef(t, len(all) >= 200, "the set has %d traces", len(all))
	own, other := faults.Evaluate(faults.SelfHeal(selfheal.Default()), all), faults.Evaluate(faults.ThreeInARow(), all)
	assert.Equal(t, 8, len(own.Shapes))
	assert.Equal(t, own.Held.Traces, own.Tuned.Traces)
	for _, pair := range [][2]faults.Score{{*own.Tuned, *other.Tuned}, {*own.Held, *other.Held}} {
		mine, its := pair[0], pair[1]
		assert.Truef(t, *mine.Precision.Value >= *its.Precision.Value+0.15 && *mine.Recall.Value >= *its.Recall.Value+0.1,
			"%s: precision %.2f against %.2f, recall %.2f against %.2f", mine.Name, *mine.Precision.Value, *its.Precision.Value,
			*mine.Recall.Value, *its.Recall.Value)
		assert.Truef(t, mine.PerThousand < its.PerThousand/2,
			"%s: %.1f false alarms against %.1f", mine.Name, mine.PerThousand, its.PerThousand)
	}
}

// line returns a set with one trace. keys replaces some of its keys.
func line(keys ...string) string {
	return strings.NewReplacer(keys...).Replace(`{"name": "one", "shape": "x", "seed": 1, "held_out": false, "out": true,` +
		` "from": 4, "by": 6, "why": "", "skill": "ssssss", "caller": "abcdef", "result": "...ttt", "gap": "111111",` +
		` "latency": "111111"}`)
}

func TestReplay(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		set  string
		want faults.Outcome
	}{
		"in time":             {line(), faults.Outcome{Calls: 6, Detected: true, Delay: 3}},
		"too late":            {line(`"by": 6`, `"by": 5`), faults.Outcome{Calls: 6, Delay: 3}},
		"too early":           {line(`"from": 4`, `"from": 6`, "...ttt", ".tttt."), faults.Outcome{Calls: 6, FalseAlarm: true, Delay: 1}},
		"wrong":               {line(`true`, `false`, "...ttt", "tttttt"), faults.Outcome{Calls: 3, FalseAlarm: true}},
		"no alarm":            {line("...ttt", "...t.t"), faults.Outcome{Calls: 6, Delay: 3}},
		"others do not count": {line("ssssss", "sss1ss"), faults.Outcome{Calls: 5, Delay: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			traces, err := faults.Read(strings.NewReader(test.set))
			require.NoError(t, err)
			assert.NoDiff(t, test.want, faults.Replay(faults.ThreeInARow(), traces[0]))
		})
	}
}

// The program omits the same classes as the view agent_skill_calls.
func TestTheClassesThatCountAreThoseOfTheDatabase(t *testing.T) {
	t.Parallel()
	got := pgtest.Value[[]string](t, pgtest.DB(t), `
		select array_agg(m.found[1] order by m.n) from pg_proc p,
		       regexp_matches(p.prosrc, '''([a-z_]+)''', 'g') with ordinality m (found, n)
		 where p.proname = 'agent_class_counts'`)
	assert.NoDiff(t, got, faults.NotCounted)
}

// A call that does not count takes its label with it.
func TestCountedOnlyRemovesModelMistakes(t *testing.T) {
	t.Parallel()
	traces, err := faults.Read(strings.NewReader(line("...ttt", ".i.ttt")))
	require.NoError(t, err)
	got := faults.CountedOnly(traces)[0]
	assert.Truef(t, len(got.Calls) == 5 && got.FirstCall == 3 && got.LastCall == 5 && got.Calls[2].Class == "timeout",
		"%d calls, from %d by %d", len(got.Calls), got.FirstCall, got.LastCall)
}

func TestReadNamesTheLine(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		line() + "\n" + line("...ttt", "...tt"): "line 2 of the set: skill, caller, result and gap",
		line("...ttt", "...ttz"):                `line 1 of the set: result 6 must be one of`,
		line(`"gap": "1`, `"gap": "?`):          `gap 1 must be a digit`,
		line(`"by": 6`, `"by": 7`):              "from and by must satisfy",
		line("ssssss", ""):                      "a trace must have 1 to 10000 calls",
		`{"nme": 1}`:                            `unknown field "nme"`,
	} {
		_, err := faults.Read(strings.NewReader(text))
		assert.Truef(t, err != nil && strings.Contains(err.Error(), want), "%v, want %q", err, want)
	}
}

// If a person enables a skill at once, the alarm was false.
func TestHistoryTakesLabelsFromWhatPeopleDid(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		insert into agent_activity (id, trace_id, skill_name, status, error_class, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || n, skill, 'error', 'timeout', at
		  from unnest(array['a', 'b', 'c', 'd', 'e']) skill, generate_series(1, 3) n,
		       lateral (select clock_timestamp() - interval '5 days' + n * interval '1 minute' as at) x`)
	for act, ago := range map[string]string{
		"heal_skill a": "118 hours", "enable_skill a": "110 hours", // enabled at once: a false alarm
		"heal_skill b": "117 hours", "enable_skill b": "80 hours", // enabled after the cool-down
		"heal_skill c": "116 hours", "settle_trial c": "80 hours", // failed
		"heal_skill d":    "115 hours", // undecided
		"disable_skill e": "114 hours", // missed by the rule
	} {
		name, skill, _ := strings.Cut(act, " ")
		pgtest.Exec(t, db, `
			insert into agent_activity (id, trace_id, kind, skill_name, input, created_at)
			select lanekeeper.agent_uuid7(at), 'op_x', 'note', $1, jsonb_build_object('skill', $2::text, 'success', false), at
			  from (select clock_timestamp() - $3::interval as at) x`, name, skill, ago)
	}
	traces, undecided, err := faults.History(t.Context(), db, selfheal.Default(), time.Now().Add(-30*24*time.Hour))
	require.NoError(t, err)
	got := map[string]bool{}
	for _, trace := range traces {
		got[trace.Skill] = trace.MustDisable
	}
	assert.NoDiff(t, map[string]bool{"a": false, "b": true, "c": true, "e": true}, got)
	assert.Equal(t, 1, undecided)
	score := faults.Evaluate(faults.SelfHeal(selfheal.Default()), traces).All
	assert.Truef(t, score.Detected == 3 && score.FalseAlarms == 1 && score.Faults == 3, "score %+v", score)
}
