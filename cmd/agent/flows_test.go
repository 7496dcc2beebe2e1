package main

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/requests"
)

func TestListFlowsAndRequests(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	assert.Equal(t, "no flows; `agent apply DIR` creates some\n", p.must("flows", "ls"))
	assert.Equal(t, "no requests\n", p.must("requests", "ls"))
	dir := t.TempDir()
	path := filepath.Join(dir, "greet.yaml")
	testkit.WriteFile(t, path, strings.Replace(greeting, "flow:greet", "flow:gret", 1))
	p.mustFail(2, `unknown flow "gret"; did you mean "greet"?`, "apply", dir)
	testkit.WriteFile(t, path, greeting)
	p.must("apply", dir)
	assert.Contains(t, p.must("flows", "ls"), "greet", "data", "Says hello")
	shown := p.must("flows", "show", "greet")
	assert.Contains(t, shown, "kind: flow", "name: greet", "actionType: wait_for_event")
	testkit.WriteFile(t, path, shown)
	assert.Contains(t, p.must("apply", dir), "skill", "remove")
	p.mustFail(1, "agent flows ls", "flows", "show", "nothing")
	var schema map[string]any
	err := json.Unmarshal([]byte(p.must("flows", "schema")), &schema)
	assert.Truef(t, err == nil && schema["$schema"] != nil, "schema: %v", err)
}

// TestListShowsNextRun lists a Go flow of another process with two schedules.
func TestListShowsNextRun(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	pgtest.Exec(t, connect(t, url), `
		insert into agent_workers (name, go_flows, expires_at)
		values ('shop', '{report, refund}', clock_timestamp() + interval '1 hour')`)
	pgtest.Exec(t, connect(t, url), `
		insert into agent_schedules (name, flow, surface, cron, timezone, input, next_run_at)
		values ('report/yearly', 'report', 'flow', '0 9 1 1 *', 'UTC', '{}', '2041-01-01 09:00Z'),
		       ('report/daily', 'report', 'flow', '0 9 * * *', 'UTC', '{}', '2040-05-06 09:00Z')`)
	listed := p.must("flows", "ls")
	assert.Contains(t, listed, "refund", "2040-05-06 09:00")
	assert.Equal(t, 1, strings.Count(listed, "20")) // one time, of report
}

// A flow lists its versions; an unknown one is an error with advice.
func TestShowFlowVersions(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := t.TempDir()
	apply := func(text string) {
		testkit.WriteFile(t, filepath.Join(dir, "flow.yaml"), text)
		p.must("apply", "--prune", dir)
	}
	const document = "kind: flow\nname: greet\nactions: [{actionType: set, parameters: {variables: {word: hola}}}]\n"
	apply(document)
	apply(strings.Replace(document, "hola", "adios", 1))
	assert.Contains(t, p.must("flows", "show", "greet"), "# version 2 of", "#   version 1 of", ", current", "word: adios")
	assert.Contains(t, p.must("flows", "show", "greet", "--version", "1"), "# version 1 of", "word: hola")
	p.mustFail(1, "flow greet has no version 7: the latest is 2; see agent flows show greet", "flows", "show",
		"greet", "--version", "7")
	apply("")
	p.mustFail(1, "flow greet was removed; agent flows show greet --version 2 shows its last version",
		"flows", "show", "greet")
	assert.Contains(t, p.must("flows", "show", "greet", "--version", "2"), "word: adios")
	p.mustFail(1, "flow heartbeat is Go code", "flows", "show", "heartbeat")
}

// TestAnswerRequest answers a request of each kind as an admin.
func TestAnswerRequest(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	pool := connect(t, url)
	ask := func(kind, items string) string {
		return pgtest.Value[string](t, pool, `
			insert into agent_requests (kind, execution_id, trace_id, title, items)
			values ($1, gen_random_uuid(), 'fl_1', 'Please', $2::text[]) returning id::text`, kind, items)
	}
	for _, c := range []struct {
		kind, items string
		first       []string // shown before
		flags, want []string
	}{
		{
			"test", "{}",
			[]string{"pending", "--score NUMBER"},
			[]string{"--no", "--score", "41"},
			[]string{"completed", `"score": 41`, `"result": "failed"`},
		},
		{"test", "{}", nil, []string{"--text", "nearly"}, []string{`"result": "nearly"`}},
		{
			"signature", "{}",
			[]string{"--yes --url URL"},
			[]string{"--yes", "--url", "https://example.com/s.pdf"},
			[]string{"completed", "https://example.com/s.pdf", "signed_at"},
		},
		{
			"document", "{cv,photo}",
			[]string{"cv: missing", "--document 'cv=URL'"},
			[]string{"--document", "photo=https://example.com/p.jpg", "--document", "cv=https://example.com/cv.pdf"},
			[]string{"completed", "cv: https://example.com/cv.pdf", "photo: https://example.com/p.jpg"},
		},
	} {
		id := ask(c.kind, c.items)
		assert.Contains(t, p.must("requests", "show", id), append(c.first, "Please", c.kind)...)
		assert.Contains(t, p.must(append([]string{"requests", "answer", id}, c.flags...)...), "completed "+id)
		assert.Contains(t, p.must("requests", "show", id), c.want...)
		p.mustFail(1, "is already completed", append([]string{"requests", "answer", id}, c.flags...)...)
	}
	assert.Contains(t, p.must("activity", "audit"), "raise_event")
	id := ask("test", "{}")
	p.mustFail(2, "--score NaN is not a finite number", "requests", "answer", id, "--score", "NaN")
	var counted atomic.Int64
	var together sync.WaitGroup
	for n := range 6 {
		together.Go(func() {
			if p.run("requests", "answer", id, "--yes", "--score", strconv.Itoa(n)).code == 0 {
				counted.Add(1)
			}
		})
	}
	together.Wait()
	assert.Equal(t, 1, counted.Load(), "answers at once that counted")
	id = ask("document", "{cv,photo}")
	assert.Contains(t, p.must("requests", "answer", id, "--document", "cv=https://example.com/?a=1,b=2"),
		"pending "+id+"; still missing: photo")
	assert.Contains(t, p.must("requests", "show", id), "pending", "cv: https://example.com/?a=1,b=2", "photo: missing",
		"--document 'photo=URL'")
	signature := ask("signature", "{}")
	for _, wrong := range [][]string{
		{id},
		{id, "--yes"},
		{id, "--document", "other=https://example.com"},
		{id, "--document", "photo=./photo.jpg"},
		{id, "--document", "photo"},
		{signature},
		{signature, "--no"},
		{signature, "--text", "x"},
		{ask("test", "{}")},
		{ask("test", "{}"), "--url", "u"},
	} {
		got := p.run(append([]string{"requests", "answer"}, wrong...)...)
		assert.Truef(t, got.code == 2, "%v: %d %q", wrong, got.code, got.err)
	}
	p.mustFail(1, "agent requests ls", "requests", "show", "01890000-0000-7000-8000-000000000000")
}

// The names of documents come from a flow, and may come from a visitor.
func TestAnswerCommandQuotesNames(t *testing.T) {
	t.Parallel()
	got := answerCommand(requests.Record{ID: "r1", Kind: requests.Document, Items: []string{"driver's licence"}})
	assert.Equal(t, `agent requests answer r1 --document 'driver'\''s licence=URL'`, got)
}
