package engineroom

import (
	"context"
	"net/url"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/trace"
)

// finder finds the hits of one kind, best first. More than hitsShown hits tell that there are more than the page shows.
type finder func(room *Room, ctx context.Context, q findQuery) ([]hit, error)

// finders has the kinds of hits in the order of their groups. A kind with a matching id comes first.
var finders = []struct {
	name, label string
	all         string // the list of the kind, as an address; empty for none
	byID        bool   // a part of an id finds it
	find        finder
}{
	{"traces", "Traces", "", true, (*Room).findTraces},
	{"executions", "Executions", "", true, (*Room).findExecutions},
	{"labels", "About", "", false, (*Room).findLabels},
	{"approvals", "Approvals", "/approvals", false, (*Room).findApprovals},
	{"skills", "Skills", "/skills", false, (*Room).findSkills},
	{"evals", "Evals", "/evals", false, (*Room).findEvals},
	{"eval-runs", "Runs of evals", "", true, (*Room).findEvalRuns},
	{"flows", "Flows", "", false, (*Room).findFlows},
	{"agents", "Agents", "/agents", false, (*Room).findAgents},
	{"automations", "Automations", "/automations", false, (*Room).findAutomations},
	{"objectives", "Objectives", "/objectives", false, (*Room).findObjectives},
	{"threads", "Threads", "", false, (*Room).findThreads},
	{"memory", "Memory", "", false, (*Room).findMemory},
	{"lanes", "Lanes", "", false, (*Room).findLanes},
	{"recent", "Work, among the newest 1,000 executions", "", false, (*Room).findWork},
	{"deliveries", "Deliveries", "", true, (*Room).findDeliveries},
	{"outgoing", "Outgoing messages", "", true, (*Room).findOutgoing},
	{"actions", "Actions", "", true, (*Room).findActions},
	{"pages", "Pages", "", false, (*Room).findPages},
	{"settings", "Settings", "", false, (*Room).findSettings},
}

// findersByPath has the finder of each page that accepts a part of an id or of a name in its address.
var findersByPath map[string]finder

func init() { // a literal would be an initialization cycle, because the finders use the pages
	findersByPath = map[string]finder{
		"/traces/{id}": (*Room).findTraces, "/executions/{id}": (*Room).findExecutions,
		"/approvals/{id}":  (*Room).findApprovals,
		"/deliveries/{id}": (*Room).findDeliveries, "/outgoing/{id}": (*Room).findOutgoing,
		"/threads/{id}":  (*Room).findThreads,
		"/skills/{name}": (*Room).findSkills, "/agents/{name}": (*Room).findAgents,
		"/automations/{name}": (*Room).findAutomations,
		"/objectives/{name}":  (*Room).findObjectives,
		"/evals/{suite}":      (*Room).findEvals, "/evals/runs/{id}": (*Room).findEvalRuns,
	}
}

// traceIDLength is the length of a trace id.
const traceIDLength = 29

// pathWithID returns a function that appends an escaped id to a path.
func pathWithID(path string) func(string) string {
	return func(id string) string { return path + url.PathEscape(id) }
}

// hitRow is a hit as a query returns it.
type hitRow struct {
	ID, Title, About, State string
	At                      *time.Time
}

// hitsOf reads hits. href makes the address from a row's id.
func (room *Room) hitsOf(
	ctx context.Context, sql string, args postgres.Strict, href func(id string) string,
) ([]hit, error) {
	rows, err := postgres.Rows[hitRow](ctx, room.Read, "find", sql, customPlan, args)
	if err != nil {
		return nil, err
	}
	list := make([]hit, len(rows))
	for i, r := range rows {
		list[i] = r.hit(href(r.ID))
	}
	return list, nil
}

