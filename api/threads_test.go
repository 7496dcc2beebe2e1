package api_test

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// messageContent is the response to a message.
type messageContent struct {
	Success, Queued bool
	MessageID       string `json:"message_id"`
}

// create expects 201 and decodes the response.
func (a *agent) create(path, body string, into any) {
	a.t.Helper()
	if into == nil {
		into = &struct{}{}
	}
	a.checkResponse(a.raw("POST", path, body, asAdmin()), "POST", path, http.StatusCreated, into)
}

// lockExternal starts an execution locked by an external worker and returns its id and lock.
func (a *agent) lockExternal(owner string) (id, lock string) {
	a.t.Helper()
	id = pgtest.Value[string](a.t, a.pool, `insert into agent_executions (trace_id, surface, agent, flow)
		values (lanekeeper.agent_trace_id('fl'), 'flow', 'outside', 'external') returning id::text`)
	return id, pgtest.Value[string](a.t, a.pool, `select lock_id from lock_agent_execution($1, $2)`, id, owner)
}

func TestSendMessages(t *testing.T) {
	t.Parallel()
	a := start(t)
	var made threads.Thread
	a.create("/v1/threads", `{"id":"maria","participant":"Maria","owner":"site"}`, &made)
	assert.Truef(t, made.ID == "maria" && made.Channel == "chat" && made.Participant == "Maria", "made: %+v", made)
	a.checkProblem(a.raw("POST", "/v1/threads", `{"id":"maria"}`, asAdmin()), 409, "exists")
	a.checkProblem(a.raw("POST", "/v1/threads", `{"id":"x","channel":"webhook","target":"none"}`, asAdmin()), 400,
		"target")
	a.checkProblem(a.raw("POST", "/v1/threads", `{"id":"x","channel":"pigeon"}`, asAdmin()), 400, "channel")
	for _, idle := range []string{"0", "-1", "2592001"} {
		a.checkProblem(a.raw("POST", "/v1/threads", `{"id":"x","idle_seconds":`+idle+`}`, asAdmin()), 400, "idle_seconds")
	}
	a.create("/v1/threads", `{"id":"quick","idle_seconds":20}`, &made)
	assert.Truef(t, made.IdleSeconds == 20 &&
		pgtest.Value[int](t, a.pool, `select idle_seconds from agent_threads where id = 'maria'`) == 600, "idle time: %+v",
		made)

	first, lock := a.lockExternal("first")
	second, other := a.lockExternal("second")
	tell := func(words, id, lock string) (got messageContent) {
		t.Helper()
		a.create("/v1/threads/maria/messages", fmt.Sprintf(`{"content":%q,"execution_id":%q,"lock_id":%q}`, words, id, lock),
			&got)
		assert.Truef(t, got.Success && got.MessageID != "", "%s: %+v", words, got)
		return got
	}
	assert.True(t, !tell("one", first, lock).Queued && tell("two", second, other).Queued &&
		!tell("three", first, lock).Queued, "the holder speaks at once, the other queues")
	var got messageContent
	a.create("/v1/threads/maria/messages", `{"content":"an admin"}`, &got)
	assert.Truef(t, got.Success && got.Queued, "the admin's: %+v", got)
	pgtest.Exec(t, a.pool, `select unlock_agent_execution($1, $2, 'completed')`, first, lock)
	pgtest.Exec(t, a.pool, `select lanekeeper.flush_agent_thread('maria')`)
	pgtest.Exec(t, a.pool, `select unlock_agent_execution($1, $2, 'completed')`, second, other)
	pgtest.Exec(t, a.pool, `select lanekeeper.flush_agent_thread('maria')`)
	var shown struct{ Messages []threads.Message }
	a.get("/v1/threads/maria", &shown)
	var order []string
	for _, m := range shown.Messages {
		order = append(order, m.Content)
	}
	assert.Equal(t, "[an admin two three one]", fmt.Sprint(order), order)
	pgtest.Equal(t, a.pool, 1, `select count(*)::int from agent_activity where skill_name = 'send_message'
		and agent = 'admin'`)
}

