package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	operateFlow         = "operate" // the flow of an admin's turn, and the name of its lane
	operateChannel      = "operate" // the channel of a session
	maxSessions         = 30        // sessions in the list
	maxSearchedSessions = 1000      // threads of admins that the list searches
	maxSessionMessages  = 60        // messages of the shown session
	maxMessageLength    = 8000      // characters of a message
	maxTurnCalls        = 40        // calls of skills in a turn
	callTurns           = 5         // newest turns whose calls the page shows
)

// operatePage is the admin's conversation with the agent. It shows one session with its requested approvals, a message
// form, the lane's holder, and the list of sessions. With JavaScript the server streams the answer (assets/operate.js).
// Without JavaScript the response is the finished turn.
func (room *Room) operatePage() page {
	return page{
		path: "/operate", name: "operate", navLabel: "Operate", title: "Operate", open: openSession, fromPrimary: true,
		parts: []part{
			{name: "session", load: room.sessionMessages},
			{name: "who", load: room.operateAgents},
			{name: "holder", interval: time.Second, load: room.operateHolder},
			{name: "sessions", interval: 3 * time.Second, refreshOnActivity: true, load: room.operateSessions},
		},
	}
}

// operateSubject holds the parameters of the page.
type operateSubject struct{ Session, Q string }

// openSession reads the session from the URL; none starts a new one.
func openSession(_ context.Context, req *pageRequest) (string, error) {
	for name := range req.Query {
		if name != "session" && name != "q" {
			return "", problem.BadParameter("%.60q is no filter of this page; it takes session and q", name)
		}
	}
	session := req.Query.Get("session")
	if session != "" && threads.CheckID(session) != nil {
		return "", problem.New(http.StatusBadRequest, "session: %s", threads.CheckID(session)).Kind("malformed-id",
			"Malformed id")
	}
	q, err := req.textFilter("q")
	req.Subject = operateSubject{session, q}
	return "", err
}

// sessionMessage is a message of a session.
type sessionMessage struct {
	ID, Role, Content string
	Length            int64
	TraceID           string
	At                time.Time
}

// runningTurn is a running turn.
type runningTurn struct {
	ExecutionID, TraceID, Status, WaitingFor string
}

// sessionCall is a call of a skill in a turn.
type sessionCall struct {
	ID, TraceID, Name, Status, Error string
	ExecutionID                      string
	Input, Output                    string
	At                               time.Time
	InputBytes, OutputBytes          int64
	DurationMS                       *int64
	Arguments, Result                shownValue `db:"-"`
}

// haltedTurn is a turn without an answer that was cancelled or failed.
type haltedTurn struct {
	TraceID, Status, Reason string
}

// sessionEntry is a message, a call, or the end of a turn without an answer.
type sessionEntry struct {
	Message *sessionMessage
	Call    *sessionCall
	Halted  *haltedTurn
}

// sessionView is a session's transcript with its running turn and the awaited approvals.
type sessionView struct {
	Session   string
	Known     bool // the thread exists
	Title     string
	Entries   []sessionEntry
	Earlier   bool
	Now       *runningTurn
	Approvals []pendingApproval
}

