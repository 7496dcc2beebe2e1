package engineroom

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/threads"
)

const aSession = "ses_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// spoken puts a session with a turn into the database.
func spoken(t *testing.T, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, said, answer, status string,
) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, _, err := threads.Open(t.Context(), tx, threads.Admin, threads.Thread{ID: aSession, Channel: "operate", Agent: "agent", Participant: "admin"}); err != nil {
			return err
		}
		var id, trace string
		err := tx.QueryRow(t.Context(), `
			insert into agent_executions (trace_id, surface, flow, thread_id, input) values (lanekeeper.agent_trace_id('op'), 'operate', 'operate', $1, jsonb_build_object('message', $2::text))
			returning id::text, trace_id`, aSession, said).Scan(&id, &trace)
		if err != nil {
			return err
		}
		for _, d := range []threads.Draft{
			{Role: threads.User, Content: said, Status: threads.Received}, {Role: threads.Assistant, Content: answer, Status: threads.Sent},
		} {
			if d.Content == "" {
				continue
			}
			d.ThreadID, d.Channel, d.ExecutionID, d.TraceID = aSession, "operate", id, trace
			if _, err := threads.Post(t.Context(), tx, d); err != nil {
				return err
			}
		}
		if status == "cancelled" {
			_, err = tx.Exec(t.Context(), `select cancel_agent_execution($1, 'test', 'test')`, id)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOperateShowsASession(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	_, body := see(t, server.URL+"/operate")
	for _, want := range []string{"Nothing was said here yet", "Nobody has it", "Nobody has talked", `action="/act/v1/operate"`, "operate.js"} {
		if !strings.Contains(body, want) {
			t.Errorf("empty: %q is missing", want)
		}
	}
	if strings.Contains(body, `name="agent"`) {
		t.Error("one agent alone is no choice")
	}
	acts(t, pool, agents.Definition{Name: "sales", Default: true})
	acts(t, pool, agents.Definition{Name: "billing"})
	shows(t, server.URL+"/operate", `<select name="agent" id="agent"><option value="sales">sales</option><option value="billing">`)
	hostile := "<script>alert(1)</script>\u202eevil " + strings.Repeat("x", 1<<16)
	spoken(t, pool, "what did you do? <b>", hostile, "cancelled")
	spoken(t, pool, "and now?", "", "pending")
	status, body := see(t, server.URL+"/operate?session="+aSession)
	for _, want := range []string{
		"what did you do? &lt;b&gt;", "&lt;script&gt;alert(1)", "⟨U+202E⟩evil", "characters in all", "A turn is under way", `data-execution="`,
		"one with the agent sales", `value="` + aSession + `"`, `href="/operate?session=` + aSession + `"`,
	} {
		if status != 200 || !strings.Contains(body, want) {
			_, who, _ := strings.Cut(body, `<p id="who">`)
			t.Errorf("status %d, %q is missing; who acts: %.300s", status, want, who)
		}
	}
	if strings.Contains(body, "<script>alert") || len(body) > 100_000 {
		t.Errorf("the page has what was said as it was said, in %d bytes", len(body))
	}
	if _, err := pool.Exec(t.Context(), `select try_acquire_agent_lock('operate', 'somebody else', 60)`); err != nil {
		t.Fatal(err)
	}
	if _, body := see(t, server.URL+"/operate"); !strings.Contains(body, "somebody else") || strings.Contains(body, "Nobody has it") {
		t.Error("the holder is missing")
	}
	for _, bad := range []string{"?session=%00", "?sesion=x", "?session=" + strings.Repeat("x", 400)} {
		if status, _ := see(t, server.URL+"/operate"+bad); status != 400 {
			t.Errorf("%s: status %d", bad, status)
		}
	}
	if status, body := see(t, server.URL+"/operate?session=unknown"); status != 200 || !strings.Contains(body, "Nothing was said here yet") {
		t.Errorf("a session that was never spoken in: %d", status)
	}
}

func TestTheFormOfOperateWorksWithoutAScript(t *testing.T) {
	t.Parallel()
	answers := map[string]func(w http.ResponseWriter){
		"hello": func(w http.ResponseWriter) {
			w.Header().Set("X-Trace-Id", "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
			io.WriteString(w, `{"session_id":"ses_1","ended":"answered"}`)
		},
		"busy": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusConflict)
			io.WriteString(w, `{"detail":"lane operate is held by ana","status":409}`)
		},
		"drop it": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusAccepted)
			io.WriteString(w, `{"session_id":"ses_2","ended":"waiting_approval"}`)
		},
		"late": func(w http.ResponseWriter) { w.WriteHeader(http.StatusUnauthorized) },
	}
	var got struct{ body, accept, cookie string }
	room, err := New(Options{Pool: pgtest.DB(t), Agent: "agent", API: func() http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			got.body, got.accept, got.cookie = string(text), r.Header.Get("Accept"), r.Header.Get("Cookie")
			for message, answer := range answers {
				if strings.Contains(got.body, `"`+message+`"`) && r.URL.Path == "/v1/operate" {
					answer(w)
				}
			}
		})
	}})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	for message, want := range map[string]struct{ to, said string }{
		"hello": {"/operate?session=ses_1", "The agent has answered."}, "busy": {"/operate?session=ses_0", "held by ana"},
		"drop it": {"/operate?session=ses_2", "waits for an approval"}, "late": {"/login?next=%2Foperate%3Fsession%3Dses_0", ""},
	} {
		form := url.Values{"message": {message}, "session_id": {"ses_0"}, "agent": {"billing"}}
		r := httptest.NewRequest(http.MethodPost, "/act/v1/operate", strings.NewReader(form.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Cookie", "lanekeeper=me")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		if w.Code != http.StatusSeeOther || w.Header().Get("Location") != want.to {
			t.Errorf("%s: %d to %s", message, w.Code, w.Header().Get("Location"))
		}
		if got.accept != "application/json" || got.cookie != "lanekeeper=me" || !strings.Contains(got.body, `"agent":"billing"`) || !strings.Contains(got.body, `"session_id":"ses_0"`) {
			t.Errorf("%s: sent %+v", message, got)
		}
		said := ""
		for _, c := range w.Result().Cookies() {
			if f := room.readFlash(c.Value); c.Name == flashCookie && f != nil {
				said = f.Text
			}
		}
		if !strings.Contains(said, want.said) || want.said != "" && said == "" {
			t.Errorf("%s: the page will say %q", message, said)
		}
	}
}

