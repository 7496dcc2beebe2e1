package failover_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// load plays all clients: they start executions, send events, write in threads and ask as visitors, and one takes a
// lane by plain SQL. Each repeats its request under the same key until it gets an answer, and notes the answer.
type load struct {
	*testEnv
	ctx   context.Context // ends when no client may start more
	stop  context.CancelFunc
	group sync.WaitGroup
	jobs  errgroup.Group

	mu             sync.Mutex
	nextAgent      int
	runs           map[int]string    // ids of started executions
	acceptedEvents map[string]string // keys of accepted events, by id
	messages       map[string]string // contents of messages, by id
	answers        map[string]string // answers to visitors, by thread and question
	tokens         []int64           // of the lane probe, in the order of its grants
	failedRequests int               // requests without an answer, or with a server error
}

// newLoad creates a load that has not started.
func (w *testEnv) newLoad() *load {
	ctx, stop := context.WithCancel(w.t.Context())
	l := &load{
		testEnv: w, ctx: ctx, stop: stop, runs: map[int]string{}, acceptedEvents: map[string]string{},
		messages: map[string]string{}, answers: map[string]string{},
	}
	l.jobs.SetLimit(8)
	w.t.Cleanup(func() {
		stop()
		w.releaseCalls()
		l.group.Wait()
		_ = l.jobs.Wait() // none fails
	})
	return l
}

func (w *testEnv) startLoad() *load {
	l := w.newLoad()
	l.group.Go(l.runClients)
	l.group.Go(l.useLane)
	return l
}

// end starts no more requests, and waits for the answers of those in progress.
func (l *load) end() {
	l.stop()
	l.group.Wait()
	_ = l.jobs.Wait() // none fails
}

// runClients start an execution, send its event, and send a message, again and again.
func (l *load) runClients() {
	for n := 1; testkit.Wait(l.ctx, 250*time.Millisecond); n++ {
		l.jobs.Go(func() error {
			l.startExecution(n)
			if n%3 == 0 {
				l.sendMessage(n)
			}
			l.sendEvent(n)
			return nil
		})
		if n%4 == 0 {
			l.jobs.Go(func() error { l.askQuestion(n); return nil })
		}
	}
}

func (l *load) startExecution(n int) {
	var got struct{ ID string }
	l.retryUntilDone("/v1/executions", adminToken, fmt.Sprintf("start %d", n), "", map[string]any{
		"flow": "errand", "thread_id": fmt.Sprintf("t%d", n), "input": map[string]any{"n": n},
	}, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs[n] = got.ID
}

func (l *load) sendEvent(n int) {
	key, id := fmt.Sprintf("event %d", n), fmt.Sprintf("given %d", n)
	l.retryUntilDone("/v1/events", adminToken, "", "",
		map[string]any{"event": "EVENT_COMPLETED", "key": key, "data": map[string]any{"is": key}, "id": id}, nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acceptedEvents[id] = key
}

func (l *load) sendMessage(n int) {
	var got struct {
		ID string `json:"message_id"`
	}
	content := fmt.Sprintf("note %d", n)
	body := map[string]any{"content": content}
	l.retryUntilDone(fmt.Sprintf("/v1/threads/t%d/messages", n), adminToken, content, "", body, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.messages[got.ID] = content
}

func (l *load) askQuestion(n int) {
	var got struct {
		Choices []struct{ Message struct{ Content string } }
	}
	question := fmt.Sprintf("question %d", n)
	l.retryUntilDone("/v1/chat/completions", visitorKey, question, fmt.Sprintf("v%d", n), map[string]any{
		"model": "agent", "messages": []map[string]any{{"role": "user", "content": question}},
	}, &got)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range got.Choices {
		l.answers[question] = c.Message.Content
	}
}

// useLane acquires and releases a lane, again and again.
func (l *load) useLane() {
	for n := 0; testkit.Wait(l.ctx, 200*time.Millisecond); n++ {
		ctx, cancel := context.WithTimeout(l.ctx, 10*time.Second)
		var token int64
		owner := fmt.Sprintf("prober %d", n)
		err := l.db.QueryRow(ctx, `select fencing_token from acquire_agent_lock('probe', $1, 1) where acquired`,
			owner).Scan(&token)
		if err == nil { // else the last owner's lease has not ended: an outage prevented its release
			l.mu.Lock()
			l.tokens = append(l.tokens, token)
			l.mu.Unlock()
			_, _ = l.db.Exec(ctx, `select release_agent_lock('probe', $1)`, owner) // else its lease expires
		}
		cancel()
	}
}

// retryUntilDone sends a request to the processes in turn until one succeeds.
func (l *load) retryUntilDone(path, token, key, thread string, body, into any) {
	text, err := json.Marshal(body)
	if err != nil {
		l.t.Error(err)
		return
	}
	for ctx := l.t.Context(); ctx.Err() == nil; testkit.Wait(ctx, 100*time.Millisecond) {
		status, answer := l.post(ctx, path, token, key, thread, text)
		switch {
		case status >= 200 && status < 300:
			if into != nil {
				assert.NoError(l.t, json.Unmarshal(answer, into), "POST", path, "in", answer)
			}
			return
		case status >= 400 && status < 500 && status != http.StatusConflict && status != http.StatusTooManyRequests:
			l.t.Errorf("POST %s %s: %d %s", path, text, status, answer)
			return
		}
		l.mu.Lock()
		l.failedRequests++
		l.mu.Unlock()
	}
}

func (l *load) post(ctx context.Context, path, token, key, thread string, body []byte) (int, []byte) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	l.mu.Lock()
	l.nextAgent++
	base := l.baseURLs[l.nextAgent%len(l.baseURLs)]
	l.mu.Unlock()
	got, err := testkit.Do(ctx, http.DefaultClient, http.MethodPost, base+path, string(body), testkit.Bearer(token),
		"Idempotency-Key: "+key, "X-Thread-Id: "+thread)
	if err != nil {
		return 0, nil
	}
	return got.Status, got.Body
}

// countStarted returns the number of confirmed executions.
func (l *load) countStarted() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.runs)
}

