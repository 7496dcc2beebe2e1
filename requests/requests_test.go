package requests_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// startRequest runs a flow that creates a request, up to its wait for the answer. It returns the execution's id. The
// flow's result has the variables of the answer.
func startRequest(t *testing.T, pool *pgxpool.Pool, r requests.Request) (*executions.Engine, string) {
	t.Helper()
	engine := enginetest.New(t, pool)
	enginetest.Register(t, engine, "asks", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		id, err := requests.Ask(ctx, "ask", r)
		if err != nil {
			return executions.Result{}, err
		}
		w, err := requests.WaitFor(r.Kind, id, 0)
		if err != nil {
			return executions.Result{}, err
		}
		out, err := executions.Wait(ctx, "answer", w)
		if err != nil {
			return executions.Result{}, err
		}
		vars, err := requests.Variables(r.Kind, out)
		return executions.Result{Value: vars}, err
	})
	x, err := engine.RunSync(t.Context(), executions.Spec{Flow: "asks", Surface: trace.Flow, ThreadID: "candidate"})
	require.NoError(t, err)
	return engine, x.ID
}

// resumeToEnd resumes an execution whose wait has ended, and returns its result.
func resumeToEnd(t *testing.T, pool *pgxpool.Pool, engine *executions.Engine, id string) map[string]any {
	t.Helper()
	var x executions.Execution
	pgtest.Eventually(t, func() bool {
		require.NoError(t, engine.ClaimAndRun(t.Context(), id))
		var err error
		x, err = executions.Get(t.Context(), pool, id)
		return err == nil && x.Status.Ended()
	}, "the execution ends")
	var vars map[string]any
	err := json.Unmarshal(x.Result, &vars)
	require.Truef(t, err == nil && x.Status == executions.Completed, "run is %s: %v, %v", x.Status, x.ErrorMessage, err)
	return vars
}

func TestEventsAnswerRequest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		request requests.Request
		event   string
		data    []string
		want    map[string]any
	}{
		"documents": {
			requests.Request{Kind: requests.Document, Title: "Papers", Items: []string{"cv", "photo"}},
			"DOCUMENT_UPLOADED",
			[]string{`{"document": "photo", "url": "u2"}`, `{"document": "cv", "url": "u1"}`},
			map[string]any{"documentUrls": []any{"u1", "u2"}, "documents": []any{
				map[string]any{"document": "cv", "url": "u1"}, map[string]any{"document": "photo", "url": "u2"},
			}},
		},
		"all documents at once, in their order": {
			requests.Request{Kind: requests.Document, Title: "Papers", Items: []string{"photo", "cv"}},
			"DOCUMENT_UPLOADED",
			[]string{`{"documentUrls": ["u2", "u1"]}`},
			map[string]any{"documentUrls": []any{"u2", "u1"}, "documents": []any{
				map[string]any{"document": "photo", "url": "u2"}, map[string]any{"document": "cv", "url": "u1"},
			}},
		},
		"an unexpected document": {
			requests.Request{Kind: requests.Document, Items: []string{"cv"}},
			"DOCUMENT_UPLOADED",
			[]string{`{"document": "passport of Ana", "url": "u2"}`, `{"document": "cv", "url": "u1"}`},
			map[string]any{"documentUrls": []any{"u1"}, "documents": []any{map[string]any{"document": "cv", "url": "u1"}}},
		},
		"signature": {
			requests.Request{Kind: requests.Signature, Details: map[string]any{"document": "contract"}},
			"SIGNATURE_COMPLETED",
			[]string{`{"signed_document_url": "u", "signed_at": "2026-01-02T03:04:05Z"}`},
			map[string]any{"signedDocumentUrl": "u", "signedAt": "2026-01-02T03:04:05Z"},
		},
		"test": {
			requests.Request{Kind: requests.Test},
			"TEST_COMPLETED",
			[]string{`{"testScore": 8.5, "testResult": {"passed": true}}`},
			map[string]any{"testScore": 8.5, "testResult": map[string]any{"passed": true}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			engine, id := startRequest(t, pool, c.request)
			open, err := requests.List(t.Context(), pool,
				requests.Filter{Kind: c.request.Kind, Status: requests.Pending, ThreadID: "candidate", ExecutionID: id})
			require.Truef(t, err == nil && len(open) == 1 && open[0].Title == c.request.Title && open[0].ExecutionID == id &&
				open[0].Answer == nil, "open requests %+v, %v", open, err)
			for _, data := range c.data {
				_, err := engine.Deliver(t.Context(), pool, c.event, open[0].ID, json.RawMessage(data), "")
				require.NoError(t, err)
			}
			assert.NoDiff(t, c.want, resumeToEnd(t, pool, engine, id))
			got, err := requests.Get(t.Context(), pool, open[0].ID)
			assert.Truef(t, err == nil && got.Status == requests.Completed && got.CompletedAt != nil && got.Answer != nil,
				"afterwards %+v, %v", got, err)
			hidden, err := requests.Get(activity.WithoutTexts(t.Context()), pool, open[0].ID)
			require.NoError(t, err)
			assert.Equal(t, `{"note":"`+activity.HiddenText+`"}`, string(hidden.Answer))
			list, err := requests.List(activity.WithoutTexts(t.Context()), pool, requests.Filter{})
			require.NoError(t, err)
			assert.NoDiff(t, []requests.Record{hidden}, list)
			for _, text := range []string{"Papers", "u1", "contract", "Ana"} {
				assert.Truef(t, !strings.Contains(fmt.Sprintf("%+v %s", hidden, hidden.Details), text), "%+v", hidden)
			}
		})
	}
}

