package engineroom

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/threads"
)

const aSession = "ses_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// insertSession inserts a turn of aSession, which is pending unless it is cancelled. An empty text is no message.
func insertSession(t *testing.T, db *pgxpool.Pool, said, answer string, cancelled bool) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, _, err := threads.Open(t.Context(), tx, threads.Admin,
			threads.Thread{ID: aSession, Channel: "operate", Agent: "agent", Participant: "admin"}); err != nil {
			return err
		}
		var id, trace string
		err := tx.QueryRow(t.Context(), `
			insert into agent_executions (trace_id, surface, flow, thread_id, input)
			  values (lanekeeper.agent_trace_id('op'), 'operate', 'operate', $1, jsonb_build_object('message', $2::text))
			returning id::text, trace_id`, aSession, said).Scan(&id, &trace)
		if err != nil {
			return err
		}
		for _, d := range []threads.NewMessage{
			{Role: threads.User, Content: said, Status: threads.Received},
			{Role: threads.Assistant, Content: answer, Status: threads.Sent},
		} {
			if d.Content == "" {
				continue
			}
			d.ThreadID, d.Channel, d.ExecutionID, d.TraceID = aSession, "operate", id, trace
			if _, err := threads.Post(t.Context(), tx, d); err != nil {
				return err
			}
		}
		if cancelled {
			_, err = tx.Exec(t.Context(), `select cancel_agent_execution($1, 'test', 'test')`, id)
		}
		return err
	})
	require.NoError(t, err)
}

func TestOperateShowsSession(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, body := testkit.Get(t, server.URL+"/operate")
	assert.Contains(t, body, "No message yet", "Lane operate: free", "No session yet", `action="/act/v1/operate"`,
		"operate.js")
	assert.True(t, !strings.Contains(body, `name="agent"`), "the page offers a choice of agent, but there is one agent")
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	wantTexts(t, server.URL+"/operate",
		`<select name="agent" id="agent"><option value="sales">sales</option><option value="billing">`)
	hostile := "<script>alert(1)</script>\u202eevil " + strings.Repeat("x", 1<<16)
	insertSession(t, pool, "what did you do? <b>", hostile, true)
	insertSession(t, pool, "and now?", "", false)
	status, body := testkit.Get(t, server.URL+"/operate?session="+aSession)
	for _, want := range []string{
		"what did you do? &lt;b&gt;", "&lt;script&gt;alert(1)", "⟨U+202E⟩evil", "characters in all",
		"A turn is running", `data-execution="`,
		"belongs to the agent sales", `value="` + aSession + `"`, `href="/operate?session=` + aSession + `"`,
	} {
		if status != 200 || !strings.Contains(body, want) {
			t.Errorf("status %d, %q is missing", status, want)
		}
	}
	assert.Truef(t, !strings.Contains(body, "<script>alert") && len(body) <= 100_000,
		"the page has %d bytes, or text that is not escaped", len(body))
	pgtest.Exec(t, pool, `select try_acquire_agent_lock('operate', 'somebody else', 60)`)
	_, body = testkit.Get(t, server.URL+"/operate")
	assert.True(t, strings.Contains(body, "somebody else") && !strings.Contains(body, "Lane operate: free"),
		"the holder is missing")
	for _, bad := range []string{"?session=%00", "?sesion=x", "?session=" + strings.Repeat("x", 400)} {
		status, _ := testkit.Get(t, server.URL+"/operate"+bad)
		assert.Equal(t, 400, status, bad, "status")
	}
	status, body = testkit.Get(t, server.URL+"/operate?session=unknown")
	assert.Truef(t, status == 200 && strings.Contains(body, "No message yet"),
		"status of a session without messages: %d", status)
}

// A turn that ended without an answer says why.
func TestOperateShowsCancelledTurn(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertSession(t, pool, "and now?", "", true)
	wantTexts(t, server.URL+"/operate?session="+aSession, "and now?", "The turn was cancelled: test")
}

func TestOperateFormWithoutScript(t *testing.T) {
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
	room := newRoom(t, Options{Pool: pgtest.DB(t), API: func() http.Handler {
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
	mux := muxOf(room)
	for message, want := range map[string]struct{ to, said string }{
		"hello": {"/operate?session=ses_1", "The agent has answered."}, "busy": {"/operate?session=ses_0", "held by ana"},
		"drop it": {"/operate?session=ses_2", "waits for an approval"},
		"late":    {"/login?next=%2Foperate%3Fsession%3Dses_0", ""},
	} {
		form := url.Values{"message": {message}, "session_id": {"ses_0"}, "agent": {"billing"}}
		r := httptest.NewRequest(http.MethodPost, "/act/v1/operate", strings.NewReader(form.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Cookie", "lanekeeper=me")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		assert.Truef(t, w.Code == http.StatusSeeOther && w.Header().Get("Location") == want.to,
			"%s: %d to %s", message, w.Code, w.Header().Get("Location"))
		assert.Truef(t, got.accept == "application/json" && got.cookie == "lanekeeper=me" &&
			strings.Contains(got.body, `"agent":"billing"`) && strings.Contains(got.body, `"session_id":"ses_0"`),
			"%s: sent %+v", message, got)
		text := ""
		for _, c := range w.Result().Cookies() {
			if f := room.readFlash(c.Value); c.Name == flashCookie && f != nil {
				text = f.Text
			}
		}
		assert.Truef(t, strings.Contains(text, want.said) && (text == "") == (want.said == ""),
			"%s: the page will say %q", message, text)
	}
}