// sessionMessages reads the shown session once. The page's script appends later messages.
func (room *Room) sessionMessages(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(operateSubject)
	view := sessionView{Session: subject.Session}
	if view.Session == "" {
		return view, nil
	}
	err := room.Pool.QueryRow(ctx, `
		select left(t.title, 200) from agent_threads t where t.id = @session and t.channel = 'operate'`,
		postgres.Strict{"session": view.Session}).Scan(&view.Title)
	if errors.Is(err, pgx.ErrNoRows) {
		return view, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the messages of a session's thread: %w", err)
	}
	view.Known = true
	messages, err := postgres.Rows[sessionMessage](ctx, room.Pool, "read session", `
		select m.id::text, m.role, left(m.content, @long) as content, length(m.content)::bigint as length,
		       left(coalesce(m.trace_id, ''), 200) as trace_id, m.created_at as at
		  from (select n.* from agent_messages n where n.thread_id = @session and n.seq is not null
		         order by n.turn desc, n.seq desc limit @limit::int + 1) m
		 order by m.turn, m.seq`,
		postgres.Strict{"session": view.Session, "limit": maxSessionMessages, "long": maxMessageLength})
	if err != nil {
		return nil, err
	}
	if view.Earlier = len(messages) > maxSessionMessages; view.Earlier {
		messages = messages[1:]
	}
	turns, err := postgres.Rows[runningTurn](ctx, room.Pool, "read turn", `
		select x.id::text as execution_id, x.trace_id, x.status, coalesce(x.waiting_for, '') as waiting_for
		  from agent_executions x
		 where x.thread_id = @session and x.completed_at is null and x.flow = @flow order by x.id desc limit 1`,
		postgres.Strict{"session": view.Session, "flow": operateFlow})
	if err != nil {
		return nil, err
	}
	if len(turns) > 0 {
		view.Now = &turns[0]
		err := haltRunning(ctx, room.Pool, 1, func(int) string { return view.Now.ExecutionID }, func(_ int, h halt) {
			if !h.Unclaimed {
				view.Now.Status = h.State
			}
		})
		if err != nil {
			return nil, err
		}
		if view.Approvals, err = room.approvalsOf(ctx, view.Now.TraceID, req.URL); err != nil {
			return nil, err
		}
	}
	calls, err := room.callsOfTurns(ctx, messages)
	if err != nil {
		return nil, err
	}
	halted, err := postgres.Rows[haltedTurn](ctx, room.Pool, "read halted turns", `
		select x.trace_id, x.status, left(coalesce(x.cancel_reason, x.error_message, ''), 1000) as reason
		  from agent_executions x
		 where x.trace_id = any (@traces::text[]) and x.thread_id = @session and x.flow = @flow
		   and x.status in ('cancelled', 'failed', 'timeout')`, customPlan,
		postgres.Strict{"traces": newestTraces(messages), "session": view.Session, "flow": operateFlow})
	if err != nil {
		return nil, err
	}
	for i := range halted {
		halted[i].Reason = redact.Text(halted[i].Reason, maxValue)
	}
	view.Entries = transcript(messages, calls, halted)
	return view, nil
}

// newestTraces returns the traces of the newest turns.
func newestTraces(messages []sessionMessage) (traces []string) {
	for _, m := range slices.Backward(messages) {
		if m.TraceID != "" && !slices.Contains(traces, m.TraceID) && len(traces) < callTurns {
			traces = append(traces, m.TraceID)
		}
	}
	return traces
}

// callsOfTurns reads the calls of the newest turns.
func (room *Room) callsOfTurns(ctx context.Context, messages []sessionMessage) ([]sessionCall, error) {
	calls, err := postgres.Rows[sessionCall](ctx, room.Pool, "read calls", `
		select a.id::text, a.trace_id, coalesce(a.execution_id::text, '') as execution_id, a.created_at as at,
		       left(a.skill_name, 200) as name, a.status, left(coalesce(a.error_message, ''), 1000) as error,
		       left(a.input::text, 8192) as input, octet_length(a.input::text)::bigint as input_bytes,
		       coalesce(left(a.output::text, 8192), '') as output,
		       coalesce(octet_length(a.output::text), 0)::bigint as output_bytes, a.duration_ms
		  from unnest(@traces::text[]) t (id)
		 cross join lateral (select c.* from agent_activity c where c.trace_id = t.id and c.kind = 'call'
		                      order by c.created_at limit @limit) a
		 order by a.created_at, a.id`, customPlan, postgres.Strict{"traces": newestTraces(messages), "limit": maxTurnCalls})
	for i := range calls {
		c := &calls[i]
		c.Arguments, c.Result = shownJSON(c.Input, c.InputBytes), shownJSON(c.Output, c.OutputBytes)
		c.Error = redact.Text(c.Error, maxValue)
	}
	if err != nil {
		return nil, err
	}
	return calls, haltRunning(ctx, room.Pool, len(calls), func(i int) string {
		if calls[i].Status == "running" {
			return calls[i].ExecutionID
		}
		return ""
	}, func(i int, h halt) {
		calls[i].Status, calls[i].DurationMS = h.State, h.durationMS(calls[i].At)
	})
}