// hit returns the row as a hit with an address.
func (r hitRow) hit(href string) hit {
	h := hit{
		Href: href, Title: cut(120, r.Title), About: cut(160, redact.Text(r.About, maxValue)), State: r.State, At: r.At,
	}
	if uuidPattern.MatchString(r.ID) || len(r.ID) == traceIDLength { // a name is in the title
		h.ID = r.ID
	}
	return h
}

// runHits reads executions by a statement that selects their ids.
func (room *Room) runHits(ctx context.Context, ids string, args postgres.Strict) ([]hit, error) {
	return room.hitsOf(ctx, `
		select e.id::text, left(e.flow, 200) as title,
		       left(coalesce(nullif(e.error_message, ''), e.result_summary), 600) as about, e.status as state,
		       e.created_at as at
		  from agent_executions e where e.id = any (array(`+ids+`)) order by e.id desc`, args, pathWithID("/executions/"))
}

// matchingRuns returns the executions whose ids contain the part.
func (room *Room) matchingRuns(ctx context.Context, q findQuery) ([]string, error) {
	if q.runs != nil {
		return *q.runs, nil
	}
	return room.matchUUIDs(ctx, "agent_executions", q.id, hitsShown+1)
}

func (room *Room) findExecutions(ctx context.Context, q findQuery) ([]hit, error) {
	if !q.isID {
		return nil, nil
	}
	ids, err := room.matchingRuns(ctx, q)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return room.runHits(ctx, `select i.id::uuid from unnest(@ids::text[]) i (id)`, postgres.Strict{"ids": ids})
}

func (room *Room) findTraces(ctx context.Context, q findQuery) ([]hit, error) {
	if !q.isID {
		return nil, nil
	}
	runs, err := room.matchingRuns(ctx, q)
	if err != nil {
		return nil, err
	}
	ids, err := room.matchTraces(ctx, q.id, runs, hitsShown+1)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return room.hitsOf(ctx, `
		select i.id, left(coalesce(r.flow, 'trace without an execution'), 200) as title,
		       left(coalesce(r.about, ''), 600) as about, coalesce(r.status, '') as state, r.created_at as at
		  from unnest(@ids::text[]) with ordinality i (id, n)
		  left join lateral (
		    select e.flow, e.status, e.created_at, coalesce(nullif(e.error_message, ''), e.result_summary) as about
		      from agent_executions e
		     where e.trace_id = i.id
		     order by e.id limit 1) r on true
		 order by i.n`, postgres.Strict{"ids": ids}, pathWithID("/traces/"))
}

// findLabels finds the newest executions with a label's value, at any age. Then it finds executions by the beginning of
// a value, in any letter case. The text is name=value or a value.
func (room *Room) findLabels(ctx context.Context, q findQuery) ([]hit, error) {
	name, value := executions.ParseLabel(q.Text)
	return room.runHits(ctx, `
		select x.id from (
		(select b.execution_id as id, 1 as place
		   from agent_execution_labels b
		  where lower(b.value) = lower(@value) and (@name = '' or b.name = @name)
		  order by b.execution_id desc limit @limit)
		union
		-- This order is that of the index, whose operator class compares texts byte by byte.
		(select b.execution_id, 2
		   from agent_execution_labels b
		  where lower(b.value) like lower(@prefix) and (@name = '' or b.name = @name)
		  order by lower(b.value) using operator(pg_catalog.~<~), b.execution_id limit @limit)) x
		 group by x.id order by min(x.place), x.id desc limit @limit`,
		postgres.Strict{"value": value, "prefix": prefixPattern(value), "name": name, "limit": hitsShown + 1})
}

// findWork compares the texts of the newest executions.
func (room *Room) findWork(ctx context.Context, q findQuery) ([]hit, error) {
	return room.runHits(ctx, `
		select x.id from (select w.id, w.flow, w.agent, w.error_message, w.result_summary from agent_executions w
		                   order by w.id desc limit @window) x
		 where x.flow ilike @like or x.agent ilike @like or left(x.error_message, 4000) ilike @like
		    or left(x.result_summary, 4000) ilike @like
		 order by x.id desc limit @limit`, postgres.Strict{"like": q.like, "window": maxRecentRuns, "limit": hitsShown + 1})
}

