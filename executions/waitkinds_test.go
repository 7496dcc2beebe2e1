package executions_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// waiter is an execution that the test runs by SQL alone.
type waiter struct {
	t    *testing.T
	pool *pgxpool.Pool
	id   string
	by   string
	n    int64
}

func newWaiter(t *testing.T, pool *pgxpool.Pool) *waiter {
	t.Helper()
	w := &waiter{t: t, pool: pool, id: pending(t, pool), by: worker(t, pool)}
	w.n = mustClaim(t, pool, w.id, w.by)
	return w
}

// park waits for something; the outcome when it has come already, else nil.
func (w *waiter) park(step, kind, key string) *executions.Outcome {
	w.t.Helper()
	text := value[*string](w.t, w.pool, `select lanekeeper.wait_agent_execution(@id, @claim, @step, @kind, @key, null, null)::text`,
		postgres.Strict{"id": w.id, "claim": w.n, "step": step, "kind": kind, "key": key})
	return w.outcome(text)
}

func (w *waiter) outcome(text *string) *executions.Outcome {
	w.t.Helper()
	if text == nil {
		return nil
	}
	var out executions.Outcome
	if err := json.Unmarshal([]byte(*text), &out); err != nil {
		w.t.Fatal(err)
	}
	var err error
	if out.Data, err = compact(out.Data); err != nil {
		w.t.Fatal(err)
	}
	return &out
}

// goOn claims it again and returns how its wait ended.
func (w *waiter) goOn(step string) *executions.Outcome {
	w.t.Helper()
	if x := get(w.t, w.pool, w.id); x.Status != executions.Running {
		w.t.Fatalf("it is %s in wait %s", x.Status, step)
	}
	w.n = mustClaim(w.t, w.pool, w.id, w.by)
	return w.outcome(value[*string](w.t, w.pool, `select output::text from agent_checkpoints where execution_id = @id and step = @step`,
		postgres.Strict{"id": w.id, "step": step}))
}

func (w *waiter) status() executions.Status { return get(w.t, w.pool, w.id).Status }

// due makes its timer due and sweeps.
func (w *waiter) due() {
	w.t.Helper()
	exec(w.t, w.pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second' where id = @id`,
		postgres.Strict{"id": w.id})
	sweep(w.t, w.pool)
}

// ask makes a request of the execution.
func (w *waiter) ask(kind string, items ...string) string {
	w.t.Helper()
	if items == nil {
		items = []string{}
	}
	return value[string](w.t, w.pool, `
		insert into agent_requests (kind, execution_id, trace_id, items) values (@kind, @id, 'fl_x', @items) returning id::text`,
		postgres.Strict{"kind": kind, "id": w.id, "items": items})
}

func send(t *testing.T, db postgres.DB, event, key, data, id string) {
	t.Helper()
	exec(t, db, `select deliver_agent_event(@event, @key, @data, nullif(@id, ''))`,
		postgres.Strict{"event": event, "key": key, "data": data, "id": id})
}

var eventOf = map[string]string{
	"response": "MESSAGE_RECEIVED", "document": "DOCUMENT_UPLOADED", "signature": "SIGNATURE_COMPLETED", "test": "TEST_COMPLETED",
	"event": "EVENT_COMPLETED", "approval": "APPROVAL_DECIDED", "agent": "AGENT_COMPLETED",
}

// Every kind: an event before its wait, after it, twice, and after the timeout has one outcome.
func TestEveryKindOfWaitHasOneOutcome(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for kind, event := range eventOf {
		for _, asked := range []bool{false, true} {
			if asked && kind != "document" && kind != "signature" && kind != "test" {
				continue
			}
			t.Run(fmt.Sprint(kind, " asked ", asked), func(t *testing.T) {
				w := newWaiter(t, pool)
				key := func(n string) string {
					switch {
					case asked && kind == "document":
						return w.ask(kind, "cv")
					case asked:
						return w.ask(kind)
					}
					return kind + n
				}
				late, twice, early := key("late"), key("twice"), key("early")
				if w.park("1", kind, late) != nil {
					t.Fatal("an outcome of nothing")
				}
				w.due()
				if out := w.goOn("1"); !out.TimedOut {
					t.Errorf("timed out with %+v", out)
				}
				send(t, pool, event, late, `{"document": "cv", "url": "late"}`, "")
				if w.status() != executions.Running {
					t.Error("an event after the timeout did something")
				}
				if w.park("2", kind, twice) != nil {
					t.Fatal("an event of another wait ended this one")
				}
				send(t, pool, event, twice, `{"document": "cv", "url": "one"}`, kind+fmt.Sprint(asked))
				send(t, pool, event, twice, `{"document": "cv", "url": "two"}`, kind+fmt.Sprint(asked))
				if out := w.goOn("2"); out.TimedOut || out.Event != event || out.EventID == "" || !strings.Contains(string(out.Data), "one") {
					t.Errorf("outcome %+v", out)
				}
				send(t, pool, event, early, `{"document": "cv", "url": "one"}`, "")
				send(t, pool, event, early, `{"document": "cv", "url": "two"}`, "") // another id: another event, or no matter to a request
				first := w.park("3", kind, early)
				if first == nil || first.TimedOut || !strings.Contains(string(first.Data), "one") {
					t.Fatalf("an early event ended the wait with %+v", first)
				}
				left := value[int](t, pool, `select count(*) from agent_events where key = @key and consumed_by is null`, postgres.Strict{"key": early})
				if want := map[bool]int{false: 1, true: 0}[asked]; left != want {
					t.Errorf("%d events are left, want %d", left, want)
				}
				exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": w.id})
			})
		}
	}
}

