package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// TestARequestIsShownAndAnswered answers one of each kind, as an admin does for the person it was asked of.
func TestARequestIsShownAndAnswered(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	pool := connect(t, url)
	ask := func(kind, items string) (id string) {
		t.Helper()
		err := pool.QueryRow(t.Context(), `
			insert into agent_requests (kind, execution_id, trace_id, title, items)
			values ($1, gen_random_uuid(), 'fl_1', 'Please', $2::text[]) returning id::text`, kind, items).Scan(&id)
		if err != nil {
			t.Fatal(err)
		}
		return id
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
		contains(t, p.must("requests", "show", id), append(c.first, "Please", c.kind)...)
		contains(t, p.must(append([]string{"requests", "answer", id}, c.flags...)...), "completed "+id)
		contains(t, p.must("requests", "show", id), c.want...)
		if got := p.run(append([]string{"requests", "answer", id}, c.flags...)...); got.code != 1 || !strings.Contains(got.err, "completed already") {
			t.Errorf("a second answer: %d %q", got.code, got.err)
		}
	}
	contains(t, p.must("activity", "audit"), "raise_event")
	id := ask("document", "{cv,photo}")
	contains(t, p.must("requests", "answer", id, "--document", "cv=https://example.com/?a=1,b=2"), "pending "+id+"; still missing: photo")
	contains(t, p.must("requests", "show", id), "pending", "cv: https://example.com/?a=1,b=2", "photo: missing", "--document 'photo=URL'")
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
		if got := p.run(append([]string{"requests", "answer"}, wrong...)...); got.code != 2 {
			t.Errorf("%v: %d %q", wrong, got.code, got.err)
		}
	}
	if got := p.run("requests", "show", "01890000-0000-7000-8000-000000000000"); got.code != 1 || !strings.Contains(got.err, "agent requests ls") {
		t.Errorf("an unknown request: %d %q", got.code, got.err)
	}
}

func TestTheVersionIsAFlagToo(t *testing.T) {
	t.Parallel()
	p := bare(t)
	if flag, command := p.must("--version"), p.must("version"); flag != command || !strings.HasPrefix(flag, "agent ") {
		t.Errorf("--version says %q, version %q", flag, command)
	}
}
