package engineroom

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	threadsShown = 50
	queuedMost   = 100 // up to where the messages in a queue are counted
)

// threadsPage lists conversations.
func (room *Room) threadsPage() page {
	return page{
		path: "/threads", name: "threads", nav: "Threads", title: "Threads", open: openThreads,
		parts: []part{{name: "list", every: 2 * time.Second, load: room.listThreads}},
	}
}

// threadFilter is what the listing of threads is narrowed to.
type threadFilter struct {
	View           string // held or queue; empty: all
	Channel, Owner string
	Agent          string
	before         *threadPlace
}

// threadPlace is a thread's place in the listing.
type threadPlace struct {
	At time.Time
	ID string
}

func threadChannels() []string {
	return []string{threads.ChannelChat, threads.ChannelWebhook, threads.ChannelLog}
}

// Channels are what Channel can be.
func (threadFilter) Channels() []string { return threadChannels() }

// openThreads reads the filters.
func openThreads(_ context.Context, v *visit) (string, error) {
	q, err := filtersOf(v.Query, "view", "channel", "owner", "agent", "before")
	if err != nil {
		return "", err
	}
	if err := oneOf("view", q["view"], []string{"held", "queue"}); err != nil {
		return "", err
	}
	if err := oneOf("channel", q["channel"], threadChannels()); err != nil {
		return "", err
	}
	f := threadFilter{View: q["view"], Channel: q["channel"], Owner: q["owner"], Agent: q["agent"]}
	if f.View != "" && len(q) > 1 {
		return "", badFilter("view=%s lists all such threads: leave other filters out", f.View)
	}
	if q["before"] != "" {
		at, id, found := strings.Cut(q["before"], " ")
		moment, err := time.Parse(time.RFC3339Nano, at)
		if err != nil || !found {
			return "", badCursor()
		}
		f.before = &threadPlace{moment, id}
	}
	v.About = f
	return "Threads", nil
}

// link is the address of the listing from a place on.
func (f threadFilter) link(p threadPlace) string {
	q := url.Values{"before": {p.At.UTC().Format(time.RFC3339Nano) + " " + p.ID}}
	if f.Channel != "" {
		q.Set("channel", f.Channel)
	}
	if f.Owner != "" {
		q.Set("owner", f.Owner)
	}
	if f.Agent != "" {
		q.Set("agent", f.Agent)
	}
	return "/threads?" + q.Encode()
}

// threadRow is a thread in a listing.
type threadRow struct {
	ID, Channel, Owner, Participant string
	Agent                           string
	UpdatedAt                       time.Time
	Role, Words                     string // what was said last
	WordsBytes                      int64
	Queued                          int64
	Holder                          string
	HolderID                        *string
	HeldSince                       *time.Time
	Parked, Stale                   bool
}

// QueuedCount is Queued as it is shown.
func (t threadRow) QueuedCount() string { return capped(t.Queued, queuedMost) }

// threadRowColumns are those of threadRow, of agent_threads t, and threadRowJoins where they come from.
const (
	threadRowColumns = ` t.id, left(t.channel, 100) as channel, left(t.owner, 200) as owner, left(t.participant, 200) as participant, left(t.agent, 200) as agent, t.updated_at,
		coalesce(w.role, '') as role, coalesce(w.words, '') as words, coalesce(w.words_bytes, 0) as words_bytes,
		(select count(*) from (select from agent_messages q where q.thread_id = t.id and q.status = 'queued' limit @queued_most + 1) c) as queued,
		left(coalesce(k.locked_by, ''), 200) as holder, k.execution_id::text as holder_id, k.since as held_since,
		coalesce(k.parked, false) as parked, coalesce(k.stale, false) as stale `
	threadRowJoins = `
		left join lateral (select m.role, left(m.content, 400) as words, octet_length(m.content) as words_bytes
		                     from agent_messages m where m.thread_id = t.id and m.seq is not null
		                    order by m.seq desc limit 1) w on true
		left join lateral (select l.locked_by, l.execution_id, l.parked, l.expires_at <= clock_timestamp() as stale,
		                          case when l.parked then l.locked_at else l.expires_at - make_interval(secs => l.ttl_seconds) end as since
		                     from agent_locks l where l.lane = 'thread:' || t.id and l.locked_by <> '') k on true `
)

// threadList is a page of the listing.
type threadList struct {
	threadFilter
	Rows    []threadRow
	Older   string
	Farther bool // not all that may match was looked at
	Most    int  // of a view that has no further pages
	More    bool
	Window  int64
}

