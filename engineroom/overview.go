package engineroom

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// overviewPage answers on one screen: what the agent is doing, whether it works, what it cost, and what needs a
// person. What moves by the second is cheap to read; what is summed up is calm.
func (room *Room) overviewPage() page {
	return page{
		path: "/", name: "overview", nav: "Overview", title: "Overview", open: askActivity,
		parts: []part{
			{name: "now", every: time.Second, load: room.runningNow},
			{name: "needs", every: 3 * time.Second, load: room.needs},
			room.spendPart(), room.healthPart(),
			{name: "feed", every: time.Second, load: room.feed},
			{name: "locks", every: time.Second, load: room.locks},
			{name: "objectives", every: 10 * time.Second, calm: true, load: room.workedOn},
			{name: "memory", every: 30 * time.Second, calm: true, load: room.memoryUse},
		},
	}
}

// Has reports whether the page has a part.
func (s show) Has(name string) bool {
	_, has := s.parts[name]
	return has
}

const (
	mostNow        = 15 // runs that the overview shows
	mostLocks      = 12
	mostObjectives = 8
	// beyond is the first number that is not counted: "1,000+".
	beyond = 1001
)

// running is something under way: a run, or an action outside of any.
type running struct {
	ExecutionID *string
	TraceID     string
	Surface     string
	Flow        string
	ThreadID    string
	Doing       []string  // the actions under way, the outer ones first
	Since       time.Time // of the innermost
}

// now is what the agent is doing.
type now struct {
	Runs             []running
	More             bool
	Pending, Waiting int64 // executions, counted up to beyond
	Next             *struct {
		Name string
		At   time.Time
	}
}

// runningNow reads what is under way: runs that a live worker has claimed, then actions outside of runs.
func (room *Room) runningNow(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		with runs as (
		 select e.id::text as execution_id, e.trace_id, e.surface, left(e.flow, 100) as flow,
		        coalesce(left(e.thread_id, 300), '') as thread_id, coalesce(o.doing, '{}') as doing,
		        coalesce(o.since, e.updated_at) as since
		   from agent_executions e
		   join agent_workers w on w.id = e.claimed_by and w.expires_at > clock_timestamp()
		   left join lateral (
		        select array_agg(left(a.skill_name, 100) order by x.activity_id) as doing, max(x.started_at) as since
		          from (select o.activity_id, o.started_at from agent_activity_open o
		                 where o.execution_id = e.id order by o.activity_id desc limit 5) x
		          join agent_activity a on a.id = x.activity_id) o on true
		  where e.claimed_by is not null
		  order by e.id desc limit @most::int + 1),
		loose as (
		 select null::text, a.trace_id, left(a.surface, 100), '', coalesce(left(a.thread_id, 300), ''), array[left(a.skill_name, 100)], x.started_at
		   from (select o.activity_id, o.started_at from agent_activity_open o
		          where o.execution_id is null order by o.activity_id desc limit @most::int + 1) x
		   join agent_activity a on a.id = x.activity_id
		  order by a.id desc)
		select * from runs union all select * from loose`, postgres.Strict{"most": mostNow})
	if err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	var got now
	if got.Runs, err = pgx.CollectRows(rows, pgx.RowToStructByName[running]); err != nil {
		return nil, fmt.Errorf("list what runs: %w", err)
	}
	got.Runs, got.More = onPage(got.Runs, mostNow)
	if err := room.idle(ctx, &got); err != nil {
		return nil, err
	}
	return got, nil
}

// idle adds what is not under way but will be: what is ready, what waits, and the next schedule.
func (room *Room) idle(ctx context.Context, got *now) error {
	var name *string
	var at *time.Time
	err := room.Read.QueryRow(ctx, `
		select (select count(*) from (select from agent_executions e where e.status = 'pending' order by e.id desc limit @beyond) x),
		       (select count(*) from (select from agent_executions e where e.status = 'waiting' order by e.id desc limit @beyond) x),
		       s.name, s.next_run_at
		  from (select) one
		  left join (select left(name, 100) as name, next_run_at from agent_schedules order by next_run_at limit 1) s on true`,
		postgres.Strict{"beyond": beyond}).Scan(&got.Pending, &got.Waiting, &name, &at)
	if err != nil {
		return fmt.Errorf("count executions: %w", err)
	}
	if name != nil && at != nil {
		got.Next = &struct {
			Name string
			At   time.Time
		}{*name, *at}
	}
	return nil
}

// lock is a lane that is held now.
type lock struct {
	Lane, LockedBy string
	ExecutionID    *string
	TraceID        *string
	FencingToken   int64
	LockedAt       time.Time
	ExpiresAt      *time.Time // nil when parked
	Waiters        int64
}

// locks reads the lanes that are held, the newest grant first.
func (room *Room) locks(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select l.lane, l.locked_by, l.execution_id::text, coalesce(e.trace_id,
		         substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}')) as trace_id,
		       l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       (select count(*) from (select from agent_lock_waiters w
		         where w.lane = l.lane and w.expires_at > clock_timestamp() limit @beyond) x) as waiters
		  from (select * from agent_locks k
		         where k.locked_by <> '' and k.expires_at > clock_timestamp()
		         order by k.fencing_token desc limit @most::int + 1) l
		  left join agent_executions e on e.id = l.execution_id
		 order by l.fencing_token desc`, postgres.Strict{"most": mostLocks, "beyond": beyond})
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[lock])
	if err != nil {
		return nil, fmt.Errorf("list lanes: %w", err)
	}
	more := len(list) > mostLocks
	return map[string]any{"Locks": list[:min(len(list), mostLocks)], "More": more}, nil
}

