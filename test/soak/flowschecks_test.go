//go:build unix

package soak_test

// notedOfFlows is what only the soak of flows knows. The triggers note what must not happen, also where it is undone
// later.
const notedOfFlows = `
	create table soak.runs (n int not null, flow text not null, id uuid not null);
	create table soak.given (id text not null, event text not null, key text not null, wanted boolean not null);
	create table soak.flows (flow text primary key, ends text not null, pays int not null, looks int not null);
	create table soak.says (flow text not null, k int not null, words text not null);
	create table soak.children (flow text not null, child text not null, times int not null);
	create view soak.waited as select flow, child from soak.children where child not in ('aside', 'slow');      -- for whom who started it waits
	create table soak.ends (execution_id uuid not null, status text not null);
	create table soak.changed (execution_id uuid not null, step text not null, was jsonb, is_now jsonb);
	create function soak.note_end() returns trigger language plpgsql as $$
	begin
	  insert into soak.ends values (new.id, new.status);
	  return null;
	end $$;
	create trigger soak_ends after update of status on agent_executions for each row
	  when (new.completed_at is not null) execute function soak.note_end();
	create function soak.note_change() returns trigger language plpgsql as $$
	begin
	  if tg_op = 'UPDATE' and (old.output, old.failed, old.fingerprint, old.step) is distinct from (new.output, new.failed, new.fingerprint, new.step)
	     and not coalesce((old.output ->> 'next')::int < (new.output ->> 'next')::int, false)               -- a loop that goes on
	     or tg_op = 'DELETE' and old.step not like '%@%' then                                             -- of an iteration: it is in the loop's
	    insert into soak.changed values (old.execution_id, old.step, to_jsonb(old), case when tg_op = 'UPDATE' then to_jsonb(new) end);
	  end if;
	  return null;
	end $$;
	create trigger soak_changes after update or delete on agent_checkpoints for each row execute function soak.note_change()`

// said is what every execution was to say, and what it has said; m is null where nothing was said.
const said = `
	said as (
	  select x.id as execution_id, x.flow, x.status as ended, x.completed_at, x.thread_id, s.k, replace(s.words, '{n}', x.input ->> 'n') as words
	    from agent_executions x join soak.says s on s.flow = x.flow)`

// families are the executions that speak as one: who waits for a child speaks with its voice.
const families = `
	families as (
	  with recursive line as (
	    select x.id, x.id as root from agent_executions x
	     where not exists (select from agent_executions p join soak.waited w on w.flow = p.flow and w.child = x.flow where p.id = x.parent_id)
	    union all
	    select x.id, l.root from line l join agent_executions x on x.parent_id = l.id
	      join agent_executions p on p.id = l.id join soak.waited w on w.flow = p.flow and w.child = x.flow)
	  select * from line)`

