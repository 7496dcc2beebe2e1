package api_test

import (
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// written are requests in whose bodies and addresses $T stands for a text; "$T" in quotes is a JSON text, if the text is.
var written = []string{
	`POST /v1/events {"event": "EVENT_COMPLETED", "key": "$T", "data": {"a": "$T", "$T": [$T]}, "id": "$T"}`,
	`POST /v1/events {"event": "MESSAGE_RECEIVED", "key": "thread", "data": {"content": "$T"}}`,
	`POST /v1/executions {"flow": "external:$T", "input": {"$T": "$T"}, "thread_id": "$T"}`,
	`POST /v1/executions {"flow": "external:a", "input": $T}`,
	`POST /v1/executions/$X/lock {"owner": "$T", "ttl_seconds": 30}`,
	`POST /v1/executions/$X/checkpoints {"lock_id": "$L", "step": "$T", "output": {"a": "$T"}}`,
	`POST /v1/executions/$X/checkpoints {"lock_id": "$T", "step": "a", "output": $T}`,
	`PUT /v1/retention {"keep": {"$T": "$T"}, "reason": "$T"}`, `PUT /v1/retention {"keep": {"activity": "$T"}, "reason": "a"}`,
	`PUT /v1/locks {"lock_ids": ["$T", "$L"]}`,
	`POST /v1/executions/$X/fork {"from": "$T", "input": $T}`,
	`POST /v1/threads {"id": "$T", "participant": "$T", "owner": "$T", "target": "$T"}`, `POST /v1/threads {"id": "a", "participant": "$T"}`,
	`POST /v1/threads/thread/messages {"content": "$T"}`,
	`POST /v1/threads/$T/messages {"content": "a"}`,
	`POST /v1/skills/$T/disable {"reason": "$T"}`, `POST /v1/lanes/$T/break {"reason": "$T"}`,
	`POST /v1/approvals/$T {"decision": "reject", "reason": "$T"}`, `POST /v1/resume {"reason": "$T"}`,
	`GET /v1/executions?flow=$T&status=$T&trace_id=$T`, `GET /v1/activity?trace_id=$T&skill=$T&cursor=$T`, `GET /v1/executions?cursor=$T`,
	`GET /v1/traces/$T`, `GET /v1/traces?surface=$T&cursor=$T`, `GET /v1/threads/$T`, `GET /v1/memory?q=$T&category=$T`, `GET /v1/flows/$T`,
	`GET /v1/skills?q=$T`, `GET /v1/lanes?lane=$T`, `GET /v1/approvals/$T`, `GET /v1/objectives/$T`, `GET /v1/requests/$T`, `GET /v1/executions/$T`,
}

// FuzzTextOnItsWayIn sends any text through every door: the database cannot hold NUL, bytes that are not UTF-8, or
// half of a surrogate pair, and no number beyond its own. Whatever it is, it is taken, or refused as the client's mistake; it
// is never ours.
func FuzzTextOnItsWayIn(f *testing.F) {
	pool := pgtest.DB(f)
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	if err != nil {
		f.Fatal(err)
	}
	log := &logged{}
	handler, err := api.New(api.Options{Pool: pool, Engine: e, AdminToken: token, Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError}))})
	if err != nil {
		f.Fatal(err)
	}
	if _, err := pool.Exec(f.Context(), `insert into agent_threads (id, channel, participant) values ('thread', 'chat', 'ana')`); err != nil {
		f.Fatal(err)
	}
	for i := range written {
		for _, text := range []string{"a", "\x00", `\u0000`, `"\ud800"`, "\xff\xfe", "1e400"} {
			f.Add(uint8(i), text)
		}
	}
	for i, text := range []string{
		"", `\ud800\u0000\udc00`, `\udc00\ud800`, "\xed\xa0\x80", `-1e-400`, "12345678901234567890123", "%00", "..", "/", "\u2028\ufeff", `\\`, `"`,
		strings.Repeat("x", 3000), strings.Repeat("[", 500) + strings.Repeat("]", 500), `{"a": 1, "a": 2}`, "hb_\x00", "\U0010ffff\u0301",
	} {
		f.Add(uint8(i), text)
		f.Add(uint8(i+len(written)/2), text)
	}
	f.Fuzz(func(t *testing.T, which uint8, text string) {
		x, lock := external(t, pool, e)
		method, path, body := request(written[int(which)%len(written)], text, x, lock)
		var sent *strings.Reader
		if sent = strings.NewReader(body); method == http.MethodGet {
			sent = strings.NewReader("")
		}
		target, err := url.Parse(path)
		if err != nil {
			return
		}
		r := httptest.NewRequestWithContext(t.Context(), method, "/", sent)
		r.URL, r.RequestURI = target, target.RequestURI()
		maps.Copy(r.Header, asAdmin())
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code >= http.StatusInternalServerError {
			t.Errorf("%s %q %q: %d %s\n%s", method, path, body, w.Code, w.Body, log)
		}
	})
}

// request fills the text in: escaped in an address, as it is in a body.
func request(form, text, x, lock string) (method, path, body string) {
	method, rest, _ := strings.Cut(strings.NewReplacer("$X", x, "$L", lock).Replace(form), " ")
	path, body, _ = strings.Cut(rest, " ")
	before, query, asked := strings.Cut(path, "?")
	path = strings.ReplaceAll(before, "$T", url.PathEscape(text))
	if asked {
		path += "?" + strings.ReplaceAll(query, "$T", url.QueryEscape(text))
	}
	return method, path, strings.ReplaceAll(body, "$T", text)
}

// external is an execution that is locked by a worker outside.
func external(t *testing.T, pool *pgxpool.Pool, e *executions.Engine) (id, lock string) {
	t.Helper()
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "external:fuzz", Surface: trace.Flow})
	if err != nil {
		t.Fatal(err)
	}
	got, err := e.LockRun(t.Context(), x.ID, "fuzz", 10*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return x.ID, got.LockID
}