// recordTables store what only the test knows.
const recordTables = `
	create schema truth;
	create table truth.runs (n int not null, id uuid not null);
	create table truth.given (id text not null, key text not null);
	create table truth.notes (id text not null, content text not null);
	create table truth.heard (question text not null, answer text not null);
	create table truth.calls (skill text not null, key text not null, body jsonb not null);
	create table truth.lanes (process int not null, nth int not null, lane text not null, token bigint not null)`

// checks are the invariants. Each query lists its violations in words.
var checks = map[string]string{
	"a start that was confirmed is there, once": `
		select format('number %s (%s) is not there as it was started', r.n, r.id) from truth.runs r
		  left join agent_executions x on x.id = r.id where x.input ->> 'n' is distinct from r.n::text
		union all
		select format('number %s was started %s times', input ->> 'n', count(*)) from agent_executions where flow = 'errand'
		 group by input ->> 'n' having count(*) > 1`,
	"every execution ends": `
		select format('%s %s is %s: %s', flow, id, status, error_message) from agent_executions x
		 where status <> 'completed' and not (status = 'failed' and exists (
		   select from agent_activity a where a.execution_id = x.id and a.skill_name = 'pay' and a.status = 'unknown'))`,
	"an event that was confirmed is there, once, and was heard": `
		select format('%s (%s) is there %s times, consumed by %s', g.id, g.key, count(v.id), count(v.consumed_by))
		  from truth.given g
		  left join agent_events v on v.external_id = g.id and v.key = g.key group by g.id, g.key having count(v.id) <> 1
		    or count(v.consumed_by) <> 1`,
	"a message that was confirmed is there, once, and was sent": `
		select format('%L (%s) is there %s times: %s', n.content, n.id, count(m.id), string_agg(m.status, ', '))
		  from truth.notes n
		  left join agent_messages m on m.content = n.content
		 group by n.content, n.id having count(m.id) <> 1
		   or count(*) filter (where m.id::text = n.id and m.status = 'sent') <> 1`,
	"what a flow says is said once": `
		select format('%s of number %s was said %s times', k.words, x.input ->> 'n', n.times) from agent_executions x
		 cross join lateral (values ('begins'), ('got [event ' || (x.input ->> 'n') || ']')) k (words)
		 cross join lateral (select count(*) as times from agent_messages m where m.execution_id = x.id
		   and m.content = (x.input ->> 'n') || ' ' || k.words) n
		 where x.flow = 'errand' and n.times <> 1 and x.status = 'completed'`,
	"an answer that was heard is there, once": `
		select format('%s: %L is there %s times', h.question, h.answer, count(m.id)) from truth.heard h
		  left join agent_messages m on m.role = 'assistant' and m.content = h.answer
		 group by h.question, h.answer having count(m.id) <> 1 or h.answer <> 'answer to ' || h.question`,
	"what must not be repeated is not": `
		select format('pay was called %s times under key %s for %s', count(*), key, body) from truth.calls where skill = 'pay'
		  group by key, body having count(*) > 1
		union all
		select format('pay was called %s times for %s', count(*), body) from truth.calls where skill = 'pay'
		  group by body having count(*) > 1`,
	"what was done twice shows": `
		select format('%s was called %s times under key %s; the log has %s rows, %s of them unknown', c.skill, c.n, c.key,
		              a.n, a.unknown)
		  from (select skill, key, count(*) as n from truth.calls group by 1, 2) c
		 cross join lateral (select count(*) as n, count(*) filter (where a.status = 'unknown') as unknown
		   from agent_activity a
		                      where a.idempotency_key = c.key and a.skill_name = c.skill) a
		 where c.n > a.n or a.n - a.unknown > 1`,
	"what is logged was done": `
		select format('%s of %s is logged as done and was never called', a.skill_name, a.execution_id) from agent_activity a
		 where a.skill_name in ('pay', 'look') and a.status = 'success'
		   and not exists (select from truth.calls c where c.skill = a.skill_name and c.key = a.idempotency_key)`,
	"tokens of a lane grow": `
		select format('lane %s: process %s got token %s after %s', lane, process, token, earlier)
		  from (select *, lag(token) over (partition by process, lane order by nth) as earlier from truth.lanes) x
		    where token <= earlier
		union all
		select format('lane %s: token %s was given %s times', lane, token, count(*)) from truth.lanes
		  group by lane, token having count(*) > 1
		union all
		select format('lane %s has token %s, and gave %s', k.lane, k.fencing_token, max(l.token)) from agent_locks k
		  join truth.lanes l on l.lane = k.lane
		 group by k.lane, k.fencing_token having max(l.token) > k.fencing_token`,
	"nothing is left": `
		select format('lane %s is held by %s, parked %s', lane, locked_by, parked) from agent_locks where locked_by <> ''
		  and lane <> 'probe' or parked
		union all
		select format('%s %s is %s, waits for %s', flow, id, status, waiting_for) from agent_executions
		  where completed_at is null or claimed_by is not null
		union all
		select format('message %L is %s', content, status) from agent_messages where status in ('queued', 'sending')
		union all
		select format('%s of %s is running', skill_name, execution_id) from agent_activity where status = 'running'
		  or finished_at is null
		union all
		select format('activity %s is under way', activity_id) from agent_activity_open`,
}

