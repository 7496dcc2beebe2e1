package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	operateFlow        = "operate" // flow of an admin's turn; also its lane
	maxTurns           = 20        // of all sessions, in the list
	maxSessionMessages = 60        // messages of the shown session
	maxMessageLength   = 8000      // characters of one
)

// operatePage is the admin's conversation with the agent: one session, a message form, the lane's holder, and the
// latest turns. With JavaScript the answer is streamed (assets/operate.js); without, the response is the finished
// turn.
func (room *Room) operatePage() page {
	return page{
		path: "/operate", name: "operate", nav: "Operate", title: "Operate", open: openSession, follows: true,
		parts: []part{
			{name: "session", load: room.sessionMessages},
			{name: "who", load: room.operateAgents},
			{name: "holder", every: time.Second, load: room.operateHolder},
			{name: "turns", every: 3 * time.Second, calm: true, load: room.operateTurns},
		},
	}
}

// openSession reads the session from the URL; none starts a new one.
func openSession(_ context.Context, v *visit) (string, error) {
	for name := range v.Query {
		if name != "session" {
			return "", problem.New(http.StatusBadRequest, "%.60q is no filter of this page; it takes session", name).
				Kind("bad-parameter", "Bad filter")
		}
	}
	session := v.Query.Get("session")
	if session != "" && threads.CheckID(session) != nil {
		return "", problem.New(http.StatusBadRequest, "session: %s", threads.CheckID(session)).Kind("malformed-id",
			"Malformed id")
	}
	v.About = session
	return "", nil
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

// sessionView is a session's messages with its running turn.
type sessionView struct {
	Session string
	Said    []sessionMessage
	Earlier bool
	Now     *runningTurn
}

// sessionMessages reads the shown session once; the page's script appends later messages.
func (room *Room) sessionMessages(ctx context.Context, v *visit) (any, error) {
	got := sessionView{Session: v.About.(string)}
	if got.Session == "" {
		return got, nil
	}
	var err error
	got.Said, err = postgres.Rows[sessionMessage](ctx, room.Pool, "read session", `
		select m.id::text, m.role, left(m.content, @long) as content, length(m.content)::bigint as length,
		       left(coalesce(m.trace_id, ''), 200) as trace_id, m.created_at as at
		  from (select n.* from agent_messages n join agent_threads t on t.id = n.thread_id and t.channel = 'operate'
		         where n.thread_id = @session and n.seq is not null
		         order by n.turn desc, n.seq desc limit @most::int + 1) m
		 order by m.turn, m.seq`, postgres.Strict{"session": got.Session, "most": maxSessionMessages, "long": maxMessageLength})
	if err != nil {
		return nil, err
	}
	if got.Earlier = len(got.Said) > maxSessionMessages; got.Earlier {
		got.Said = got.Said[1:]
	}
	under, err := postgres.Rows[runningTurn](ctx, room.Pool, "read turn", `
		select x.id::text as execution_id, x.trace_id, x.status, coalesce(x.waiting_for, '') as waiting_for
		  from agent_executions x
		 where x.thread_id = @session and x.completed_at is null and x.flow = @flow order by x.id desc limit 1`,
		postgres.Strict{"session": got.Session, "flow": operateFlow})
	if len(under) > 0 {
		got.Now = &under[0]
	}
	return got, err
}

// operateHolder reads the lane's holder.
func (room *Room) operateHolder(ctx context.Context, _ *visit) (any, error) {
	type holder struct {
		LockedBy         string
		LockedAt         time.Time
		ExpiresAt        *time.Time
		TraceID, Session string
		ExecutionID      *string
	}
	held, err := postgres.Rows[holder](ctx, room.Pool, "read lane", `
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
	if len(held) == 0 {
		return map[string]any{"Held": false}, nil
	}
	return map[string]any{"Held": true, "By": held[0]}, nil
}

// operateTurn is a line of the list.
type operateTurn struct {
	ID, TraceID, Status, Message, Session string
	Summary                               string
	CreatedAt                             time.Time
}

// operateTurns reads the latest turns of all sessions.
func (room *Room) operateTurns(ctx context.Context, _ *visit) (any, error) {
	list, err := postgres.Rows[operateTurn](ctx, room.Pool, "list turns", `
		select x.id::text, x.trace_id, x.status, coalesce(left(x.input ->> 'message', 300), '') as message,
		       coalesce(left(x.thread_id, 300), '') as session, left(x.result_summary, 300) as summary, x.created_at
		  from ((select e.* from agent_executions e where e.flow = @flow and e.claimed_by is null
		    order by e.id desc limit @most)
		        union all
		        (select e.* from agent_executions e where e.flow = @flow and e.claimed_by is not null
		          order by e.id desc limit @most)) x
		 order by x.id desc limit @most`, postgres.Strict{"flow": operateFlow, "most": maxTurns})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Turns": list}, nil
}

// operateAgents returns the agents to choose from, if there are several. A session keeps its first one.
func (room *Room) operateAgents(ctx context.Context, v *visit) (any, error) {
	session, _ := v.About.(string)
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
	all, _ = onPage(all, mostAgents)
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

// runTurn runs a whole turn and shows the session. It returns when the turn ends or waits for an approval.
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
	var done struct {
		SessionID string `json:"session_id"`
		Ended     string `json:"ended"`
	}
	if status == http.StatusUnauthorized {
		http.Redirect(w, r, "/login?next="+url.QueryEscape(back), http.StatusSeeOther)
		return
	}
	traceID := header.Get("X-Trace-Id")
	if status < http.StatusOK || status >= http.StatusMultipleChoices || json.Unmarshal(answer, &done) != nil {
		room.redirectBack(w, r, back, flash{Text: problemDetail(status, answer), Bad: true, Trace: traceID})
		return
	}
	text := operateAction.done
	switch done.Ended {
	case "waiting_approval":
		text = "The turn waits for an approval. It goes on by itself when that is decided: see Approvals."
	case "handed_on":
		text = "The turn continues in another process. Reload the page to see its answer."
	}
	room.redirectBack(w, r, sessionAt(done.SessionID), flash{Text: text, Trace: traceID})
}

// sessionAt returns a session's URL; without an id, that of a new one.
func sessionAt(id string) string {
	if id == "" {
		return "/operate"
	}
	return "/operate?session=" + url.QueryEscape(id)
}
