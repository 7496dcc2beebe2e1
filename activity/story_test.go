package activity_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

var update = flag.Bool("update", false, "write the golden files")

// sampleTrace returns a heartbeat's trace with everything that a story can show.
func sampleTrace() activity.Trace {
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
		fail(row("u", "", activity.KindCall, "post_message", activity.Unknown, 900), "interrupted",
			"nobody knows whether it took effect"),
		row("o", "gone", activity.KindCall, "orphan", activity.Running, 0),
	}
	return activity.Trace{
		TraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", OTelTraceID: trace.ID("hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE").OTel(),
		Surface: "heartbeat",
		Status:  "completed", StartedAt: at, FinishedAt: &end, Tokens: 12840, CostUSD: 0.004213, Activities: rows,
	}
}

func TestWriteStory(t *testing.T) {
	t.Parallel()
	quiet := sampleTrace()
	quiet.Activities, quiet.Tokens, quiet.CostUSD, quiet.Status = quiet.Activities[:1], 0, 0, "skipped"
	for name, test := range map[string]struct {
		trace  activity.Trace
		colour bool
	}{
		"story":  {sampleTrace(), false},
		"colour": {sampleTrace(), true},
		"quiet":  {quiet, false},
	} {
		t.Run(name, func(t *testing.T) {
			var got bytes.Buffer
			require.NoError(t, activity.WriteStory(&got, test.trace, test.colour))
			path := filepath.Join("testdata", name+".golden")
			if *update {
				require.NoError(t, os.WriteFile(path, got.Bytes(), 0o644))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			assert.NoDiff(t, string(want), got.String())
		})
	}
}

func TestStoryWithoutActivitiesNamesWhy(t *testing.T) {
	t.Parallel()
	empty := sampleTrace()
	empty.Status, empty.Activities = "cancelled", nil
	var got bytes.Buffer
	require.NoError(t, activity.WriteStory(&got, empty, false))
	assert.Contains(t, got.String(), "see `agent why "+empty.TraceID+"`")
}

func TestStoryEscapesTerminalControls(t *testing.T) {
	t.Parallel()
	evil := sampleTrace()
	evil.Surface = "op\x1b]0;title\a"
	evil.Activities[0].SkillName = "a\x1b[2Jb\rc\u202ed"
	evil.Activities[0].ErrorClass = "\x9b31m"
	var got bytes.Buffer
	require.NoError(t, activity.WriteStory(&got, evil, false))
	if at := strings.IndexAny(got.String(), "\x1b\a\r\u009b\u202e"); at >= 0 {
		t.Errorf("control character %q", got.String()[at])
	}
}

func TestTreeHasEachRowOnce(t *testing.T) {
	t.Parallel()
	parent := func(id, parent string) activity.Row { return activity.Row{ID: id, ParentID: &parent} }
	for name, test := range map[string]struct {
		rows []activity.Row
		want string
	}{
		"children keep their order": {[]activity.Row{
			{ID: "a"},
			parent("b", "a"),
			{ID: "c"},
			parent("d", "a"),
			parent("e", "b"),
		}, "a(b(e)d)c"},
		"child before its parent": {[]activity.Row{parent("b", "a"), {ID: "a"}}, "a(b)"},
		"orphan":                  {[]activity.Row{{ID: "a"}, parent("b", "gone")}, "ab"},
		"own parent":              {[]activity.Row{parent("a", "a")}, "a"},
		"circle":                  {[]activity.Row{parent("a", "b"), parent("b", "c"), parent("c", "a")}, "c(b(a))"},
		"none":                    {nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, outline(activity.Tree(test.rows)))
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

// run inserts an execution that ended, ago before now, after three seconds.
func run(t *testing.T, db postgres.DB, traceID trace.ID, status string, ago time.Duration, parent any) string {
	t.Helper()
	var id string
	args := postgres.Strict{"trace": string(traceID), "surface": string(traceID.Surface()), "parent": parent, "ago": ago}
	err := db.QueryRow(t.Context(), `
		insert into agent_executions (id, trace_id, surface, flow, status, parent_id, created_at, started_at)
		select lanekeeper.agent_uuid7(at), @trace, @surface, 'beat', 'running', @parent::uuid, at, at
		  from (select clock_timestamp() - @ago::interval as at) x
		returning id::text`, args).Scan(&id)
	require.NoError(t, err)
	if status == "running" {
		return id
	}
	pgtest.Exec(t, db, `
		update agent_executions set status = @status, completed_at = created_at + interval '3 seconds' where id = @id`,
		postgres.Strict{"status": status, "id": id})
	return id
}

func TestTraceOfEveryIDForm(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := trace.New(trace.Webhook)
	root := run(t, db, id, "completed", time.Minute, nil)
	run(t, db, id, "failed", 50*time.Second, root)
	put(t, db, act{trace: string(id), kind: "model", tokens: 40, cost: "0.0125", surface: "webhook"})
	put(t, db, act{trace: string(id), kind: "model", tokens: 2, cost: "0.0001", surface: "webhook"})
	for name, form := range map[string]string{"prefixed": string(id), "hex": id.OTel(), "ulid": id.Suffix()} {
		t.Run(name, func(t *testing.T) {
			got, err := activity.TraceOf(t.Context(), db, form)
			require.NoError(t, err)
			used, cost, err := activity.Spent(t.Context(), db, string(id))
			assert.Truef(t, err == nil && used.TotalTokens == 42 && cost == 0.0126, "spent %+v, %v USD, %v", used, cost, err)
			require.Truef(t, got.FinishedAt != nil && got.FinishedAt.Sub(got.StartedAt) == 3*time.Second &&
				len(got.Activities) == 2, "trace is %+v", got)
			assert.Equal(t, "failed", got.Children[0].Status)
			got.StartedAt, got.FinishedAt, got.Activities, got.Children = time.Time{}, nil, nil, nil
			want := activity.Trace{
				TraceID: string(id), OTelTraceID: id.OTel(), Surface: "webhook", Status: "completed",
				Tokens: 42, CostUSD: 0.0126,
			}
			assert.NoDiff(t, want, got)
		})
	}
}

// A child is below the activity that started it, and its activities are below the child.
func TestStoryShowsChildExecutions(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 21, 4, 30, 0, 0, time.UTC)
	row := func(id, execution, parent string, from, to int) activity.Row {
		r := activity.Row{
			ID: id, ExecutionID: &execution, SkillName: id, Status: activity.Success, CreatedAt: at.Add(time.Duration(from)),
			FinishedAt: new(at.Add(time.Duration(to))),
		}
		if parent != "" {
			r.ParentID = &parent
		}
		return r
	}
	child := func(id, parent, flow string, from int) activity.Child {
		return activity.Child{
			ID: id, ParentID: parent, Flow: flow, Status: "completed", CreatedAt: at.Add(time.Duration(from)),
			StartedAt: at.Add(5), CompletedAt: new(at.Add(3 * time.Second)),
		}
	}
	story := activity.Trace{
		TraceID: "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE", Surface: "flow", Status: "completed", StartedAt: at,
		Activities: []activity.Row{
			row("delegate", "root", "", 1, 50), row("ask", "root", "delegate", 2, 3), row("look", "c1", "", 5, 6),
			row("read", "c2", "", 9, 10), row("write", "c2", "read", 9, 10), row("after", "root", "", 60, 61),
		},
		Children: []activity.Child{
			child("c1", "root", "search", 4), child("c2", "c1", "page", 8), child("c3", "root", "late", 70),
		},
	}
	var b strings.Builder
	require.NoError(t, activity.WriteStory(&b, story, false))
	var names []string
	for _, line := range strings.Split(b.String(), "\n")[3:] {
		name, _, found := strings.Cut(line, " ✓")
		if !found {
			break
		}
		names = append(names, strings.TrimSpace(name))
	}
	assert.NoDiff(t, []string{
		"delegate", "├─ ask", "└─ execution of search", "├─ look", "└─ execution of page", "└─ read", "└─ write", "after",
		"execution of late",
	}, names)
}

// The root's time is not the trace's time while a child runs.
func TestTraceHeadReportsOpenChild(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := trace.New(trace.Flow)
	root := run(t, db, id, "completed", time.Minute, nil)
	child := run(t, db, id, "running", 50*time.Second, root)
	head := func() string {
		got, err := activity.TraceOf(t.Context(), db, string(id))
		require.NoError(t, err)
		var b strings.Builder
		require.NoError(t, activity.WriteStory(&b, got, false))
		return b.String()
	}
	assert.Contains(t, head(), ", children still open: 1\n")
	pgtest.Exec(t, db, `update agent_executions set status = 'failed', completed_at = now() where id = @id`,
		postgres.Strict{"id": child})
	assert.Truef(t, !strings.Contains(head(), "children still open"), "%s", head())
}

func TestUnknownTrace(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	_, err := activity.TraceOf(t.Context(), db, string(trace.New(trace.Chat)))
	assert.ErrorIs(t, err, activity.ErrNotFound, "unknown id")
	_, err = activity.TraceOf(t.Context(), db, "hb_nonsense")
	assert.ErrorIs(t, err, trace.ErrInvalid, "malformed id")
}

func TestTraceWithoutExecution(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		statuses []string
		want     string
		finished bool
	}{
		"skipped tick": {[]string{"skipped"}, "skipped", true},
		"done":         {[]string{"skipped", "success"}, "completed", true},
		"failed":       {[]string{"error", "success"}, "failed", true},
		"running":      {[]string{"error", "running"}, "running", false},
	} {
		t.Run(name, func(t *testing.T) {
			db := pgtest.DB(t)
			id := string(trace.New(trace.Heartbeat))
			for _, status := range test.statuses {
				put(t, db, act{trace: id, status: status})
			}
			got, err := activity.TraceOf(t.Context(), db, id)
			require.NoError(t, err)
			assert.Truef(t, got.Status == test.want && (got.FinishedAt != nil) == test.finished,
				"status %s, finished %v", got.Status, got.FinishedAt)
		})
	}
}

func TestTracesNewestFirst(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	older, newer, going := trace.New(trace.Heartbeat), trace.New(trace.Chat), trace.New(trace.Heartbeat)
	root := run(t, db, older, "completed", time.Hour, nil)
	run(t, db, older, "completed", 50*time.Minute, root)
	run(t, db, newer, "failed", 30*time.Minute, nil)
	run(t, db, going, "running", time.Minute, nil)
	// A claimed execution is in no index of its surface.
	pgtest.Exec(t, db, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		update agent_executions set claimed_by = w.id, claim = 1 from w where status = 'running'`)
	put(t, db, act{trace: string(older), kind: "model", tokens: 10, cost: "0.5"})
	put(t, db, act{trace: string(older), status: "error"})
	put(t, db, act{trace: string(newer)})

	list := func(f activity.TraceFilter) (found []string) {
		for {
			page, next, err := activity.Traces(t.Context(), db, f)
			require.NoError(t, err)
			for _, s := range page {
				found = append(found, s.TraceID)
			}
			if f.Cursor = next; next == "" {
				return found
			}
		}
	}
	for name, test := range map[string]struct {
		filter activity.TraceFilter
		want   []string
	}{
		"all, by pages of one": {activity.TraceFilter{Limit: 1}, []string{string(going), string(newer), string(older)}},
		"surface":              {activity.TraceFilter{Surface: "heartbeat"}, []string{string(going), string(older)}},
		"status":               {activity.TraceFilter{Status: "failed"}, []string{string(newer)}},
		"since": {
			activity.TraceFilter{Since: time.Now().Add(-40 * time.Minute)}, []string{string(going), string(newer)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			assert.NoDiff(t, test.want, list(test.filter))
		})
	}
	page, _, err := activity.Traces(t.Context(), db, activity.TraceFilter{Status: "completed"})
	require.NoError(t, err)
	got := page[0]
	assert.Truef(t, *got.DurationMS == 3000 && got.Tokens == 10 && got.CostUSD == 0.5 && got.Activities == 2 &&
		got.Errors == 1 && got.ExecutionID == root, "summary is %+v", got)
	assert.Equal(t, older.OTel(), got.OTelTraceID)
}