func TestInvalidRequestsAreRejected(t *testing.T) {
	t.Parallel()
	for name, r := range map[string]requests.Request{
		"no kind":         {},
		"no items":        {Kind: requests.Document},
		"duplicate":       {Kind: requests.Document, Items: []string{"cv", "cv"}},
		"blank item":      {Kind: requests.Document, Items: []string{" "}},
		"items of a test": {Kind: requests.Test, Items: []string{"cv"}},
		"too many":        {Kind: requests.Document, Items: make([]string, 101)},
	} {
		_, err := requests.Ask(t.Context(), "ask", r)
		assert.ErrorIs(t, err, requests.ErrInvalid, name)
	}
	_, err := requests.Ask(t.Context(), "ask", requests.Request{Kind: requests.Test})
	assert.ErrorIs(t, err, executions.ErrNotInExecution, "outside")
	_, err = requests.WaitFor("pizza", "x", 0)
	assert.ErrorIs(t, err, requests.ErrInvalid, "unknown kind")
}

func TestListContinuesAfterCursor(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 5 {
		pgtest.Exec(t, pool, `insert into agent_requests (kind, execution_id, trace_id)
			values ('test', lanekeeper.agent_uuid7(), 'fl_x')`)
	}
	var seen []string
	for before := ""; ; {
		page, err := requests.List(t.Context(), pool, requests.Filter{Kind: requests.Test, Before: before, Limit: 2})
		require.NoError(t, err)
		if len(page) == 0 {
			break
		}
		for _, r := range page {
			assert.Truef(t, before == "" || r.ID < before, "%s comes after %s", r.ID, before)
			before = r.ID
			seen = append(seen, r.ID)
		}
	}
	assert.Equal(t, 5, len(seen))
	for _, id := range []string{"x", "00000000-0000-7000-8000-000000000000"} {
		_, err := requests.Get(t.Context(), pool, id)
		assert.ErrorIs(t, err, requests.ErrNotFound, id)
	}
}

// A request created in a transaction disappears with the rollback.
func TestRollbackRemovesRequest(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	undone := errors.New("undone")
	engine := enginetest.New(t, pool)
	enginetest.Register(t, engine, "undone", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return executions.Result{}, postgres.InTx(ctx, pool, func(tx pgx.Tx) error {
			if _, err := requests.Create(ctx, tx, requests.Request{Kind: requests.Test}); err != nil {
				return err
			}
			return undone
		})
	})
	_, err := engine.RunSync(t.Context(), executions.Spec{Flow: "undone", Surface: trace.Flow})
	require.NoError(t, err)
	got, err := requests.List(t.Context(), pool, requests.Filter{})
	assert.Truef(t, err == nil && len(got) == 0, "%d requests, %v", len(got), err)
}

