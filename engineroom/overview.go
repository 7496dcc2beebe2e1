package engineroom

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// overviewPage shows the agent's verdict, items that need attention, failures, current work and cost, in the order of
// importance. With several agents the parameter agent selects one. Items that need attention come from all agents.
func (room *Room) overviewPage() page {
	return page{
		path: "/", name: "overview", navLabel: "Overview", title: "Overview", open: openActivity, parallel: true,
		parts: []part{
			{
				name: "verdict", interval: 3 * time.Second, refreshOnActivity: true, triggers: failureChanged | asksChanged,
				load: room.verdictPart,
			},
			{name: "needs", interval: 3 * time.Second, triggers: asksChanged | failureChanged, load: room.attentionItems},
			{
				name: "failing", interval: 3 * time.Second, refreshOnActivity: true, triggers: failureChanged,
				load: room.failingNow,
			},
			{name: "now", interval: 2 * time.Second, triggers: runsChanged | openChanged, load: room.runningNow},
			room.healthPart(),
			{
				name: "feed", interval: time.Second, refreshOnActivity: true, triggers: logChanged | openChanged,
				load: room.recentActivity,
			},
			room.spendPart(),
			{name: "locks", interval: time.Second, triggers: runsChanged, load: room.locks},
			{name: "objectives", interval: 10 * time.Second, refreshOnActivity: true, load: room.activeObjectives},
			{name: "memory", interval: 30 * time.Second, refreshOnActivity: true, load: room.memoryPanel},
		},
	}
}

// The overview shows a few items of each kind and links to all.
const (
	maxRunning            = 5
	maxOverviewLocks      = 6
	maxOverviewObjectives = 5
	maxFeedRows           = 12
	maxOverviewCategories = 6
	// countLimit is the first uncounted number: "1,000+".
	countLimit = 1001
)

// running is a running execution, or an action outside executions.
type running struct {
	ExecutionID *string
	TraceID     string
	Surface     string
	Flow        string
	ThreadID    string
	Doing       []string  // the running actions, outer first
	Since       time.Time // start of the innermost action
}

// currentWork is the agent's current work.
type currentWork struct {
	Runs                      []running
	More                      bool
	Running, Pending, Waiting int64 // numbers of executions, counted up to countLimit
	Next                      *struct {
		Name string
		At   time.Time
	}
}

// runningNow reads the running work: claimed executions with a live worker, then other actions.
func (room *Room) runningNow(ctx context.Context, req *pageRequest) (any, error) {
	var got currentWork
	agent, err := room.selectedAgent(ctx, req)
	if err != nil {
		return nil, err
	}
	got.Runs, err = postgres.Rows[running](ctx, room.Read, "list running work", `
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
		  where e.claimed_by is not null and (@agent::text = '' or e.agent = @agent)
		  order by e.id desc limit @limit::int + 1),
		loose as (
		 select null::text, a.trace_id, left(a.surface, 100), '', coalesce(left(a.thread_id, 300), ''),
		        array[left(a.skill_name, 100)], x.started_at
		   from (select o.activity_id, o.started_at from agent_activity_open o
		          where o.execution_id is null order by o.activity_id desc limit @limit::int + 1) x
		   join agent_activity a on a.id = x.activity_id
		  where @agent::text = '' or a.agent = @agent
		  order by a.id desc)
		select * from runs union all select * from loose`, postgres.Strict{"limit": maxRunning, "agent": agent})
	if err != nil {
		return nil, err
	}
	got.Runs, got.More = firstN(got.Runs, maxRunning)
	if err := room.readQueueState(ctx, &got); err != nil {
		return nil, err
	}
	return got, nil
}

