package engineroom

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	threadsShown = 50
	maxQueued    = 100 // bound of the count of queued messages
)

// threadsPage lists conversations.
func (room *Room) threadsPage() page {
	return page{
		path: "/threads", name: "threads", navLabel: "Threads", title: "Threads", open: room.openThreads,
		parts: []part{
			room.filtersPart("/threads", "owner", "agent"),
			{name: "list", interval: 2 * time.Second, load: room.listThreads},
		},
	}
}

// threadFilter holds the filters of the listing.
type threadFilter struct {
	View           string // held, queue or undelivered; empty for all
	Channel, Owner string
	Agent          string
	Name           string // a part of the id, participant or public name
	owners         []string
	before         *timeCursor
}

func threadChannels() []string {
	return append(channels.Types(), threads.ChannelChat, threads.ChannelWebhook, threads.ChannelLog, operateChannel)
}

// Channels are the options of Channel.
func (threadFilter) Channels() []string { return threadChannels() }

// openThreads reads the filters.
func (room *Room) openThreads(ctx context.Context, req *pageRequest) (string, error) {
	q, err := filtersOf(req.Query, "view", "channel", "owner", "agent", "name", "before")
	if err != nil {
		return "", err
	}
	if err := checkOneOf("view", q["view"], []string{"held", "queue", "undelivered"}); err != nil {
		return "", err
	}
	if err := checkOneOf("channel", q["channel"], threadChannels()); err != nil {
		return "", err
	}
	f := threadFilter{View: q["view"], Channel: q["channel"], Owner: q["owner"], Agent: q["agent"], Name: q["name"]}
	if f.owners, err = room.namesLike(ctx, req, "owner", f.Owner); err != nil {
		return "", err
	}
	if f.View != "" && len(q) > 1 {
		return "", problem.BadParameter("view=%s lists all such threads: leave other filters out", f.View)
	}
	if f.before, err = parseTimeCursor(q["before"]); err != nil {
		return "", err
	}
	req.Subject = f
	return "Threads", nil
}

// oneOwner is the owner whose index yields the rows; empty for none or several.
func (f threadFilter) oneOwner() string {
	if len(f.owners) == 1 {
		return f.owners[0]
	}
	return ""
}

// moreOwners are the owners that the query compares row by row; nil for at most one.
func (f threadFilter) moreOwners() []string {
	if len(f.owners) < 2 {
		return nil
	}
	return f.owners
}

// threadRow is a thread in a listing.
type threadRow struct {
	ID, Channel, Owner, Participant string
	Agent                           string
	UpdatedAt                       time.Time
	Role, Words                     string // the last message
	WordsBytes                      int64
	Queued                          int64
	Holder                          string
	HolderID                        *string
	HeldSince                       *time.Time
	Parked, Stale                   bool
}

// QueuedCount formats Queued.
func (t threadRow) QueuedCount() string { return capped(t.Queued, maxQueued) }

// threadRowColumns are the columns of threadRow, of agent_threads t; threadRowJoins are their tables.
const (
	threadRowColumns = ` t.id, left(t.channel, 100) as channel, left(t.owner, 200) as owner,
		left(t.participant, 200) as participant, left(t.agent, 200) as agent, t.updated_at,
		coalesce(w.role, '') as role, coalesce(w.words, '') as words, coalesce(w.words_bytes, 0) as words_bytes,
		(select count(*)
		   from (select from agent_messages q
		          where q.thread_id = t.id and q.status = 'queued' limit @queued_most + 1) c) as queued,
		left(coalesce(k.locked_by, ''), 200) as holder, k.execution_id::text as holder_id, k.since as held_since,
		coalesce(k.parked, false) as parked, coalesce(k.stale, false) as stale `
	threadRowJoins = `
		left join lateral (select m.role, left(m.content, 400) as words, octet_length(m.content) as words_bytes
		                     from agent_messages m where m.thread_id = t.id and m.seq is not null
		                    order by m.seq desc limit 1) w on true
		left join lateral (select l.locked_by, l.execution_id, l.parked, l.expires_at <= clock_timestamp() as stale,
		                          case when l.parked then l.locked_at
		                            else l.expires_at - make_interval(secs => l.ttl_seconds) end as since
		                     from agent_locks l where l.lane = 'thread:' || t.id and l.locked_by <> '') k on true `
)

// threadList is a page of the listing.
type threadList struct {
	threadFilter
	Rows    []threadRow
	Older   string // URL of the next page; empty for none
	Farther bool   // the search reached its bound of Window threads, so the next page may be empty
	Window  int64
	Most    int  // the bound of a view, which has only one page
	More    bool // the view has more threads than Most
}