// A document without a name answers no request. The only document of a request needs no name. A client without a URL
// may name the document alone.
func TestDocumentsWithoutNameAreRejected(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for items, rejected := range map[string]map[string]bool{
		"cv": {
			`{"documentUrls": ["u", "u", "u"]}`: true, `{"documents": [7]}`: true, `{"document": "cv"}`: false,
			`{"documents": []}`: true, `{"documents": {"cv": "u"}}`: true, `{"document": "cv", "documents": null}`: false,
			`{"document": "cv", "documentUrls": null}`: false,
		},
		"cv, photo": {
			`{}`: true, `{"file": "cv.pdf"}`: true, `{"documents": []}`: true, `{"documents": ["cv"]}`: true,
			`{"documents": {"cv": "u"}}`: true, `{"documentUrls": ["u", "u", "u"]}`: true,
			`{"documents": [{"document": "cv", "url": "u"}, 7]}`: true, `{"document": "cv"}`: false,
		},
	} {
		for data, wantError := range rejected {
			wanted := requests.Request{Kind: requests.Document, Title: "Papers", Items: strings.Split(items, ", ")}
			engine, id := startRequest(t, pool, wanted)
			key := pgtest.Value[string](t, pool, `select id::text from agent_requests where execution_id = @id`,
				postgres.Strict{"id": id})
			_, err := engine.Deliver(t.Context(), pool, "DOCUMENT_UPLOADED", key, json.RawMessage(data), "")
			pgErr, isError := errors.AsType[*pgconn.PgError](err)
			assert.Equal(t, wantError, isError, data, err)
			if isError {
				assert.Equal(t, "22023", pgErr.Code, data)
				assert.Contains(t, postgres.RefusalText(pgErr), " is missing in ")
				assert.Contains(t, pgErr.Detail, "asks for "+items)
			}
			got, err := requests.List(t.Context(), pool, requests.Filter{ExecutionID: id})
			assert.Truef(t, err == nil && (len(got[0].Received)+len(got[0].Unexpected) == 0) == wantError,
				"%s: %+v, %v", data, got, err)
		}
	}
}

// Data that would fail the waiting execution is rejected on arrival, and changes nothing.
func TestUnreadableEventDataIsRejected(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	engine, id := startRequest(t, pool, requests.Request{Kind: requests.Test, Title: "sql"})
	key := pgtest.Value[string](t, pool, `select id::text from agent_requests`)
	for event, refused := range map[string][]string{
		"MESSAGE_RECEIVED": {`"hola"`, `[1]`, `3`}, "DOCUMENT_UPLOADED": {`["cv"]`}, "SIGNATURE_COMPLETED": {`"https://x"`},
		"TEST_COMPLETED": {
			`85`, `{"score": "good"}`, `{"testScore": [1]}`, `{"test_score": "1e999"}`, `{"score": true}`,
			`{"score": 1e400}`, `{"score": {}}`,
		},
	} {
		for _, data := range refused {
			_, err := engine.Deliver(t.Context(), pool, event, key, json.RawMessage(data), "")
			assert.Truef(t, postgres.IsCode(err, "22023"), "%s of %s: %v", event, data, err)
		}
	}
	got, err := engine.Deliver(t.Context(), pool, "TEST_COMPLETED", key, json.RawMessage(`{"score": "-7.5e1"}`), "")
	assert.Truef(t, err == nil && len(got.Resumed) == 1 && got.Resumed[0] == id, "what can be read: %v, %v", got, err)
	for _, data := range []string{`"anything"`, `[1]`} {
		_, err := engine.Deliver(t.Context(), pool, "EVENT_COMPLETED", "free", json.RawMessage(data), "")
		assert.NoError(t, err, "an event of the flow's own may have any data")
	}
}