// readQueueState adds the ready and waiting work, and the next schedule.
func (room *Room) readQueueState(ctx context.Context, got *currentWork) error {
	var name *string
	var at *time.Time
	err := room.Read.QueryRow(ctx, `
		select (select count(*) from (select from agent_executions e where e.status = 'running'
		  order by e.id desc limit @count_limit) x),
		       (select count(*) from (select from agent_executions e where e.status = 'pending'
		  order by e.id desc limit @count_limit) x),
		       (select count(*) from (select from agent_executions e where e.status = 'waiting'
		         order by e.id desc limit @count_limit) x),
		       s.name, s.next_run_at
		  from (select) one
		  left join (select left(name, 100) as name, next_run_at from agent_schedules order by next_run_at limit 1) s
		    on true`,
		postgres.Strict{"count_limit": countLimit}).Scan(&got.Running, &got.Pending, &got.Waiting, &name, &at)
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

// lock is a held lane.
type lock struct {
	Lane, LockedBy string
	ExecutionID    *string
	TraceID        *string
	FencingToken   int64
	LockedAt       time.Time
	ExpiresAt      *time.Time // nil if parked
	Waiters        int64
}

// locks reads the held lanes, newest first.
func (room *Room) locks(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[lock](ctx, room.Read, "list lanes", `
		select l.lane, l.locked_by, l.execution_id::text, coalesce(e.trace_id,
		         substring(l.locked_by from '^(?:hb|op|ch|wh|fl)_[0-9A-HJKMNP-TV-Z]{26}')) as trace_id,
		       l.fencing_token, l.locked_at, case when not l.parked then l.expires_at end as expires_at,
		       (select count(*) from (select from agent_lock_waiters w
		         where w.lane = l.lane and w.expires_at > clock_timestamp() limit @count_limit) x) as waiters
		  from (select * from agent_locks k
		         where k.locked_by <> '' and k.expires_at > clock_timestamp()
		         order by k.fencing_token desc limit @limit::int + 1) l
		  left join agent_executions e on e.id = l.execution_id
		 order by l.fencing_token desc`, postgres.Strict{"limit": maxOverviewLocks, "count_limit": countLimit})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxOverviewLocks)
	all := int64(len(list))
	if more {
		err = room.Read.QueryRow(ctx, `select count(*) from (select from agent_locks k
			where k.locked_by <> '' and k.expires_at > clock_timestamp() limit @count_limit) x`,
			postgres.Strict{"count_limit": countLimit}).Scan(&all)
	}
	return map[string]any{"Locks": list, "More": more, "All": all}, err
}

// memoryPanel returns the use of memory by the first categories.
func (room *Room) memoryPanel(ctx context.Context, req *pageRequest) (any, error) {
	data, err := room.memoryUse(ctx, req)
	use, ok := data.(map[string]any)
	if err != nil || !ok {
		return data, err
	}
	if list, ok := use["Categories"].([]category); ok && len(list) > maxOverviewCategories {
		use["Categories"], use["More"] = list[:maxOverviewCategories], true
	}
	return use, nil
}

// attentionSQL finds the newest items of each kind that need a person, and their number.
//
//go:embed attention.sql
var attentionSQL string

// maxPerKind bounds the named items of one kind.
const maxPerKind = 3

// attentionKind is a kind of item that needs attention.
type attentionKind struct {
	Kind, Title string
	List        string // URL of the list
	item        string // URL of an item; its escaped id follows
	Total       int64  // counted up to countLimit
	Items       []attentionItem
}

// attentionItem is one item.
type attentionItem struct {
	Kind, Name, Target, Note string
	At                       time.Time
	Total                    int64
	Call                     *pendingCall `db:"-"` // of an approval
}

// Left is the number of items without a name on the page.
func (n attentionKind) Left() int64 { return n.Total - int64(len(n.Items)) }

// Word is the title for one item or for several.
func (n attentionKind) Word() string {
	if n.Total == 1 {
		return singularNouns.Replace(n.Title)
	}
	return n.Title
}

// singularNouns replaces the nouns of titles by their singular.
var singularNouns = strings.NewReplacer("Approvals", "Approval", "requests", "request", "objectives", "objective",
	"automations", "automation", "conflicts", "conflict", "skills", "skill", "executions", "execution", "runs", "run",
	"deliveries", "delivery", "channels", "channel")

// Noun is the title within a sentence.
func (n attentionKind) Noun() string { return strings.ToLower(n.Title[:1]) + n.Title[1:] }

// Path is the item's URL, without its id.
func (n attentionKind) Path() string { return n.item }

// attentionKinds lists all kinds in display order, beginning with kinds that block people.
func attentionKinds() []attentionKind {
	return []attentionKind{
		{Kind: "approval", Title: "Approvals requested", List: "/approvals?status=pending", item: "/approvals/"},
		{Kind: "request", Title: "Unanswered requests", List: "/executions?view=waiting", item: "/executions/"},
		{Kind: "objective", Title: "Proposed objectives", List: "/objectives?status=proposed", item: "/objectives/"},
		{Kind: "automation", Title: "Proposed automations", List: "/automations?state=disabled", item: "/automations/"},
		{Kind: "conflict", Title: "Open memory conflicts", List: "/memory#conflicts", item: "/memory#conflict-"},
		{Kind: "skill", Title: "Disabled skills", List: "/skills", item: "/skills/"},
		{Kind: "stuck", Title: "Stuck executions", List: "/executions?view=stuck", item: "/executions/"},
		{Kind: "run", Title: "Failed automation runs", List: "/automations#dead", item: "/automations/"},
		{Kind: "delivery", Title: "Failed webhook deliveries", List: "/deliveries?status=dead", item: "/deliveries/"},
		{Kind: "outgoing", Title: "Failed outgoing webhooks", List: "/outgoing?status=dead", item: "/outgoing/"},
		{Kind: "message", Title: "Undelivered messages", List: "/threads", item: "/threads/"},
		{Kind: "channel", Title: "Broken channels", List: "/channels", item: "/channels#channel-"},
	}
}