// approvalHits reads approvals by a statement that selects their ids.
func (room *Room) approvalHits(ctx context.Context, ids string, args postgres.Strict) ([]hit, error) {
	return room.hitsOf(ctx, `
		select a.id::text, a.skill_name as title,
		       case when pg_column_size(a.arguments) < 10000 then left(a.arguments::text, 300) else '' end as about,
		       case when a.status in ('pending', 'approved') and a.expires_at <= now() then 'expired'
		         else a.status end as state,
		       a.created_at as at
		  from agent_approvals a where a.id = any (array(`+ids+`))
		 order by a.status = 'pending' and a.expires_at > now() desc, a.id desc`, args, pathWithID("/approvals/"))
}

func (room *Room) findApprovals(ctx context.Context, q findQuery) ([]hit, error) {
	ids := []string{}
	if q.isID {
		var err error
		if ids, err = room.matchUUIDs(ctx, "agent_approvals", q.id, hitsShown+1); err != nil {
			return nil, err
		}
	}
	return room.approvalHits(ctx, `
		(select i.id::uuid as id from unnest(@ids::text[]) i (id))
		union
		(select x.id from (select n.id, n.skill_name from agent_approvals n order by n.id desc limit @window) x
		  where x.skill_name ilike @like order by x.id desc limit @limit)
		limit @limit`, postgres.Strict{"ids": ids, "like": q.like, "window": maxNames, "limit": hitsShown + 1})
}

func (room *Room) findSkills(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select s.name as id, s.name as title, left(s.description, 300) as about,
		       case when s.enabled then 'enabled'
		            else 'disabled' end as state,
		       null::timestamptz as at
		  from (select * from agent_skills a order by a.name limit @window) s
		 where s.name ilike @like or left(s.description, 1000) ilike @like
		 order by s.name ilike @like desc, s.name limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/skills/"))
}

func (room *Room) findEvals(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select e.name as id, e.name as title, left(coalesce(e.definition ->> 'description', ''), 300) as about,
		       coalesce(r.status, '') as state, r.created_at as at
		  from (select * from agent_evals x where x.current order by x.name limit @window) e
		  left join lateral (select r.status, r.created_at from agent_eval_runs r where r.suite = e.name
		    order by r.id desc limit 1) r on true
		 where e.name ilike @like or left(e.definition ->> 'description', 1000) ilike @like
		 order by e.name ilike @like desc, e.name limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/evals/"))
}

func (room *Room) findEvalRuns(ctx context.Context, q findQuery) ([]hit, error) {
	if !q.isID {
		return nil, nil
	}
	ids, err := room.matchUUIDs(ctx, "agent_eval_runs", q.id, hitsShown+1)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return room.hitsOf(ctx, `
		select r.id::text, r.suite as title, left(r.agent || ' with ' || r.model, 300) as about, r.status as state,
		       r.created_at as at
		  from agent_eval_runs r where r.id = any (@ids::uuid[]) order by r.id desc`, postgres.Strict{"ids": ids},
		pathWithID("/evals/runs/"))
}

func (room *Room) findFlows(ctx context.Context, q findQuery) ([]hit, error) {
	names, err := room.suggested(ctx, "flow")
	var list []hit
	for _, n := range names {
		if q.matches(n.Value) && len(list) <= hitsShown {
			list = append(list, hit{
				Href: "/executions?flow=" + url.QueryEscape(n.Value), Title: cut(120, n.Value), About: n.Count + " executions",
			})
		}
	}
	return list, err
}

func (room *Room) findAgents(ctx context.Context, q findQuery) ([]hit, error) {
	all, err := room.Agents.List(ctx, room.Read)
	var list []hit
	for _, a := range all {
		if q.matches(a.Name, a.Description) && len(list) <= hitsShown {
			list = append(list, hit{
				Href: "/agents/" + url.PathEscape(a.Name), Title: cut(120, a.Name),
				About: cut(160, a.Description),
			})
		}
	}
	return list, err
}

