package activity_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/trace"
)

var update = flag.Bool("update", false, "write the golden files")

// night is a heartbeat's trace with everything that a story has to show.
func night() activity.Trace {
	at := time.Date(2026, 11, 21, 4, 30, 0, 0, time.UTC)
	end := at.Add(75 * time.Second)
	row := func(id, parent string, kind activity.Kind, skill string, status activity.Status, ms int64) activity.Row {
		r := activity.Row{ID: id, Kind: kind, SkillName: skill, Status: status, DurationMS: &ms, CreatedAt: at}
		if parent != "" {
			r.ParentID = &parent
		}
		if status == activity.Running {
			r.DurationMS = nil
		}
		return r
	}
	fail := func(r activity.Row, class, message string) activity.Row {
		r.ErrorClass, r.ErrorMessage = class, &message
		return r
	}
	model := row("m", "plan", activity.KindModel, "model", activity.Success, 3210)
	model.Model, model.TokenUsage.TotalTokens, model.CostUSD = "gpt-4o-mini", 12840, 0.004213
	rows := []activity.Row{
		row("heal", "", activity.KindPhase, "self_heal", activity.Skipped, 12),
		row("plan", "", activity.KindPhase, "advance_plan", activity.Error, 71_400),
		model,
		fail(row("f", "plan", activity.KindCall, "fetch_prices", activity.Error, 60_000), "timeout",
			"the server did not answer within 60 s:\n\x1b[31mGET https://prices.example/v1/daily\x1b[0m returned nothing at all, not "+
				"even a header, and the connection was closed by the other side after a minute of silence"),
		row("n", "f", activity.KindNote, "retry", activity.Success, 0),
		row("a", "plan", activity.KindCall, "send_report", activity.PendingApproval, 3),
		fail(row("u", "", activity.KindCall, "post_message", activity.Unknown, 900), "interrupted", "nobody knows whether it took effect"),
		row("o", "gone", activity.KindCall, "orphan", activity.Running, 0),
	}
	return activity.Trace{
		TraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", OTelTraceID: trace.ID("hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE").OTel(), Surface: "heartbeat",
		Status: "completed", StartedAt: at, FinishedAt: &end, Tokens: 12840, CostUSD: 0.004213, Activities: rows,
	}
}

func TestWriteStory(t *testing.T) {
	t.Parallel()
	quiet := night()
	quiet.Activities, quiet.Tokens, quiet.CostUSD, quiet.Status = quiet.Activities[:1], 0, 0, "skipped"
	for name, test := range map[string]struct {
		trace  activity.Trace
		colour bool
	}{
		"story":  {night(), false},
		"colour": {night(), true},
		"quiet":  {quiet, false},
	} {
		t.Run(name, func(t *testing.T) {
			var got bytes.Buffer
			if err := activity.WriteStory(&got, test.trace, test.colour); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got.String()); diff != "" {
				t.Errorf("run with -update when the change is wanted:\n%s", diff)
			}
		})
	}
}

func TestAStoryCannotSteerATerminal(t *testing.T) {
	t.Parallel()
	evil := night()
	evil.Surface = "op\x1b]0;title\a"
	evil.Activities[0].SkillName = "a\x1b[2Jb\rc\u202ed"
	evil.Activities[0].ErrorClass = "\x9b31m"
	var got bytes.Buffer
	if err := activity.WriteStory(&got, evil, false); err != nil {
		t.Fatal(err)
	}
	if at := strings.IndexAny(got.String(), "\x1b\a\r\u009b\u202e"); at >= 0 {
		t.Errorf("control character %q", got.String()[at])
	}
}

func TestEveryRowOfATreeAppearsOnce(t *testing.T) {
	t.Parallel()
	parent := func(id, parent string) activity.Row { return activity.Row{ID: id, ParentID: &parent} }
	for name, test := range map[string]struct {
		rows []activity.Row
		want string
	}{
		"children keep their order": {[]activity.Row{{ID: "a"}, parent("b", "a"), {ID: "c"}, parent("d", "a"), parent("e", "b")}, "a(b(e)d)c"},
		"child before its parent":   {[]activity.Row{parent("b", "a"), {ID: "a"}}, "a(b)"},
		"orphan":                    {[]activity.Row{{ID: "a"}, parent("b", "gone")}, "ab"},
		"own parent":                {[]activity.Row{parent("a", "a")}, "a"},
		"circle":                    {[]activity.Row{parent("a", "b"), parent("b", "c"), parent("c", "a")}, "c(b(a))"},
		"none":                      {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := outline(activity.Tree(test.rows)); got != test.want {
				t.Errorf("tree is %s, not %s", got, test.want)
			}
		})
	}
}

func outline(nodes []*activity.Node) string {
	var b strings.Builder
	for _, n := range nodes {
		b.WriteString(n.ID)
		if below := outline(n.Children); below != "" {
			b.WriteString("(" + below + ")")
		}
	}
	return b.String()
}