func TestAWaitForDocumentsEndsWhenAllAreThere(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, events := range map[string][]string{
		"one by one":   {`{"document": "b", "url": "ub"}`, `{"document": "pet", "url": "up"}`, `{"document": "a", "url": "ua"}`},
		"at once":      {`{"documents": [{"document": "b", "url": "ub"}, {"name": "a", "url": "ua"}, 7, {"url": "?"}]}`},
		"one replaced": {`{"document": "b", "url": "old"}`, `{"document": "b", "url": "ub"}`, `{"document": "a", "url": "ua"}`},
	} {
		w := newWaiter(t, pool)
		id := w.ask("document", "a", "b")
		if w.park("docs", "document", id) != nil {
			t.Fatal("nothing came yet")
		}
		for i, data := range events {
			if w.status() != executions.Waiting {
				t.Errorf("%s: %s before event %d", name, w.status(), i)
			}
			send(t, pool, "DOCUMENT_UPLOADED", id, data, "")
		}
		out := w.goOn("docs")
		var data struct{ DocumentURLs []string }
		if err := json.Unmarshal(out.Data, &data); err != nil || fmt.Sprint(data.DocumentURLs) != "[ua ub]" {
			t.Errorf("%s: %s, %v", name, out.Data, err)
		}
		if again := w.park("again", "document", id); again == nil || string(again.Data) != string(out.Data) {
			t.Errorf("%s: a second wait for it ended with %+v", name, again)
		}
	}
	pets := value[int](t, pool, `select count(*) from agent_requests where unexpected ? 'pet' and status = 'completed'`)
	if n := value[int](t, pool, `select count(*) from agent_events where consumed_by is null`); n != 0 || pets != 1 {
		t.Errorf("%d events are left, %d documents that nobody asked for are noted", n, pets)
	}
}

// An upload and the end of the execution meet: both take the execution before the request.
func TestAnAnswerAndAnEndDoNotBlockOneAnother(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 40 {
		w := newWaiter(t, pool)
		id := w.ask("signature")
		w.park("sign", "signature", id)
		group, ctx := errgroup.WithContext(t.Context())
		group.Go(func() error {
			_, err := pool.Exec(ctx, `select deliver_agent_event('SIGNATURE_COMPLETED', @id, '{}')`, postgres.Strict{"id": id})
			return err
		})
		group.Go(func() error { _, err := executions.Cancel(ctx, pool, w.id, "test", ""); return err })
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheEndOfAnExecutionClosesWhatItAskedFor(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w, other := newWaiter(t, pool), newWaiter(t, pool)
	id := w.ask("test")
	if other.park("other", "test", id) != nil {
		t.Fatal("nothing came yet")
	}
	exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": w.id})
	if got := value[string](t, pool, `select status from agent_requests where id = @id`, postgres.Strict{"id": id}); got != "closed" {
		t.Errorf("the request is %s", got)
	}
	send(t, pool, "TEST_COMPLETED", id, `{"score": 1}`, "")
	if out := other.goOn("other"); string(out.Data) != `{"score":1}` {
		t.Errorf("who waits for the request of another got %+v", out)
	}
}

// A timeout that was not given is the kind's own, and one beyond its longest is refused, by whoever asks.
func TestTimeoutsAreThoseOfTheKind(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `select try_acquire_agent_lock('held', 'somebody')`) // a wait for it begins
	for _, kind := range []string{"response", "agent", "document", "signature", "test", "event", "approval", "delay", "lane"} {
		standard, longest := executions.Limits(kind)
		if standard > 0 {
			w := newWaiter(t, pool)
			exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'held', null, null)`,
				postgres.Strict{"id": w.id, "claim": w.n, "kind": kind})
			got := value[float64](t, pool, `select extract(epoch from waiting_until - updated_at)::float8 from agent_executions where id = @id`,
				postgres.Strict{"id": w.id})
			if math.Abs(got-standard.Seconds()) > 1 {
				t.Errorf("%s: the standard is %s here, %v s in the database", kind, standard, got)
			}
		}
		w := newWaiter(t, pool)
		for timeout, fits := range map[time.Duration]bool{longest + time.Second: false, -time.Second: false, longest: true} {
			if !fits {
				_, err := pool.Exec(t.Context(), `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'k', make_interval(secs => @s), null)`,
					postgres.Strict{"id": w.id, "claim": w.n, "kind": kind, "s": timeout.Seconds()})
				if !postgres.IsCode(err, "22023") {
					t.Errorf("%s: %s was taken: %v", kind, timeout, err)
				}
			}
		}
		exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 's', @kind, 'k', make_interval(secs => @s), null)`,
			postgres.Strict{"id": w.id, "claim": w.n, "kind": kind, "s": longest.Seconds()})
	}
}