// unfinishedWork lists everything that has not ended.
const unfinishedWork = `
	select format('%s of %s are %s, wait for %s', count(*), flow, status, waiting_for) from agent_executions
	 where completed_at is null group by flow, status, waiting_for
	union all
	select format('%s messages are %s', count(*), status) from agent_messages where status in ('queued', 'sending')
	  group by status
	union all
	select format('lane %s is held by %s', lane, locked_by) from agent_locks where locked_by <> '' and lane <> 'probe'`

// stopAndCheck waits until the load and its work have ended, stops the processes, and runs all checks.
func (l *load) stopAndCheck() {
	l.t.Helper()
	l.end()
	pgtest.Exec(l.t, l.db, `update agent_schedules set next_run_at = clock_timestamp() + interval '1 day'`)
	pgtest.EventuallyWithin(l.t, 2*pgtest.Timeout, func() bool {
		return len(pgtest.Column[string](l.t, l.db, unfinishedWork)) == 0
	},
		"everything that was begun ends")
	l.checkRunning()
	for _, a := range l.agents {
		a.Stop()
	}
	l.storeRecords()
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		for i, violation := range pgtest.Column[string](l.t, l.db, checks[name]) {
			if i == 5 {
				l.t.Errorf("%s: and more", name)
				break
			}
			l.t.Errorf("%s: %s", name, violation)
		}
	}
	l.checkCounts()
}

