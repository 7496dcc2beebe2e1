package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func TestTheDoctorSaysWhetherMemoriesAreFoundByMeaning(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	contains(t, p.must("doctor"), "embeddings", "off: memories are found by words alone")
	server := modeltest.NewEmbeddings(t, func(string) []float32 { return []float32{1, 2, 3} })
	p = on(t, url, "AGENT_EMBEDDING_MODEL=small", "AGENT_EMBEDDING_BASE_URL="+server.URL(),
		"OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=key-of-the-chat-model")
	if got := p.run("doctor"); !strings.Contains(got.out, "BAD  embeddings") || !strings.Contains(got.out, "create extension vector;") {
		t.Errorf("without the extension: %+v", got)
	}
	p.must("memory", "set", "rule", "two signatures")
	contains(t, p.must("memory", "search", "signatures"), "rule")
	if n := len(server.Requests()); n != 0 {
		t.Errorf("%d requests without the extension", n)
	}
	db, err := postgres.Open(t.Context(), url, postgres.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	_, err = db.Exec(t.Context(), `
		insert into pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
		values (999999, 'vector', current_user::regrole, 'public'::regnamespace, false, '0.8.6')`)
	if err != nil {
		t.Fatal(err)
	}
	contains(t, p.run("doctor").out, "ok   embeddings", "small, 3 dimensions, pgvector 0.8.6; 0 of 1 memories are embedded")
	if key := server.Requests()[0].Header.Get("Authorization"); key != "" {
		t.Errorf("the chat model's key went to another server: %q", key)
	}
}