func TestMessageLogLines(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.create("/v1/threads", `{"id":"pedro"}`, nil)
	first, lock := a.lockExternal("first")
	second, other := a.lockExternal("second")
	a.create("/v1/threads/pedro/messages", fmt.Sprintf(`{"content":"one","execution_id":%q,"lock_id":%q}`, first, lock),
		nil)
	a.create("/v1/threads/pedro/messages", fmt.Sprintf(`{"content":"two","execution_id":%q,"lock_id":%q}`, second, other),
		nil)
	a.create("/v1/threads/pedro/messages", `{"content":"an admin"}`, nil)
	got := a.log.String()
	traceOf := func(id string) string {
		return pgtest.Value[string](t, a.pool, `select trace_id from agent_executions where id = $1`, id)
	}
	audit := pgtest.Value[string](t, a.pool, `select trace_id from agent_activity where skill_name = 'send_message'`)
	for _, line := range []string{
		fmt.Sprintf(`msg="lane acquired" trace_id=%s execution_id=%s lane=thread:pedro owner=%s#1`,
			traceOf(first), first, first),
		fmt.Sprintf(`msg="lane busy" trace_id=%s execution_id=%s lane=thread:pedro owner=%s#1 holder=%s#1`, traceOf(second),
			second, second, first),
		fmt.Sprintf(`msg="lane busy" trace_id=%s lane=thread:pedro owner=root holder=%s#1`, audit, first),
	} {
		assert.Contains(t, got, line)
	}
}

func TestInvalidMessages(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.create("/v1/threads", `{"id":"t"}`, nil)
	inside := a.start("beat", trace.New(trace.Flow)).ID
	id, lock := a.lockExternal("worker")
	path := "/v1/threads/t/messages"
	const missing = "018f0000-0000-7000-8000-000000000000"
	for name, tc := range map[string]struct {
		body   string
		status int
		detail string // a part of it
	}{
		"blank content":     {body: `{"content":" "}`, status: 400, detail: "content"},
		"unknown field":     {body: `{"content":"x","role":"user"}`, status: 400, detail: "role"},
		"only lock":         {body: `{"content":"x","lock_id":"y"}`, status: 400, detail: "execution_id"},
		"malformed id":      {body: `{"content":"x","execution_id":"y"}`, status: 400, detail: "execution_id"},
		"missing execution": {body: `{"content":"x","execution_id":"` + missing + `","lock_id":"y"}`, status: 404},
		"internal execution": {
			body: fmt.Sprintf(`{"content":"x","execution_id":%q}`, inside), status: 403, detail: "sends its own messages",
		},
		"no lock": {body: fmt.Sprintf(`{"content":"x","execution_id":%q}`, id), status: 403, detail: "lock_id"},
		"void lock": {
			body: fmt.Sprintf(`{"content":"x","execution_id":%q,"lock_id":"void"}`, id), status: 409, detail: "worker",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.checkProblem(a.raw("POST", path, tc.body, asAdmin()), tc.status, tc.detail)
		})
	}
	a.t = t
	a.checkProblem(a.raw("POST", "/v1/threads/none/messages", `{"content":"x"}`, asAdmin()), 404, "no such thread")
	pgtest.Exec(t, a.pool, `select cancel_agent_execution($1, 'admin', 'enough')`, id)
	a.checkProblem(a.raw("POST", path, fmt.Sprintf(`{"content":"x","execution_id":%q,"lock_id":%q}`, id, lock), asAdmin()),
		409, "ended")
	join := "/v1/threads/t/join_tokens" // a token of an ended execution admits nobody
	a.checkProblem(a.raw("POST", join, fmt.Sprintf(`{"execution_id":%q}`, id), asAdmin()), 400, "has ended: cancelled")
	a.checkProblem(a.raw("POST", join, fmt.Sprintf(`{"execution_id":%q}`, missing), asAdmin()), 404, "no execution")
	a.create(join, fmt.Sprintf(`{"execution_id":%q}`, inside), nil)
	pgtest.Equal(t, a.pool, 0, `select count(*)::int from agent_messages`)
}

// A message with a key is sent once, even if its response was not stored.
func TestMessageWithKeyIsSentOnce(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.create("/v1/threads", `{"id":"t"}`, nil)
	var ids []string
	for range 2 {
		header := asAdmin()
		header.Set("Idempotency-Key", "k")
		response := a.raw("POST", "/v1/threads/t/messages", `{"content":"once"}`, header)
		require.Equal(t, http.StatusCreated, response.Code)
		ids = append(ids, pgtest.Value[string](t, a.pool, `select max(id::text) from agent_messages`))
		pgtest.Exec(t, a.pool, `delete from agent_idempotency`)
	}
	n := pgtest.Value[int](t, a.pool, `select count(*)::int from agent_messages`)
	assert.Truef(t, n == 1 && ids[0] == ids[1], "%d messages, %v", n, ids)
}