// attentionItems reads the items.
func (room *Room) attentionItems(ctx context.Context, _ *pageRequest) (any, error) {
	items, err := postgres.Rows[attentionItem](ctx, room.Read, "list work that needs attention", attentionSQL,
		postgres.Strict{"count_limit": countLimit, "limit": maxPerKind})
	if err != nil {
		return nil, err
	}
	broken, err := channels.ListBroken(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	for _, b := range broken[:min(len(broken), maxPerKind)] {
		items = append(items, attentionItem{
			Kind: "channel", Name: b.Name, Target: b.Name, Note: strings.TrimSuffix(b.State+": "+b.Error, ": "), At: b.Since,
			Total: int64(len(broken)),
		})
	}
	calls, err := room.pendingCalls(ctx, items)
	if err != nil {
		return nil, err
	}
	var list []attentionKind
	for _, kind := range attentionKinds() {
		for _, n := range items {
			if n.Kind == kind.Kind {
				n.Call = calls[n.Target]
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

// maxInlineArguments bounds the arguments, in bytes, that a person can read and approve on the overview. Longer
// arguments have a page of their own.
const maxInlineArguments = 3000

// pendingCall is a call that waits for an approval.
type pendingCall struct {
	ID, TraceID, Flow, Agent, Description string
	ExecutionID                           *string
	SkillRevision                         int
	RevisionNow                           *int
	Bytes                                 int64
	Arguments                             string // empty if the arguments are long
	ExpiresAt                             time.Time
}

// Whole reports that the page shows the arguments in full.
func (c pendingCall) Whole() bool { return c.Bytes <= maxInlineArguments }

// Changed reports that an approval would be void: see approvalFacts.
func (c pendingCall) Changed() bool { return c.RevisionNow == nil || *c.RevisionNow != c.SkillRevision }

// pendingCalls reads the calls of the named approvals, by id. Arguments are exact, as on the approval's page.
func (room *Room) pendingCalls(ctx context.Context, items []attentionItem) (map[string]*pendingCall, error) {
	ids := []string{}
	for _, n := range items {
		if n.Kind == "approval" {
			ids = append(ids, n.Target)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	list, err := postgres.Rows[pendingCall](ctx, room.Read, "read approvals", `
		select a.id::text, left(a.trace_id, 100) as trace_id, coalesce(left(e.flow, 100), '') as flow,
		       coalesce(left(e.agent, 100), '') as agent, coalesce(left(s.description, 200), '') as description,
		       a.execution_id::text, a.skill_revision, s.revision as revision_now, octet_length(a.arguments::text) as bytes,
		       case when octet_length(a.arguments::text) <= @limit then a.arguments::text else '' end as arguments,
		       a.expires_at
		  from agent_approvals a
		  left join agent_executions e on e.id = a.execution_id
		  left join agent_skills s on s.name = a.skill_name
		 where a.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids, "limit": maxInlineArguments})
	calls := map[string]*pendingCall{}
	for i := range list {
		list[i].Arguments = formatJSON(list[i].Arguments)
		calls[list[i].ID] = &list[i]
	}
	return calls, err
}

// pausePart shows on every page that autonomous work is paused, with the action to resume. Without a pause, only the
// overview has content: the action to pause.
func (room *Room) pausePart() part {
	return part{
		name: "pause", interval: 2 * time.Second, refreshOnActivity: true, triggers: asksChanged, sharedTemplate: true,
		load: room.paused,
	}
}

// withPause adds pausePart to every page. A page without other live parts opens no stream for pausePart.
func (room *Room) withPause(pages []page) []page {
	for i := range pages {
		one := room.pausePart()
		if len(pages[i].liveParts()) == 0 {
			one.interval = 0
		}
		pages[i].parts = append([]part{one}, pages[i].parts...)
	}
	return pages
}

// pausedState is the pause, and whether the page offers the action to pause.
type pausedState struct {
	executions.Pause
	Overview bool
}

// paused reads the pause.
func (room *Room) paused(ctx context.Context, req *pageRequest) (any, error) {
	path, _, _ := strings.Cut(req.URL, "?")
	p, err := executions.CurrentPause(ctx, room.Read)
	return pausedState{p, path == "/"}, err
}
