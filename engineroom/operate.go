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
	operateFlow = "operate" // of an admin's turn; also its lane
	mostTurns   = 20        // of all sessions, in the list
	mostSaid    = 60        // messages of the session that is shown
	longSaid    = 8000      // characters of one
)

// operatePage is where an admin talks with the agent: the conversation of one session, a form to say something, who
// has the lane, and the latest turns. With JavaScript the answer is streamed (assets/operate.js); without, the form is
// answered when the turn has ended.
func (room *Room) operatePage() page {
	return page{
		path: "/operate", name: "operate", nav: "Operate", title: "Operate", open: openSession, follows: true,
		parts: []part{
			{name: "session", load: room.said},
			{name: "who", load: room.operateAgents},
			{name: "holder", every: time.Second, load: room.operateHolder},
			{name: "turns", every: 3 * time.Second, calm: true, load: room.operateTurns},
		},
	}
}

// openSession takes the session that is gone on with from the address; none begins a new one.
func openSession(_ context.Context, v *visit) (string, error) {
	for name := range v.Query {
		if name != "session" {
			return "", problem.New(http.StatusBadRequest, "%.60q is no filter of this page; it takes session", name).
				Kind("bad-parameter", "Bad filter")
		}
	}
	session := v.Query.Get("session")
	if session != "" && threads.CheckID(session) != nil {
		return "", problem.New(http.StatusBadRequest, "session: %s", threads.CheckID(session)).Kind("malformed-id", "Malformed id")
	}
	v.About = session
	return "", nil
}

// utterance is a message of a session.
type utterance struct {
	ID, Role, Content string
	Length            int64
	TraceID           string
	At                time.Time
}

// turnNow is a turn that has not ended.
type turnNow struct {
	ExecutionID, TraceID, Status, WaitingFor string
}

// conversed is what was said in a session, and the turn of it that is under way.
type conversed struct {
	Session string
	Said    []utterance
	Earlier bool
	Now     *turnNow
}

// said reads the session that is shown. It is read once: what comes later the page's script adds.
func (room *Room) said(ctx context.Context, v *visit) (any, error) {
	got := conversed{Session: v.About.(string)}
	if got.Session == "" {
		return got, nil
	}
	rows, err := room.Pool.Query(ctx, `
		select m.id::text, m.role, left(m.content, @long) as content, length(m.content)::bigint as length,
		       left(coalesce(m.trace_id, ''), 200) as trace_id, m.created_at as at
		  from (select n.* from agent_messages n join agent_threads t on t.id = n.thread_id and t.channel = 'operate'
		         where n.thread_id = @session and n.seq is not null
		         order by n.turn desc, n.seq desc limit @most::int + 1) m
		 order by m.turn, m.seq`, postgres.Strict{"session": got.Session, "most": mostSaid, "long": longSaid})
	if err != nil {
		return nil, fmt.Errorf("read session: %w", err)
	}
	if got.Said, err = pgx.CollectRows(rows, pgx.RowToStructByName[utterance]); err != nil {
		return nil, fmt.Errorf("read session: %w", err)
	}
	if got.Earlier = len(got.Said) > mostSaid; got.Earlier {
		got.Said = got.Said[1:]
	}
	rows, err = room.Pool.Query(ctx, `
		select x.id::text as execution_id, x.trace_id, x.status, coalesce(x.waiting_for, '') as waiting_for from agent_executions x
		 where x.thread_id = @session and x.completed_at is null and x.flow = @flow order by x.id desc limit 1`,
		postgres.Strict{"session": got.Session, "flow": operateFlow})
	if err != nil {
		return nil, fmt.Errorf("read turn: %w", err)
	}
	under, err := pgx.CollectRows(rows, pgx.RowToStructByName[turnNow])
	if len(under) > 0 {
		got.Now = &under[0]
	}
	return got, err
}

// operateHolder reads who has the lane.
func (room *Room) operateHolder(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Pool.Query(ctx, `
		select left(l.locked_by, 100) as locked_by, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       coalesce(x.trace_id, '') as trace_id, coalesce(x.thread_id, '') as session, x.id::text as execution_id
		  from agent_locks l
		  left join lateral (
		        select e.id, e.trace_id, e.thread_id from agent_executions e
		         where e.flow = @flow and (e.id = l.execution_id
		               or e.trace_id = substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}'))
		         order by e.id desc limit 1) x on true
		 where l.lane = @flow and l.locked_by <> '' and l.expires_at > clock_timestamp()`, postgres.Strict{"flow": operateFlow})
	if err != nil {
		return nil, fmt.Errorf("read lane: %w", err)
	}
	type holder struct {
		LockedBy         string
		LockedAt         time.Time
		ExpiresAt        *time.Time
		TraceID, Session string
		ExecutionID      *string
	}
	held, err := pgx.CollectRows(rows, pgx.RowToStructByName[holder])
	if err != nil {
		return nil, fmt.Errorf("read lane: %w", err)
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
	rows, err := room.Pool.Query(ctx, `
		select x.id::text, x.trace_id, x.status, coalesce(left(x.input ->> 'message', 300), '') as message,
		       coalesce(left(x.thread_id, 300), '') as session, left(x.result_summary, 300) as summary, x.created_at
		  from ((select e.* from agent_executions e where e.flow = @flow and e.claimed_by is null order by e.id desc limit @most)
		        union all
		        (select e.* from agent_executions e where e.flow = @flow and e.claimed_by is not null order by e.id desc limit @most)) x
		 order by x.id desc limit @most`, postgres.Strict{"flow": operateFlow, "most": mostTurns})
	if err != nil {
		return nil, fmt.Errorf("list turns: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[operateTurn])
	if err != nil {
		return nil, fmt.Errorf("list turns: %w", err)
	}
	return map[string]any{"Turns": list}, nil
}

// operateAgents are the agents that a turn can name, when there are several. A session keeps its first one.
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
		case err == nil: // a thread whose agent is not declared is the default agent's
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

// operateLever takes the form of the page where no script does.
var operateLever = lever{
	"POST", "/v1/operate", []field{{"message", asText}, {"session_id", asText}, {"agent", asText}, {"wait", asFlag}}, "The agent has answered.",
}

// say takes a turn as a whole and shows the session with it. It lasts as long as the turn, at most until that waits
// for an approval.
func (room *Room) say(w http.ResponseWriter, r *http.Request) {
	if err := r.ParseForm(); err != nil {
		room.goBack(w, r, "/operate", flash{Text: "this is not the form of the console", Bad: true})
		return
	}
	back := sessionAt(strings.TrimSpace(r.PostForm.Get("session_id")))
	body, err := operateLever.body(r.PostForm)
	if err != nil {
		room.goBack(w, r, back, flash{Text: err.Error(), Bad: true})
		return
	}
	status, header, answer := room.call(r, operateLever, body)
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
		room.goBack(w, r, back, flash{Text: detail(status, answer), Bad: true, Trace: traceID})
		return
	}
	text := operateLever.done
	switch done.Ended {
	case "waiting_approval":
		text = "The turn waits for an approval. It goes on by itself when that is decided: see Approvals."
	case "handed_on":
		text = "The turn goes on in another process. Load the page again to see its answer."
	}
	room.goBack(w, r, sessionAt(done.SessionID), flash{Text: text, Trace: traceID})
}

// sessionAt is the address of a session; that of a new one when it has no id.
func sessionAt(id string) string {
	if id == "" {
		return "/operate"
	}
	return "/operate?session=" + url.QueryEscape(id)
}