// transcript puts the calls of a turn before its answer, or at its end. The end of a turn without an answer follows.
func transcript(messages []sessionMessage, calls []sessionCall, halted []haltedTurn) []sessionEntry {
	var list []sessionEntry
	addCalls := func(trace string) {
		for i := range calls {
			if c := &calls[i]; c.TraceID == trace && trace != "" {
				list = append(list, sessionEntry{Call: c})
			}
		}
	}
	for i := range messages {
		m := &messages[i]
		answer := m.Role != string(threads.User)
		if answer && (i == 0 || messages[i-1].TraceID != m.TraceID || messages[i-1].Role == string(threads.User)) {
			addCalls(m.TraceID)
		}
		list = append(list, sessionEntry{Message: m})
		if !answer && (i+1 == len(messages) || messages[i+1].TraceID != m.TraceID) {
			addCalls(m.TraceID)
			for j := range halted {
				if halted[j].TraceID == m.TraceID {
					list = append(list, sessionEntry{Halted: &halted[j]})
				}
			}
		}
	}
	return list
}

// operateHolder reads the lane's holder.
func (room *Room) operateHolder(ctx context.Context, _ *pageRequest) (any, error) {
	type holder struct {
		LockedBy         string
		LockedAt         time.Time
		ExpiresAt        *time.Time
		TraceID, Session string
		ExecutionID      *string
	}
	holders, err := postgres.Rows[holder](ctx, room.Pool, "read lane", `
		select left(l.locked_by, 100) as locked_by, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       coalesce(x.trace_id, '') as trace_id, coalesce(x.thread_id, '') as session, x.id::text as execution_id
		  from agent_locks l
		  left join lateral (
		        select e.id, e.trace_id, e.thread_id from agent_executions e
		         where e.flow = @flow and (e.id = l.execution_id
		               or e.trace_id = substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'))
		         order by e.id desc limit 1) x on true
		 where l.lane = @flow and l.locked_by <> ''
		   and l.expires_at > clock_timestamp()`, postgres.Strict{"flow": operateFlow})
	if err != nil {
		return nil, err
	}
	if len(holders) == 0 {
		return map[string]any{"Held": false}, nil
	}
	return map[string]any{"Held": true, "By": holders[0]}, nil
}

// operateSession is a line of the list.
type operateSession struct {
	ID, Name, Status, WaitingFor string
	UpdatedAt                    time.Time
}

// operateSessions lists sessions, the latest message first. The name of a session without a title is its first message.
// A search reads a bounded number of threads of admins.
func (room *Room) operateSessions(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(operateSubject)
	list, err := postgres.Rows[operateSession](ctx, room.Pool, "list sessions", `
		select s.id, s.name, s.updated_at, coalesce(x.status, '') as status, coalesce(x.waiting_for, '') as waiting_for
		  from (select t.id, coalesce(nullif(left(t.title, 200), ''), m.content, 'Empty session') as name, t.updated_at
		          from (select w.* from agent_threads w where w.owner = @owner
		                 order by w.updated_at desc, w.id desc limit @searched) t
		          left join lateral (
		                select left(n.content, 200) as content from agent_messages n
		                 where n.thread_id = t.id and n.seq is not null order by n.turn, n.seq limit 1) m on t.title = ''
		         where t.channel = 'operate'
		           and (@q::text = '' or strpos(lower(coalesce(nullif(t.title, ''), m.content, '')), lower(@q)) > 0)
		         order by t.updated_at desc, t.id desc limit @limit) s
		  left join lateral (
		        select e.status, coalesce((
		               select c.waiting_for from agent_executions c
		                where e.waiting_for = 'agent' and c.trace_id = e.trace_id and c.waiting_for = 'approval' limit 1),
		               e.waiting_for) as waiting_for
		          from agent_executions e
		         where e.thread_id = s.id and e.completed_at is null order by e.id desc limit 1) x on true
		 order by s.updated_at desc, s.id desc`, customPlan, postgres.Strict{
		"owner": threads.Admin.Owner, "searched": maxSearchedSessions, "q": subject.Q, "limit": maxSessions,
	})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Sessions": list, "Here": subject.Session, "Q": subject.Q, "Walked": int64(maxSearchedSessions)},
		nil
}