func TestOperateReadsNoMoreThanItShows(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	spoken(t, pool, "what did you do?", "Nothing.", "cancelled")
	for _, sql := range []string{
		`insert into agent_executions (trace_id, surface, flow, input, thread_id)
		 select 'op_' || lpad(g::text, 26, '0'), 'operate', case when g % 3 = 0 then 'operate' else 'flow' end, '{"message": "hello"}', 'other' from generate_series(1, 6000) g`,
		`insert into agent_messages (thread_id, seq, turn, role, content, status)
		 select '` + aSession + `', g + 10, g + 10, 'user', 'hello', 'received' from generate_series(1, 6000) g`,
		`insert into agent_pauses (paused_by, reason, trace_id, resumed_at) select 'ana', 'why', 'op_1', clock_timestamp() from generate_series(1, 6000)`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pool.Exec(t.Context(), `select try_acquire_agent_lock('operate', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 60)`); err != nil {
		t.Fatal(err)
	}
	analyse(t, pool, "agent_executions", "agent_messages", "agent_pauses")
	shows(t, server.URL+"/operate?session="+aSession, "What was said before")
	for _, path := range []string{"/operate", "/operate?session=" + aSession} {
		bounded(t, pool, path, "agent_executions", "agent_messages", "agent_pauses")
	}
}

// Who only asks whether a stream is there has its answer at once, or the next request on the connection would wait for ever.
func TestAStreamThatIsAskedForItsHeadersEnds(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}, Timeout: 60 * time.Second}
	t.Cleanup(client.CloseIdleConnections)
	for _, c := range []struct {
		method, path string
		status       int
	}{{"HEAD", "/live/operate", 200}, {"GET", "/operate", 200}, {"HEAD", "/live/operate?session=%00", 400}, {"GET", "/operate", 200}} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		got, err := client.Do(r)
		if err != nil {
			t.Fatalf("%s %s: %v", c.method, c.path, err)
		}
		if _, err := io.Copy(io.Discard, got.Body); err != nil || got.Body.Close() != nil || got.StatusCode != c.status {
			t.Errorf("%s %s: status %d, %v", c.method, c.path, got.StatusCode, err)
		}
	}
}