func (room *Room) findAutomations(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select a.name as id, a.name as title,
		       left(coalesce(nullif(a.description, ''), a.skill_name || a.flow || a.prompt), 300) as about,
		       case when a.enabled then 'enabled'
		            else 'disabled' end as state,
		       null::timestamptz as at
		  from (select * from agent_automations x order by x.name limit @window) a
		 where a.name ilike @like or left(a.description, 1000) ilike @like or a.skill_name ilike @like or a.flow ilike @like
		 order by a.name ilike @like desc, a.name limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/automations/"))
}

func (room *Room) findObjectives(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select o.name as id, o.name as title, left(o.goal, 300) as about, o.status as state, o.created_at as at
		  from (select * from agent_objectives x order by x.id desc limit @window) o
		 where o.name ilike @like or left(o.goal, 1000) ilike @like
		 order by o.name ilike @like desc, o.id desc limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/objectives/"))
}

func (room *Room) findThreads(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select t.id, left(coalesce(nullif(t.participant, ''), nullif(t.name, ''), t.id), 200) as title,
		       left(coalesce(m.words, ''), 300) as about, '' as state, t.updated_at as at
		  from ((select t.id from agent_threads t where t.id = @text)
		        union
		        (select x.id from (select n.id, n.participant, n.name, n.owner from agent_threads n
		                            order by n.updated_at desc, n.id desc limit @window) x
		          where x.id ilike @like or x.participant ilike @like or x.name ilike @like or x.owner ilike @like
		          limit @limit)) p
		  join agent_threads t on t.id = p.id
		  left join lateral (
		    select left(c.content, 400) as words
		      from agent_messages c
		     where c.thread_id = t.id and c.seq is not null
		     order by c.seq desc limit 1) m on true
		 order by t.updated_at desc limit @limit`,
		postgres.Strict{"text": q.Text, "like": q.like, "window": maxRecentThreads, "limit": hitsShown + 1},
		pathWithID("/threads/"))
}

func (room *Room) findMemory(ctx context.Context, q findQuery) ([]hit, error) {
	list, err := room.hitsOf(ctx, `
		select m.key as id, m.key as title, left(m.value::text, 300) as about, '' as state, max(m.updated_at) as at
		  from ((select k.id from agent_memory k where k.key like @prefix order by k.key limit @limit)
		        union
		        (select x.id from (select n.id, n.key from agent_memory n order by n.updated_at desc limit @window) x
		          where x.key ilike @like limit @limit)
		        union
		        (select w.id from agent_memory w where w.search @@ websearch_to_tsquery('simple', @text) limit @limit)) p
		  join agent_memory m on m.id = p.id
		 where m.expires_at is null or m.expires_at > clock_timestamp()
		 group by m.key, m.value::text order by m.key ilike @like desc, max(m.updated_at) desc limit @limit`,
		postgres.Strict{
			"text": q.Text, "like": q.like, "prefix": prefixPattern(q.Text), "window": maxRecentThreads, "limit": hitsShown + 1,
		}, pathWithID("/memory/"))
	return list, err
}

func (room *Room) findLanes(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select l.lane as id, l.lane as title, 'held by ' || left(l.locked_by, 200) as about, '' as state, l.locked_at as at
		  from (select * from agent_locks x where x.locked_by <> '' and x.expires_at > now() order by x.lane limit @window) l
		 where l.lane ilike @like order by l.lane limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1},
		func(lane string) string { return "/lanes?lane=" + url.QueryEscape(lane) })
}

func (room *Room) findDeliveries(ctx context.Context, q findQuery) ([]hit, error) {
	ids := []string{}
	if q.isID {
		var err error
		if ids, err = room.matchUUIDs(ctx, "agent_webhook_deliveries", q.id, hitsShown+1); err != nil {
			return nil, err
		}
	}
	return room.hitsOf(ctx, `
		select d.id::text, left(d.endpoint, 200) as title,
		       left(coalesce(d.error_message || ' ', '') || d.delivery_id, 300) as about, d.status as state,
		       d.received_at as at
		  from agent_webhook_deliveries d where d.id = any (array(
		        (select i.id::uuid as id from unnest(@ids::text[]) i (id))
		        union
		        (select x.id from (select n.id, n.endpoint, n.delivery_id from agent_webhook_deliveries n
		                            order by n.id desc limit @window) x
		          where x.delivery_id ilike @like or x.endpoint ilike @like order by x.id desc limit @limit)))
		 order by d.id desc limit @limit`,
		postgres.Strict{"ids": ids, "like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/deliveries/"))
}

func (room *Room) findOutgoing(ctx context.Context, q findQuery) ([]hit, error) {
	if !q.isID {
		return nil, nil
	}
	ids, err := room.matchUUIDs(ctx, "agent_webhook_outbox", q.id, hitsShown+1)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return room.hitsOf(ctx, `
		select o.id::text, left(o.event, 200) as title, left(o.last_error, 300) as about, o.status as state,
		       o.created_at as at
		  from agent_webhook_outbox o where o.id = any (@ids::text[]::uuid[]) order by o.id desc`,
		postgres.Strict{"ids": ids}, pathWithID("/outgoing/"))
}

// findActions finds rows of the activity log by the beginning of their ids. A shorter beginning than 8 digits would
// match too many rows.
func (room *Room) findActions(ctx context.Context, q findQuery) ([]hit, error) {
	low, high, _ := q.id.hexRange()
	if !q.isID || low == "" || len(hexDigits(q.id.begin)) < 8 {
		return nil, nil
	}
	rows, err := postgres.Rows[struct {
		hitRow
		TraceID string
	}](ctx, room.Read, "find", `
		select a.id::text, left(a.skill_name, 200) as title, a.trace_id,
		       left(coalesce(nullif(a.error_message, ''), a.purpose), 300) as about, a.status as state, a.created_at as at
		  from agent_activity a where a.id between @low::text::uuid and @high::text::uuid order by a.id desc limit @limit`,
		customPlan, postgres.Strict{"low": low, "high": high, "limit": hitsShown + 1})
	list := make([]hit, len(rows))
	for i, r := range rows {
		address := "/traces/" + r.TraceID + "?span=" + r.ID + "#panel"
		if _, err := trace.ParseAny(r.TraceID); err != nil { // a row of another program, whose trace has no page
			address = "/activity?row=" + r.ID + "#row-" + r.ID
		}
		list[i] = r.hit(address)
	}
	return list, err
}

// findPages finds pages by their labels. Without a text it finds all pages.
func (room *Room) findPages(ctx context.Context, q findQuery) ([]hit, error) {
	var list []hit
	principal := principals.From(ctx)
	for _, p := range room.pages {
		if principal != nil && !principal.May(p.scope()) {
			continue
		}
		if p.navLabel != "" && q.matches(p.navLabel, p.path) {
			list = append(list, hit{Href: p.path, Title: p.navLabel})
		}
	}
	return list, nil
}

// findSettings finds settings by their names and meanings. A text of less than 3 bytes would match most of them.
func (room *Room) findSettings(_ context.Context, q findQuery) ([]hit, error) {
	var list []hit
	for _, s := range config.Settings() {
		if len(q.Text) > 2 && q.matches(s.Name, s.Help) && len(list) <= hitsShown {
			about := s.Help
			if s.Default != "" {
				about += "; default " + s.Default
			}
			list = append(list, hit{Href: "/find?q=" + url.QueryEscape(s.Name), Title: s.Name, About: about})
		}
	}
	return list, nil
}
