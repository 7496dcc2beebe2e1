package requests_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// upload stores a document.
func upload(t *testing.T, pool *pgxpool.Pool, u documents.Upload) (d documents.Document) {
	t.Helper()
	u.Name, u.Content = "photo.txt", []byte("a dent")
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		d, err = documents.Add(t.Context(), tx, u)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A request takes a stored document of its thread, or one that an admin uploaded for nobody, which is the execution's
// from then on. Somebody else's document changes nothing: the event is refused.
func TestARequestIsAnsweredByADocumentThatItMayTake(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	visitor := threads.Principal{Kind: threads.ByKey, Owner: "site"}
	for _, name := range []string{"candidate", "another"} {
		if _, _, err := threads.Ensure(t.Context(), pool, threads.Thread{ID: name, Owner: "site"}); err != nil {
			t.Fatal(err)
		}
	}
	wanted := requests.Request{Kind: requests.Document, Title: "Papers", Items: []string{"photo", "form"}}
	engine, id := asks(t, pool, wanted)
	open, err := requests.List(t.Context(), pool, requests.Filter{ExecutionID: id})
	if err != nil || len(open) != 1 {
		t.Fatalf("%+v, %v", open, err)
	}
	give := func(item, document string) error {
		data, err := json.Marshal(map[string]string{"document": item, "document_id": document})
		if err != nil {
			t.Fatal(err)
		}
		_, err = engine.Deliver(t.Context(), pool, "DOCUMENT_UPLOADED", open[0].ID, data, "")
		return err
	}
	foreign := upload(t, pool, documents.Upload{By: visitor, ThreadID: "another"})
	unused := upload(t, pool, documents.Upload{By: visitor})
	for _, not := range []string{foreign.ID, unused.ID, "nonsense", ""} {
		if err := give("photo", not); err == nil || !strings.Contains(err.Error(), "there is no document") {
			t.Errorf("document %q: %v", not, err)
		}
	}
	own := upload(t, pool, documents.Upload{By: visitor, ThreadID: "candidate"})
	admin := upload(t, pool, documents.Upload{By: threads.Admin})
	for item, d := range map[string]documents.Document{"photo": own, "form": admin} {
		if err := give(item, d.ID); err != nil {
			t.Fatal(err)
		}
	}
	said := func(item string, d documents.Document) map[string]any {
		return map[string]any{
			"document": item, "id": d.ID, "name": "photo.txt", "content_type": d.ContentType, "size": 6.0,
			"url": "/v1/documents/" + d.ID + "/content",
		}
	}
	want := map[string]any{
		"documents":    []any{said("photo", own), said("form", admin)},
		"documentUrls": []any{"/v1/documents/" + own.ID + "/content", "/v1/documents/" + admin.ID + "/content"},
	}
	if diff := cmp.Diff(want, end(t, pool, engine, id)); diff != "" {
		t.Error(diff)
	}
	if got, err := documents.Get(t.Context(), pool, admin.ID); err != nil || got.ExecutionID == nil ||
		*got.ExecutionID != id {
		t.Errorf("the admin's document belongs to %v, %v", got.ExecutionID, err)
	}
}

// A run reads the documents of its thread, its own, and those of the runs that started it; an operate session any.
func TestARunReadsTheDocumentsThatItMay(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ctx := t.Context()
	run := func(surface, thread, parent string) (id string) {
		err := pool.QueryRow(ctx, `
			insert into agent_executions (flow, surface, trace_id, thread_id, parent_id)
			values ('f', $1, 'op_x', nullif($2, ''), nullif($3, '')::uuid) returning id::text`,
			surface, thread, parent).Scan(&id)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	for _, name := range []string{"mine", "other"} {
		if _, _, err := threads.Ensure(ctx, pool, threads.Thread{ID: name, Owner: "site"}); err != nil {
			t.Fatal(err)
		}
	}
	chat, heartbeat, operate := run("chat", "mine", ""), run("heartbeat", "", ""), run("operate", "", "")
	child := run("chat", "mine", chat)
	visitor := threads.Principal{Kind: threads.ByKey, Owner: "site"}
	papers := map[string]documents.Document{
		"mine":    upload(t, pool, documents.Upload{By: visitor, ThreadID: "mine"}),
		"other":   upload(t, pool, documents.Upload{By: visitor, ThreadID: "other"}),
		"admin's": upload(t, pool, documents.Upload{By: threads.Admin}),
		"chat's":  upload(t, pool, documents.Upload{By: threads.Admin, ExecutionID: chat}),
		"unused":  upload(t, pool, documents.Upload{By: visitor}),
	}
	for name, c := range map[string]struct{ run, reads string }{
		"a turn":            {chat, "chat's mine"},
		"its child":         {child, "chat's mine"},
		"a heartbeat":       {heartbeat, "admin's"},
		"an admin":          {operate, "admin's chat's mine other unused"},
		"nothing under way": {"", ""},
	} {
		var reads []string
		for paper, d := range papers {
			if _, err := documents.GetReadable(ctx, pool, c.run, d.ID); err == nil {
				reads = append(reads, paper)
			}
		}
		if got := sorted(reads); got != c.reads {
			t.Errorf("%s reads %q, not %q", name, got, c.reads)
		}
	}
	list, err := documents.Readable(ctx, pool, child, 10)
	if err != nil || len(list) != 2 || list[0].ID != papers["chat's"].ID {
		t.Errorf("the list of a child: %+v, %v", list, err)
	}
}

func sorted(words []string) string {
	slices.Sort(words)
	return strings.Join(words, " ")
}