// flowChecks are the invariants: each query lists what violates one, in words.
var flowChecks = map[string]string{
	"what was started is there, once": `
		select format('number %s was started %s times', n, count(distinct id)) from soak.runs group by n having count(distinct id) <> 1
		union all
		select format('%s of number %s is not there as it was started', r.flow, r.n) from soak.runs r
		  left join agent_executions x on x.id = r.id
		 where x.flow is distinct from r.flow or x.input ->> 'n' is distinct from r.n::text or x.parent_id is not null
		union all
		select format('%s %s was not started', x.flow, x.id) from agent_executions x
		 where x.parent_id is null and not exists (select from soak.runs r where r.id = x.id)`,
	"a child is started once": `
		select format('%s %s (%s) started %s %s times, not %s', x.flow, x.id, x.status, c.child, n.n, c.times)
		  from agent_executions x join soak.children c on c.flow = x.flow
		 cross join lateral (select count(*) as n from agent_executions y where y.parent_id = x.id and y.flow = c.child) n
		 where n.n <> c.times
		union all
		select format('%s %s started %s', x.flow, x.id, y.flow) from agent_executions y join agent_executions x on x.id = y.parent_id
		 where not exists (select from soak.children c where c.flow = x.flow and c.child = y.flow)`,
	"an execution ends as its scenario says": `
		select format('%s %s is %s, not %s: %s %s', x.flow, x.id, x.status, f.ends, x.failed_step, x.error_message)
		  from agent_executions x left join soak.flows f on f.flow = x.flow
		 where x.status is distinct from f.ends and not coalesce(f.pays > 0 and x.status = 'failed' and exists (
		   select from agent_activity a where a.execution_id = x.id and a.skill_name = 'pay' and a.status = 'unknown'), false)`,
	"an execution ends once, and says so once": `
		select format('%s %s ended %s times: %s', x.flow, x.id, count(e.status), string_agg(e.status, ', '))
		  from agent_executions x left join soak.ends e on e.execution_id = x.id
		 group by x.id, x.flow, x.status having count(e.status) <> 1 or min(e.status) <> x.status
		union all
		select format('%s %s emitted AGENT_COMPLETED %s times: %s', x.flow, x.id, count(v.id), string_agg(v.data ->> 'status', ', '))
		  from agent_executions x left join agent_events v on v.event = 'AGENT_COMPLETED' and v.key = x.id::text
		 group by x.id, x.flow, x.status having count(v.id) <> 1 or min(v.data ->> 'status') <> x.status`,

	"each message is said once, and none is lost": `
		with` + said + `
		select format('%s %s was to say %L and said it %s times', s.flow, s.execution_id, s.words, count(m.id))
		  from said s left join agent_messages m on m.execution_id = s.execution_id and m.content = s.words
		   and (m.status in ('sent', 'delivered') or m.status = 'withdrawn' and s.ended = 'cancelled')
		  join soak.flows f on f.flow = s.flow
		 group by s.flow, s.execution_id, s.words, s.ended, f.ends
		having count(m.id) > 1 or count(m.id) = 0 and s.ended = f.ends`,
	"nothing else is said": `
		with` + said + `
		select format('%s: %L is %s', m.execution_id, m.content, m.status) from agent_messages m
		 where m.role = 'assistant' and not exists (select from said s where s.execution_id = m.execution_id and s.words = m.content)
		union all
		select format('a visitor said %L, %s', m.content, m.status) from agent_messages m where m.role = 'user'
		   and not (m.status = 'received' and (m.content ~ '^answer to ' or m.content = 'too late'))`,
	"the messages of an execution are in order": `
		with` + said + `
		select format('%s %s: %L comes after %L', s.flow, s.execution_id, a.content, b.content)
		  from said s join said later on later.execution_id = s.execution_id and later.k > s.k
		  join agent_messages a on a.execution_id = s.execution_id and a.content = s.words
		  join agent_messages b on b.execution_id = s.execution_id and b.content = later.words
		 where a.seq >= b.seq or a.id >= b.id or a.seq is null and b.seq is not null`,
	"a thread has no gap": `
		select format('thread %s has %s messages from %s to %s, and goes on with %s', t.id, count(m.seq), min(m.seq), max(m.seq), t.next_seq)
		  from agent_threads t join agent_messages m on m.thread_id = t.id and m.seq is not null
		 group by t.id having count(m.seq) <> max(m.seq) or min(m.seq) <> 1 or t.next_seq <> max(m.seq) + 1`,
	"nobody speaks while another has the thread": `
		with` + families + `,
		spoken as (
		  select m.thread_id, m.seq, m.sent_at, m.content, l.root, x.completed_at as ended from agent_messages m
		    join families l on l.id = m.execution_id join agent_executions x on x.id = l.root
		   where m.role = 'assistant' and m.seq is not null),
		tenures as (
		  select thread_id, root, min(seq) as first, max(seq) as last from spoken where sent_at < ended group by thread_id, root)
		select format('thread %s: %L was said while %s had it, from %s to %s', m.thread_id, m.content, t.root, t.first, t.last)
		  from tenures t join spoken m on m.thread_id = t.thread_id and m.root <> t.root and m.seq > t.first and m.seq < t.last`,
	"who speaks as one is heard in order": `
		with` + families + `
		select format('thread %s: %L, which was said first, comes after %L', a.thread_id, a.content, b.content)
		  from agent_messages a join families f on f.id = a.execution_id join families g on g.root = f.root
		  join agent_messages b on b.execution_id = g.id and b.thread_id = a.thread_id and b.execution_id <> a.execution_id
		 where a.id < b.id and a.seq > b.seq`,
	"a message arrives": `
		select format('message %L is %s: %s', content, status, error_message) from agent_messages where role = 'assistant'
		   and status <> case when channel in ('webhook', 'log') then 'delivered' else 'sent' end
		   and not (status = 'withdrawn' and exists (select from agent_executions x where x.id = execution_id and x.status = 'cancelled'))
		union all
		select format('message %L was posted %s times in %s attempts', m.content, count(c.key), m.attempts) from agent_messages m
		  left join soak.calls c on c.skill = 'post' and c.key = m.id::text
		 where m.channel = 'webhook' and m.status = 'delivered'
		 group by m.id, m.content, m.attempts having count(c.key) < 1 or count(c.key) > m.attempts
		union all
		select format('%s was posted, and is no message', c.key) from soak.calls c
		 where c.skill = 'post' and not exists (select from agent_messages m where m.id::text = c.key and c.body #>> '{data,content}' = m.content)`,
	"messages are posted in order": `
		select format('thread %s: message %s was posted after a later one', p.thread_id, p.seq)
		  from (select m.thread_id, m.seq, min(c.n) as at from agent_messages m
		          join (select key, row_number() over () as n from soak.calls where skill = 'post') c on c.key = m.id::text
		         group by m.thread_id, m.seq) p
		  join (select m.thread_id, m.seq, min(c.n) as at from agent_messages m
		          join (select key, row_number() over () as n from soak.calls where skill = 'post') c on c.key = m.id::text
		         group by m.thread_id, m.seq) q on q.thread_id = p.thread_id and q.seq > p.seq and q.at < p.at`,

	"no event is lost": `
		select format('%s %s (%s) is there %s times, consumed by %s', g.event, g.key, g.id, count(v.id), string_agg(coalesce(v.consumed_by::text, 'nobody'), ', '))
		  from soak.given g left join agent_events v on v.external_id = g.id and v.event = g.event and v.key = g.key
		 group by g.event, g.key, g.id, g.wanted
		having count(v.id) <> 1 or g.wanted <> (count(v.consumed_by) = 1) and not (g.wanted and exists (      -- who would have waited has failed
		  select from agent_executions x join soak.flows f on f.flow = x.flow
		   where f.pays > 0 and x.status = 'failed' and g.key = 'event ' || (x.input ->> 'n')))
		union all
		select format('%s %s came from nowhere', v.event, v.key) from agent_events v
		 where v.event <> 'AGENT_COMPLETED' and not exists (select from soak.given g where g.id = v.external_id)`,
	"a stored result never changes": `select format('step %s of %s was %s and became %s', step, execution_id, was, is_now) from soak.changed`,

	"nothing must be done twice": `
		select format('pay was called %s times under key %s', count(*), key) from soak.calls where skill = 'pay' group by key having count(*) > 1
		union all
		select format('pay was called %s times for %s of %s', count(*), body ->> 'at', body ->> 'n') from soak.calls where skill = 'pay'
		 group by body ->> 'n', body ->> 'at' having count(*) > 1`,
	"what was done twice shows": `
		select format('%s was called %s times under key %s; the log has %s rows, %s of them unknown', c.skill, c.n, c.key, a.n, a.unknown)
		  from (select skill, key, count(*) as n from soak.calls where skill <> 'post' group by 1, 2) c
		 cross join lateral (select count(*) as n, count(*) filter (where a.status = 'unknown') as unknown from agent_activity a
		                      where a.idempotency_key = c.key and a.skill_name = c.skill) a
		 where c.n > a.n or a.n - a.unknown > 1`,
	"what is logged was done, and as often as the flow says": `
		select format('%s %s (%s) has %s successes of %s, not %s', x.flow, x.id, x.status, n.n, k.skill, k.n) from agent_executions x
		  join soak.flows f on f.flow = x.flow cross join lateral (values ('pay', f.pays), ('look', f.looks)) k (skill, n)
		 cross join lateral (select count(*) as n from agent_activity a where a.execution_id = x.id and a.skill_name = k.skill and a.status = 'success') n
		 where n.n <> k.n and (x.status = f.ends or n.n > k.n)
		union all
		select format('%s of %s is logged as done and was never called', a.skill_name, a.execution_id) from agent_activity a
		 where a.skill_name in ('pay', 'look') and a.status = 'success'
		   and not exists (select from soak.calls c where c.skill = a.skill_name and c.key = a.idempotency_key)`,
	"what is unknown is so because a claim was lost": `
		select format('%s of %s %s is %s: %s', a.skill_name, x.flow, x.id, a.status, a.error_message) from agent_activity a
		  join agent_executions x on x.id = a.execution_id
		 where a.kind = 'call' and a.skill_name in ('pay', 'look')
		   and not (a.status = 'success' or a.status = 'unknown' and a.error_class = 'interrupted' and a.claim < x.claim)`,

	"nothing is left": `
		select format('lane %s is held by %s, parked %s', lane, locked_by, parked) from agent_locks where locked_by <> '' or parked or execution_id is not null
		union all
		select format('lane %s is lent to %s', lane, borrower) from agent_lock_loans
		union all
		select format('%s %s is %s, waits for %s', flow, id, status, waiting_for) from agent_executions
		 where completed_at is null or waiting_for is not null or claimed_by is not null
		union all
		select format('the end of %s is untold', execution_id) from agent_untold_ends
		union all
		select format('request %s (%s) is open', id, kind) from agent_requests where status = 'pending'
		union all
		select format('message %L is %s', content, status) from agent_messages where status in ('queued', 'sending')
		union all
		select format('activity %s is under way', activity_id) from agent_activity_open
		union all
		select format('%s of %s is running', skill_name, execution_id) from agent_activity where status = 'running' or finished_at is null
		union all
		select format('a draft of %s is left', execution_id) from agent_message_drafts
		union all
		select format('worker %s lives', id) from agent_workers where expires_at > clock_timestamp()`,
}

// underWay lists what has not come to its end.
const underWay = `
	select format('%s of %s are %s, wait for %s', count(*), flow, status, waiting_for) from agent_executions
	 where completed_at is null group by flow, status, waiting_for
	union all
	select format('%s messages are %s', count(*), status) from agent_messages where status in ('queued', 'sending') group by status
	union all
	select format('%s threads are held', count(*)) from agent_locks where locked_by <> '' having count(*) > 0
	union all
	select format('%s ends are untold', count(*)) from agent_untold_ends having count(*) > 0
	union all
	select format('%s workers are there', count(*)) from agent_workers having count(*) > 3      -- those that were killed, too`