// A start with a new thread opens the thread for the flow.
func TestExecutionOpensThread(t *testing.T) {
	t.Parallel()
	a := runningAgent(t)
	a.startExternal(`,"thread_id":"begun"`)
	a.startExternal(`,"thread_id":"begun"`)
	var got struct {
		ID, Channel, Owner string
		OwnerKind          string `json:"owner_kind"`
	}
	a.get("/v1/threads/begun", &got)
	assert.Truef(t, got.ID == "begun" && got.Channel == "chat" && got.OwnerKind == "flow" && got.Owner == "external",
		"the thread is %+v", got)
}

func TestSetThreadTitle(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.create("/v1/threads", `{"id":"maria"}`, nil)
	rename := func(body, want string) {
		t.Helper()
		var named threads.Thread
		a.checkResponse(a.raw("PATCH", "/v1/threads/maria", body, asAdmin()), "PATCH", "/v1/threads/{id}", 200, &named)
		assert.Equal(t, want, named.Title)
	}
	rename(`{"title":" Refunds of May "}`, "Refunds of May")
	rename(`{"title":"Refunds of May"}`, "Refunds of May")
	pgtest.Equal(t, a.pool, 1, `select count(*) from agent_activity where skill_name = 'name_thread'`)
	rename(`{"title":""}`, "")
	a.checkProblem(a.raw("PATCH", "/v1/threads/maria", `{}`, asAdmin()), 400, "title is required")
	a.checkProblem(a.raw("PATCH", "/v1/threads/maria", `{"title":"\u0007"}`, asAdmin()), 400, "200 characters")
	a.checkProblem(a.raw("PATCH", "/v1/threads/none", `{"title":"x"}`, asAdmin()), 404, "no such thread")
}

func TestThreadPages(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, id := range []string{"first", "second/with a slash"} {
		_, _, err := threads.Ensure(t.Context(), a.pool, threads.Thread{ID: id, Channel: "chat", Owner: "website"})
		require.NoError(t, err)
	}
	for i := range 7 {
		d := threads.NewMessage{
			ThreadID: "first", Role: threads.User, Content: fmt.Sprint(i), Channel: "chat",
			Status: threads.Received,
		}
		_, err := threads.Post(t.Context(), a.pool, d)
		require.NoError(t, err)
	}
	assert.NoDiff(t, []string{"first", "second/with a slash"}, a.list("/v1/threads?channel=chat", "id", 1, nil))
	var contents []string
	path := "/v1/threads/first?limit=3"
	for path != "" {
		var got struct {
			ID       string
			Messages []threads.Message
			Next     *string `json:"next_cursor"`
		}
		a.get(path, &got)
		for _, m := range got.Messages {
			contents = append(contents, m.Content)
		}
		path = ""
		if got.Next != nil {
			path = "/v1/threads/first?limit=3&cursor=" + *got.Next
		}
	}
	assert.NoDiff(t, []string{"6", "5", "4", "3", "2", "1", "0"}, contents)
	var other struct{ Messages []any }
	a.get("/v1/threads/second%2Fwith%20a%20slash", &other)
	assert.Truef(t, other.Messages != nil && len(other.Messages) == 0, "messages are %v", other.Messages)
	pgtest.Exec(t, a.pool, `insert into agent_messages (thread_id, role, content, status)
		select 'second/with a slash', 'assistant', 'wait', 'queued' from generate_series(1, 1001)`)
	a.get("/v1/threads/second%2Fwith%20a%20slash", &other)
	assert.Equal(t, 1001, len(other.Messages), "queued messages")
	a.checkProblem(a.raw("GET", "/v1/threads/none", "", asAdmin()), 404, "no such thread")
	a.checkProblem(a.raw("GET", "/v1/threads/%00", "", asAdmin()), 400, "printable")
	a.checkProblem(a.raw("GET", "/v1/threads/first?cursor=x", "", asAdmin()), 400, "cursor")
	a.checkProblem(a.raw("GET", "/v1/threads?cursor=x", "", asAdmin()), 400, "cursor")
}