// needsSQL finds what waits for a person: of each kind the newest few, and how many there are.
//
//go:embed needs.sql
var needsSQL string

// mostOfAKind is how many of one kind the overview names.
const mostOfAKind = 3

// need is a kind of thing that waits for a person.
type need struct {
	Kind, Title string
	List        string // where all of them are
	item        string // where one is; its target follows, escaped
	Total       int64  // counted up to beyond
	Items       []needed
}

// needed is one of them.
type needed struct {
	Kind, Name, Target, Note string
	At                       time.Time
	Total                    int64
}

// Path is where the item is, without the target's escaping.
func (n need) Path() string { return n.item }

// kindsOfNeed are all kinds, in the order in which they are shown: what somebody waits for comes first.
func kindsOfNeed() []need {
	return []need{
		{Kind: "approval", Title: "Approvals to decide", List: "/approvals?status=pending", item: "/approvals/"},
		{Kind: "request", Title: "Requests that people have not answered", List: "/executions?view=waiting", item: "/executions/"},
		{Kind: "objective", Title: "Objectives the agent proposes", List: "/objectives?status=proposed", item: "/objectives/"},
		{Kind: "automation", Title: "Automations the agent proposes", List: "/automations?state=disabled", item: "/automations/"},
		{Kind: "conflict", Title: "Memory conflicts to decide", List: "/memory#conflicts", item: "/memory#conflict-"},
		{Kind: "skill", Title: "Skills out of service", List: "/skills", item: "/skills/"},
		{Kind: "stuck", Title: "Executions that are stuck", List: "/executions?view=stuck", item: "/executions/"},
		{Kind: "run", Title: "Automation runs given up", List: "/automations#dead", item: "/automations/"},
		{Kind: "delivery", Title: "Webhook deliveries given up", List: "/deliveries?status=dead", item: "/deliveries/"},
		{Kind: "outgoing", Title: "Outgoing webhooks given up", List: "/outgoing?status=dead", item: "/outgoing/"},
		{Kind: "message", Title: "Messages that could not be delivered", List: "/threads", item: "/threads/"},
	}
}

// needs reads what waits for a person.
func (room *Room) needs(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, needsSQL, postgres.Strict{"beyond": beyond, "most": mostOfAKind})
	if err != nil {
		return nil, fmt.Errorf("list what needs a person: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[needed])
	if err != nil {
		return nil, fmt.Errorf("list what needs a person: %w", err)
	}
	var list []need
	for _, kind := range kindsOfNeed() {
		for _, n := range found {
			if n.Kind == kind.Kind {
				kind.Total = n.Total
				kind.Items = append(kind.Items, n)
			}
		}
		if kind.Total > 0 {
			list = append(list, kind)
		}
	}
	return map[string]any{"Needs": list}, nil
}

// pausePart says on every page that autonomous work is paused, with the lever that ends it. While it is not, the
// overview has the lever that pauses it, and the other pages have nothing there.
func (room *Room) pausePart() part {
	return part{name: "pause", every: 2 * time.Second, calm: true, shared: true, load: room.paused}
}

// withPause gives every page the part. A page on which nothing else changes by itself is not watched for it.
func (room *Room) withPause(pages []page) []page {
	for i := range pages {
		one := room.pausePart()
		if len(pages[i].live()) == 0 {
			one.every = 0
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// pausedState is the pause, and whether the page has room for the lever that begins one.
type pausedState struct {
	executions.Pause
	Overview bool
}

// paused reads whether autonomous work is paused.
func (room *Room) paused(ctx context.Context, v *visit) (any, error) {
	path, _, _ := strings.Cut(v.URL, "?")
	p, err := executions.CurrentPause(ctx, room.Read)
	return pausedState{p, path == "/"}, err
}