// listThreads reads a page, the latest change first. A filter searches at most maxSearched threads per page.
func (room *Room) listThreads(ctx context.Context, req *pageRequest) (any, error) {
	f := req.Subject.(threadFilter)
	if f.View != "" {
		return room.listBusyThreads(ctx, f)
	}
	var at *time.Time
	id := ""
	if f.before != nil {
		at, id = &f.before.At, f.before.Key
	}
	rows, err := room.Read.Query(ctx, `
		select `+threadRowColumns+` from (select w.id from (
		  (select x.id, x.updated_at, x.channel, x.agent, x.owner, x.participant, x.name from agent_threads x
		    where @owner <> '' and x.owner = @owner and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		    order by x.updated_at desc, x.id desc limit @searched)
		  union all
		  (select x.id, x.updated_at, x.channel, x.agent, x.owner, x.participant, x.name from agent_threads x
		    where @owner = '' and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		    order by x.updated_at desc, x.id desc limit @searched)) w
		  where (@channel = '' or w.channel = @channel) and (@agent = '' or w.agent ilike @agent)
		    and (@owners::text[] is null or w.owner = any (@owners))
		    and (@name = '' or w.id ilike @name or w.participant ilike @name or w.name ilike @name)
		  order by w.updated_at desc, w.id desc limit @limit + 1) p
		  join agent_threads t on t.id = p.id`+threadRowJoins+`
		 order by t.updated_at desc, t.id desc`, customPlan,
		postgres.Strict{
			"owner": f.oneOwner(), "owners": f.moreOwners(), "name": containsPattern(f.Name), "channel": f.Channel,
			"agent": containsPattern(f.Agent), "at": at, "before": id, "searched": maxSearched,
			"limit": threadsShown, "queued_most": maxQueued,
		})
	result := threadList{threadFilter: f, Window: maxSearched}
	if result.Rows, err = collectThreads(rows, err); err != nil {
		return nil, err
	}
	if len(result.Rows) > threadsShown {
		result.Rows = result.Rows[:threadsShown]
		last := result.Rows[threadsShown-1]
		result.Older = req.withParam("before", timeCursor{last.UpdatedAt, last.ID}.String())
		return result, nil
	}
	if f.Channel == "" && f.Agent == "" && f.Name == "" && len(f.owners) < 2 {
		return result, nil
	}
	end, hasMore, err := room.searchEnd(ctx, f, at, id)
	if err != nil {
		return nil, fmt.Errorf("read end of thread search: %w", err)
	}
	if hasMore {
		result.Older, result.Farther = req.withParam("before", end.String()), true
	}
	return result, nil
}

// searchEnd returns the last thread that a bounded search reads. hasMore is false if the search reaches all threads.
func (room *Room) searchEnd(
	ctx context.Context, f threadFilter, at *time.Time, before string,
) (end timeCursor, hasMore bool, err error) {
	err = room.Read.QueryRow(ctx, `
		select w.* from ((select x.updated_at, x.id from agent_threads x
		  where @owner <> '' and x.owner = @owner and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		  order by x.updated_at desc, x.id desc offset @searched - 1 limit 1)
		union all
		(select x.updated_at, x.id from agent_threads x
		  where @owner = '' and (@at::timestamptz is null or (x.updated_at, x.id) < (@at, @before))
		  order by x.updated_at desc, x.id desc offset @searched - 1 limit 1)) w`, customPlan,
		postgres.Strict{"owner": f.oneOwner(), "at": at, "before": before, "searched": maxSearched}).Scan(&end.At, &end.Key)
	if errors.Is(err, pgx.ErrNoRows) {
		return end, false, nil
	}
	return end, err == nil, err
}

// maxBusyThreads bounds the threads of a view.
const maxBusyThreads = 200

// listBusyThreads reads the held threads, the longest held first, the threads with queued messages, or the threads with
// the newest undelivered messages.
func (room *Room) listBusyThreads(ctx context.Context, f threadFilter) (any, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive waiting (id) as (
		  (select m.thread_id from agent_messages m where @view = 'queue' and m.status = 'queued'
		    order by m.thread_id limit 1)
		  union all
		  select (select m.thread_id from agent_messages m where m.status = 'queued' and m.thread_id > w.id
		    order by m.thread_id limit 1)
		    from waiting w where w.id is not null)
		select `+threadRowColumns+` from (
		  (select h.thread_id as id, h.execution_locked_at as at from agent_thread_locks h where @view = 'held'
		    order by h.execution_locked_at limit @limit + 1)
		  union all
		  (select w.id, null from waiting w where w.id is not null limit @limit + 1)
		  union all
		  (select distinct g.thread_id, null::timestamptz from (
		     select f.thread_id from agent_messages f where @view = 'undelivered' and f.status = 'failed'
		      order by f.id desc limit @count_limit) g
		    limit @limit + 1)) p
		  join agent_threads t on t.id = p.id`+threadRowJoins+`
		 order by p.at, t.id`, customPlan, postgres.Strict{
		"view": f.View, "limit": maxBusyThreads, "queued_most": maxQueued, "count_limit": countLimit,
	})
	result := threadList{threadFilter: f, Most: maxBusyThreads}
	if result.Rows, err = collectThreads(rows, err); err != nil {
		return nil, err
	}
	result.Rows, result.More = firstN(result.Rows, maxBusyThreads)
	return result, nil
}

func collectThreads(rows pgx.Rows, err error) ([]threadRow, error) {
	list, err := postgres.Collect(rows, err, "list threads", pgx.RowToStructByName[threadRow])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Words = clip(list[i].Words, list[i].WordsBytes, 160)
	}
	return list, nil
}