// listThreads reads a page: the thread that was spoken in last first.
func (room *Room) listThreads(ctx context.Context, v *visit) (any, error) {
	f := v.About.(threadFilter)
	if f.View != "" {
		return room.listBusyThreads(ctx, f)
	}
	var at *time.Time
	id := ""
	if f.before != nil {
		at, id = &f.before.At, f.before.ID
	}
	rows, err := room.Read.Query(ctx, `
		select `+threadRowColumns+` from (select w.id from (
		  (select x.id, x.updated_at, x.channel, x.agent from agent_threads x
		    where @owner <> '' and x.owner = @owner and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		    order by x.updated_at desc, x.id desc limit @looked)
		  union all
		  (select x.id, x.updated_at, x.channel, x.agent from agent_threads x
		    where @owner = '' and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		    order by x.updated_at desc, x.id desc limit @looked)) w
		  where (@channel = '' or w.channel = @channel) and (@agent = '' or w.agent = @agent)
		  order by w.updated_at desc, w.id desc limit @most + 1) p
		  join agent_threads t on t.id = p.id`+threadRowJoins+`
		 order by t.updated_at desc, t.id desc`, freshPlan,
		postgres.Strict{
			"owner": f.Owner, "channel": f.Channel, "agent": f.Agent, "at": at, "before": id, "looked": lookedAt, "most": threadsShown,
			"queued_most": queuedMost,
		})
	got := threadList{threadFilter: f, Window: lookedAt}
	if got.Rows, err = collectThreads(rows, err); err != nil {
		return nil, err
	}
	if len(got.Rows) > threadsShown {
		got.Rows = got.Rows[:threadsShown]
		last := got.Rows[threadsShown-1]
		got.Older = f.link(threadPlace{last.UpdatedAt, last.ID})
		return got, nil
	}
	if f.Channel == "" && f.Agent == "" {
		return got, nil
	}
	var end threadPlace
	rows, err = room.Read.Query(ctx, `
		select w.* from ((select x.updated_at, x.id from agent_threads x
		  where @owner <> '' and x.owner = @owner and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		  order by x.updated_at desc, x.id desc offset @looked - 1 limit 1)
		union all
		(select x.updated_at, x.id from agent_threads x
		  where @owner = '' and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		  order by x.updated_at desc, x.id desc offset @looked - 1 limit 1)) w`, freshPlan,
		postgres.Strict{"owner": f.Owner, "at": at, "before": id, "looked": lookedAt})
	if err != nil {
		return nil, fmt.Errorf("look how far threads were looked at: %w", err)
	}
	_, err = pgx.ForEachRow(rows, []any{&end.At, &end.ID}, func() error {
		got.Older, got.Farther = f.link(end), true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("look how far threads were looked at: %w", err)
	}
	return got, nil
}

// listBusyThreads reads the threads that are held, the longest held first, or that have messages in their queue.
func (room *Room) listBusyThreads(ctx context.Context, f threadFilter) (any, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive waiting (id) as (
		  (select m.thread_id from agent_messages m where @view = 'queue' and m.status = 'queued' order by m.thread_id limit 1)
		  union all
		  select (select m.thread_id from agent_messages m where m.status = 'queued' and m.thread_id > w.id order by m.thread_id limit 1)
		    from waiting w where w.id is not null)
		select `+threadRowColumns+` from (
		  (select h.thread_id as id, h.execution_locked_at as at from agent_thread_locks h where @view = 'held'
		    order by h.execution_locked_at limit @most + 1)
		  union all
		  (select w.id, null from waiting w where w.id is not null limit @most + 1)) p
		  join agent_threads t on t.id = p.id`+threadRowJoins+`
		 order by p.at, t.id`, freshPlan, postgres.Strict{"view": f.View, "most": lanesListed, "queued_most": queuedMost})
	got := threadList{threadFilter: f, Most: lanesListed}
	if got.Rows, err = collectThreads(rows, err); err != nil {
		return nil, err
	}
	got.Rows, got.More = onPage(got.Rows, lanesListed)
	return got, nil
}

// lanesListed is how many threads the views show.
const lanesListed = 200

func collectThreads(rows pgx.Rows, err error) ([]threadRow, error) {
	if err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[threadRow])
	if err != nil {
		return nil, fmt.Errorf("list threads: %w", err)
	}
	for i := range list {
		list[i].Words = clip(list[i].Words, list[i].WordsBytes, 160)
	}
	return list, nil
}