// storeRecords stores what only the test knows.
func (l *load) storeRecords() {
	for n, id := range l.runs {
		pgtest.Exec(l.t, l.db, `insert into truth.runs values ($1, $2)`, n, id)
	}
	for id, key := range l.acceptedEvents {
		pgtest.Exec(l.t, l.db, `insert into truth.given values ($1, $2)`, id, key)
	}
	for id, content := range l.messages {
		pgtest.Exec(l.t, l.db, `insert into truth.notes values ($1, $2)`, id, content)
	}
	for question, answer := range l.answers {
		pgtest.Exec(l.t, l.db, `insert into truth.heard values ($1, $2)`, question, answer)
	}
	for _, c := range l.calls {
		pgtest.Exec(l.t, l.db, `insert into truth.calls values ($1, $2, $3)`, c.skill, c.key, c.body)
	}
	for i, token := range l.tokens {
		pgtest.Exec(l.t, l.db, `insert into truth.lanes values (-1, $1, 'probe', $2)`, i, token)
	}
	for i, a := range l.agents {
		for nth, line := range a.Lines() {
			if token, err := line.Token.Int64(); err == nil && line.Message == "lane acquired" {
				pgtest.Exec(l.t, l.db, `insert into truth.lanes values ($1, $2, $3, $4)`, i, nth, line.Lane, token)
			}
		}
	}
}

// checkCounts logs the counts of each kind of work, and fails the test if a kind did not happen.
func (l *load) checkCounts() {
	l.t.Helper()
	l.t.Logf("%6d requests were not answered and sent again", l.failedRequests)
	for _, c := range []struct {
		what, sql string
		may       bool // be none
	}{
		{"executions that were confirmed", `select count(*) from truth.runs`, false},
		{"events", `select count(*) from truth.given`, false},
		{"messages", `select count(*) from truth.notes`, false},
		{"answers", `select count(*) from truth.heard`, false},
		{"heartbeats", `select count(*) from agent_executions where flow = 'heartbeat'`, false},
		{"tokens", `select count(*) from truth.lanes`, false},
		{"calls beyond the first", `select count(*) - count(distinct key) from truth.calls`, true},
		{"calls that nobody knows the outcome of", `select count(*) from agent_activity where status = 'unknown'`, true},
		{"executions that failed because of one", `select count(*) from agent_executions where status = 'failed'`, true},
	} {
		n := pgtest.Value[int](l.t, l.db, c.sql)
		l.t.Logf("%6d %s", n, c.what)
		assert.Truef(l.t, n != 0 || c.may, "no %s: the test does not cover them", c.what)
	}
}

// Every check finds its violation.
func TestChecksFindPlantedViolations(t *testing.T) {
	t.Parallel()
	for name, planted := range plantedRows {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &testEnv{t: t, db: pgtest.DB(t)}
			pgtest.Exec(w.t, w.db, recordTables)
			found := pgtest.Column[string](w.t, w.db, checks[name])
			require.Truef(t, len(found) == 0, "an empty database violates it: %s", strings.Join(found, "; "))
			pgtest.Exec(w.t, w.db, planted)
			assert.True(t, len(pgtest.Column[string](w.t, w.db, checks[name])) > 0, "the violation is not found")
		})
	}
	for name := range checks {
		assert.Truef(t, plantedRows[name] != "", "nothing violates: %s", name)
	}
}

const plantedExecution = `insert into agent_executions (id, trace_id, surface, flow, input)
	values ('00000000-0000-7000-8000-000000000001', 'fl_x', 'flow', 'errand', '{"n": 1}')`

// plantedRows violate the checks.
var plantedRows = map[string]string{
	"a start that was confirmed is there, once":                 `insert into truth.runs values (1, gen_random_uuid())`,
	"every execution ends":                                      plantedExecution,
	"an event that was confirmed is there, once, and was heard": `insert into truth.given values ('a', 'b')`,
	"a message that was confirmed is there, once, and was sent": `insert into truth.notes values ('a', 'b')`,
	"what a flow says is said once": plantedExecution + `; update agent_executions set status = 'running', claim = 1;
		update agent_executions set status = 'completed'`,
	"an answer that was heard is there, once": `insert into truth.heard values ('question 1', 'answer to question 1')`,
	"what must not be repeated is not": `insert into truth.calls values ('pay', 'a', '{"n": 1}'),
		('pay', 'b', '{"n": 1}')`,
	"what was done twice shows": `insert into truth.calls values ('look', 'a', '{"n": 1}')`,
	"what is logged was done": `insert into agent_activity (trace_id, skill_name, kind, status, idempotency_key,
		finished_at)
		values ('fl_x', 'pay', 'call', 'success', 'a', clock_timestamp())`,
	"tokens of a lane grow": `insert into truth.lanes values (0, 1, 'a', 5), (0, 2, 'a', 5)`,
	"nothing is left":       plantedExecution,
}