// operateAgents returns the agents to choose from, if there are several. A session keeps its first agent.
func (room *Room) operateAgents(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(operateSubject)
	session := subject.Session
	all, err := room.Agents.List(ctx, room.Pool)
	if err != nil || len(all) < 2 {
		return map[string]any{}, err
	}
	if session != "" {
		var acting string
		err := room.Pool.QueryRow(ctx, `
			select left(t.agent, 100) from agent_threads t where t.id = @session and t.channel = 'operate'`,
			postgres.Strict{"session": session}).Scan(&acting)
		switch {
		case err == nil: // an undeclared agent is the default agent
			a, err := room.Agents.Acting(ctx, room.Pool, acting)
			return map[string]any{"Acting": a.Name}, err
		case !errors.Is(err, pgx.ErrNoRows):
			return nil, fmt.Errorf("read the session's agent: %w", err)
		}
	}
	all, _ = firstN(all, maxAgents)
	names := make([]string, len(all))
	for i, a := range all {
		names[i] = a.Name
	}
	return map[string]any{"Agents": names}, nil
}

// operateAction accepts the form without JavaScript.
var operateAction = action{
	"POST", "/v1/operate",
	[]field{{"message", asText}, {"session_id", asText}, {"agent", asText}, {"wait", asFlag}},
	"The agent has answered.",
}

// runTurn runs a turn and redirects to its session. It returns when the turn ends, waits for an approval, or continues
// in another process.
func (room *Room) runTurn(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		room.redirectBack(w, r, "/operate", flash{Text: "this is not the form of the console", Bad: true})
		return
	}
	back := sessionAt(strings.TrimSpace(r.PostForm.Get("session_id")))
	body, err := operateAction.body(r.PostForm)
	if err != nil {
		room.redirectBack(w, r, back, flash{Text: err.Error(), Bad: true})
		return
	}
	status, header, answer := room.callRoute(r, operateAction, body)
	var result struct {
		SessionID string `json:"session_id"`
		Ended     string `json:"ended"`
	}
	if status == http.StatusUnauthorized {
		http.Redirect(w, r, "/login?next="+url.QueryEscape(back), http.StatusSeeOther)
		return
	}
	traceID := header.Get("X-Trace-Id")
	if status < http.StatusOK || status >= http.StatusMultipleChoices || json.Unmarshal(answer, &result) != nil {
		room.redirectBack(w, r, back, flash{Text: problemDetail(status, answer), Bad: true, Trace: traceID})
		return
	}
	text := operateAction.success
	switch result.Ended {
	case "waiting_approval":
		text = "The turn waits for an approval. Decide below; the turn then resumes."
	case "handed_on":
		text = "The turn continues in another process. Reload the page to see its answer."
	}
	room.redirectBack(w, r, sessionAt(result.SessionID), flash{Text: text, Trace: traceID})
}

// sessionAt returns a session's URL; without an id, the URL of a new session.
func sessionAt(id string) string {
	if id == "" {
		return "/operate"
	}
	return "/operate?session=" + url.QueryEscape(id)
}