func upload(t *testing.T, pool *pgxpool.Pool, u documents.Upload) (d documents.Document) {
	t.Helper()
	u.Name, u.Content = "photo.txt", []byte("a dent")
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		d, err = documents.Add(t.Context(), tx, u)
		return err
	})
	require.NoError(t, err)
	return d
}

// A request accepts a stored document of its thread, or an unassigned one that an admin uploaded, which then belongs to
// the execution. A document of another owner changes nothing: the event is rejected.
func TestStoredDocumentsAnswerRequest(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	visitor := threads.Principal{Kind: threads.ByKey, Owner: "site"}
	for _, name := range []string{"candidate", "another"} {
		_, _, err := threads.Ensure(t.Context(), pool, threads.Thread{ID: name, Owner: "site"})
		require.NoError(t, err)
	}
	wanted := requests.Request{Kind: requests.Document, Title: "Papers", Items: []string{"photo", "form"}}
	engine, id := startRequest(t, pool, wanted)
	open, err := requests.List(t.Context(), pool, requests.Filter{ExecutionID: id})
	require.Truef(t, err == nil && len(open) == 1, "%+v, %v", open, err)
	deliver := func(item, document string) error {
		data, err := json.Marshal(map[string]string{"document": item, "document_id": document})
		require.NoError(t, err)
		_, err = engine.Deliver(t.Context(), pool, "DOCUMENT_UPLOADED", open[0].ID, data, "")
		return err
	}
	foreign := upload(t, pool, documents.Upload{By: visitor, ThreadID: "another"})
	unused := upload(t, pool, documents.Upload{By: visitor})
	for _, not := range []string{foreign.ID, unused.ID, "nonsense", ""} {
		assert.ErrorContains(t, deliver("photo", not), "there is no document", not)
	}
	own := upload(t, pool, documents.Upload{By: visitor, ThreadID: "candidate"})
	admin := upload(t, pool, documents.Upload{By: threads.Admin})
	for item, d := range map[string]documents.Document{"photo": own, "form": admin} {
		require.NoError(t, deliver(item, d.ID))
	}
	event := func(item string, d documents.Document) map[string]any {
		return map[string]any{
			"document": item, "id": d.ID, "name": "photo.txt", "content_type": d.ContentType, "size": 6.0,
			"url": "/v1/documents/" + d.ID + "/content",
		}
	}
	want := map[string]any{
		"documents":    []any{event("photo", own), event("form", admin)},
		"documentUrls": []any{"/v1/documents/" + own.ID + "/content", "/v1/documents/" + admin.ID + "/content"},
	}
	assert.NoDiff(t, want, resumeToEnd(t, pool, engine, id))
	got, err := documents.Get(t.Context(), pool, admin.ID)
	assert.Truef(t, err == nil && got.ExecutionID != nil && *got.ExecutionID == id,
		"the admin's document belongs to %v, %v", got.ExecutionID, err)
}

// A run reads the documents of its thread, its own, and those of the runs that started it. An operate session reads
// any.
func TestExecutionReadsDocumentsWithAccess(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ctx := t.Context()
	run := func(surface, thread, parent string) string {
		return pgtest.Value[string](t, pool, `
			insert into agent_executions (flow, surface, trace_id, thread_id, parent_id)
			values ('f', $1, 'op_x', nullif($2, ''), nullif($3, '')::uuid) returning id::text`, surface, thread, parent)
	}
	for _, name := range []string{"mine", "other"} {
		_, _, err := threads.Ensure(ctx, pool, threads.Thread{ID: name, Owner: "site"})
		require.NoError(t, err)
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
		assert.Equal(t, c.reads, sorted(reads), name)
	}
	list, err := documents.ListReadable(ctx, pool, child, 10)
	assert.Truef(t, err == nil && len(list) == 2 && list[0].ID == papers["chat's"].ID,
		"the list of a child: %+v, %v", list, err)
}

func sorted(words []string) string {
	slices.Sort(words)
	return strings.Join(words, " ")
}
