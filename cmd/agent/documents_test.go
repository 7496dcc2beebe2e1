package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestDocumentsAreStoredListedFetchedAndDeleted(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t))
	dir := folder(t, map[string]string{"orders.csv": "id,total\n1,9.50\n"})
	contains(t, p.must("documents", "ls"), "no documents; agent documents add FILE")
	var d documents.Document
	if err := json.Unmarshal([]byte(p.must("documents", "add", filepath.Join(dir, "orders.csv"), "--json")), &d); err != nil {
		t.Fatal(err)
	}
	contains(t, p.must("documents", "ls"), d.ID, "orders.csv", "text/csv", "16 B", "admin")
	contains(t, p.must("documents", "show", d.ID), "orders.csv", "text/csv, 16 bytes, text", d.SHA256)
	if got := p.must("documents", "get", d.ID); got != "id,total\n1,9.50\n" {
		t.Errorf("got %q", got)
	}
	out := filepath.Join(dir, "out.csv")
	contains(t, p.must("documents", "get", d.ID, "-o", out), "16 bytes")
	if got, err := os.ReadFile(out); err != nil || string(got) != "id,total\n1,9.50\n" {
		t.Errorf("%q, %v", got, err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"documents", "get", d.ID, "-o", out}, 1, "exists"},
		{[]string{"documents", "get", d.ID, "--json"}, 2, "name a file with -o FILE"},
		{[]string{"documents", "show", "nonsense"}, 1, "see agent documents ls"},
		{[]string{"documents", "add", "nowhere.txt"}, 1, "nowhere.txt"},
		{[]string{"documents", "add", out, "--thread", "nobody"}, 1, "see agent threads ls"},
	} {
		got := p.run(c.args...)
		if got.code != c.code {
			t.Errorf("%v: %d %s", c.args, got.code, got.err)
		}
		contains(t, got.err, c.want)
	}
	contains(t, p.must("documents", "rm", d.ID), "orders.csv is deleted")
	contains(t, p.run("documents", "rm", d.ID).err, "no such document")
	contains(t, p.must("activity", "audit"), "document "+d.ID, "add_document", "delete_document")
	small := on(t, pgtest.URL(t), "AGENT_DOCUMENT_MAX_BYTES=1024")
	large := filepath.Join(dir, "large")
	if err := os.WriteFile(large, make([]byte, 1025), 0o600); err != nil {
		t.Fatal(err)
	}
	contains(t, small.run("documents", "add", large).err, "at most 1024 bytes", "AGENT_DOCUMENT_MAX_BYTES")
}
