//go:build unix

package soak_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/threads"
)

// people are everybody outside: they start executions, answer what they are asked, and give events too early, twice
// and too late. They try again until they are heard, under the same id.
type people struct {
	*world
	*noise
	engine *executions.Engine // of a process that runs nothing; it takes visitors' messages
	total  int
	jobs   errgroup.Group

	mu    sync.Mutex
	seen  map[string]bool // what was seen to, by a name
	runs  []run
	given map[string]given
	twice int // deliveries beyond the first
}

// run is an execution that was started.
type run struct {
	n    int
	flow string
	id   string
}

// given is an event that was accepted.
type given struct {
	event, key string
	wanted     bool // somebody waits for it, or will
}

// first reports whether a thing is seen to for the first time.
func (p *people) first(thing string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seen[thing] {
		return false
	}
	p.seen[thing] = true
	return true
}

// insist calls f until it succeeds, or the test ends.
func (p *people) insist(what string, f func(ctx context.Context) error) {
	ctx := p.world.t.Context()
	for {
		bounded, cancel := context.WithTimeout(ctx, 20*time.Second)
		err := f(bounded)
		cancel()
		if err == nil || ctx.Err() != nil {
			return
		}
		if !testkit.Wait(ctx, 100*time.Millisecond) {
			p.world.t.Logf("%s: %v", what, err)
			return
		}
	}
}

// post sends a request to one of the processes.
func (p *people) post(ctx context.Context, path, key string, body any) ([]byte, error) {
	base := p.base()
	if base == "" {
		return nil, fmt.Errorf("no process serves")
	}
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	got, err := testkit.Do(ctx, http.DefaultClient, http.MethodPost, base+path, string(text), testkit.Bearer(adminToken),
		"Idempotency-Key: "+key)
	if err != nil {
		return nil, err
	}
	if got.Status >= 300 {
		if got.Status < 500 && got.Status != http.StatusConflict && p.first("complaint "+path+string(got.Body)) {
			p.world.t.Errorf("POST %s %s: %d %s", path, text, got.Status, got.Body)
		}
		return nil, fmt.Errorf("%d %s", got.Status, got.Body)
	}
	return got.Body, nil
}

// start starts the n-th execution.
func (p *people) start(n int) {
	s, thread := of(n)
	if s.waitsForEvent() && s.flow != "patient" && n%3 == 0 {
		// before its wait
		p.give("EVENT_COMPLETED", fmt.Sprintf("event %d", n), map[string]any{"is": fmt.Sprintf("event %d", n)}, true)
	}
	p.jobs.Go(func() error {
		p.insist("start", func(ctx context.Context) error {
			raw, err := p.post(ctx, "/v1/executions", fmt.Sprintf("start %d", n), map[string]any{
				"flow": s.flow, "thread_id": thread, "input": map[string]any{"n": n},
			})
			if err != nil {
				return err
			}
			var got struct{ ID string }
			if err := json.Unmarshal(raw, &got); err != nil {
				return err
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			p.runs = append(p.runs, run{n, s.flow, got.ID})
			return nil
		})
		return nil
	})
}

// give delivers an event, often twice at once.
func (p *people) give(event, key string, data map[string]any, wanted bool) {
	name := fmt.Sprint(event, " ", key, " ", data["document"], data["late"])
	if !p.first("given " + name) {
		return
	}
	times := 1 + rand.IntN(2)
	p.mu.Lock()
	p.twice += times - 1
	p.mu.Unlock()
	for range times {
		p.jobs.Go(func() error {
			p.insist("give "+name, func(ctx context.Context) error {
				_, err := p.post(ctx, "/v1/events", "",
					map[string]any{"event": event, "key": key, "data": data, "id": "soak " + name})
				return err
			})
			p.note(name, given{event, key, wanted})
			return nil
		})
	}
}

func (p *people) note(name string, g given) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.given["soak "+name] = g
}

// say answers in a thread, sometimes twice, under the id of what it answers.
func (p *people) say(thread, content, about string, wanted bool) {
	if !p.first("said " + about) {
		return
	}
	times := 1 + rand.IntN(2)
	p.mu.Lock()
	p.twice += times - 1
	p.mu.Unlock()
	for range times {
		p.jobs.Go(func() error {
			p.insist("say "+about, func(ctx context.Context) error {
				if strings.HasSuffix(about, "7") { // as an event alone, without a message of the thread
					_, err := p.post(ctx, "/v1/events", "", map[string]any{
						"event": "MESSAGE_RECEIVED", "key": thread, "data": map[string]any{"content": content}, "id": "soak say " + about,
					})
					return err
				}
				return pgx.BeginFunc(ctx, p.db, func(tx pgx.Tx) error {
					_, err := threads.Receive(ctx, p.engine, tx,
						threads.Incoming{ThreadID: thread, Content: content, ID: "soak say " + about})
					return err
				})
			})
			p.note("say "+about, given{"MESSAGE_RECEIVED", thread, wanted})
			return nil
		})
	}
}

// lookOut sees once to all that somebody waits for.
func (p *people) lookOut(ctx context.Context) error {
	for _, look := range []func(ctx context.Context) error{p.answer, p.fulfil, p.raise, p.hurry, p.cancel, p.tooLate} {
		if err := look(ctx); err != nil {
			return err
		}
	}
	return nil
}

// each calls f with each row of a query of texts.
func (p *people) each(ctx context.Context, sql string, f func(row []string)) error {
	rows, err := p.db.Query(ctx, sql)
	if err != nil {
		return err
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[[]string])
	if err != nil {
		return err
	}
	for _, row := range found {
		f(row)
	}
	return nil
}

// answer answers questions that have been sent.
func (p *people) answer(ctx context.Context) error {
	return p.each(ctx, `
		select array[m.id::text, m.thread_id, substring(m.content from '^\d+ \S+ \d+')] from agent_messages m
		 where m.role = 'assistant' and m.status in ('sent', 'delivered') and m.content like '%?'`, func(m []string) {
		p.say(m[1], "answer to "+m[2], m[0], true)
	})
}

// fulfil sends in what was asked for, the second document before the first.
func (p *people) fulfil(ctx context.Context) error {
	return p.each(ctx, `
		select array[r.id::text, r.kind, x.flow, x.input ->> 'n', coalesce((r.received ? 'CURP')::text, 'false')]
		  from agent_requests r join agent_executions x on x.id = r.execution_id where r.status = 'pending'`, func(r []string) {
		id, n := r[0], r[3]
		document := func(name string) {
			p.give("DOCUMENT_UPLOADED", id, map[string]any{"document": name, "url": "url " + n + " " + name}, true)
		}
		switch {
		case r[2] == "late" && r[1] == "document": // the other one comes too late
			document("CURP")
		case r[2] == "late":
		case r[1] == "document":
			document("CURP")
			if r[4] == "true" || rand.IntN(3) == 0 {
				document("INE")
			}
		case r[1] == "signature":
			p.give("SIGNATURE_COMPLETED", id, map[string]any{"url": "signed " + n}, true)
		case r[1] == "test":
			p.give("TEST_COMPLETED", id, map[string]any{"score": json.Number(n), "result": "passed"}, true)
		}
	})
}

// raise raises events that were not raised before their wait: some when it is seen, some at any time after the start.
func (p *people) raise(ctx context.Context) error {
	return p.each(ctx, `
		select array[x.input ->> 'n'] from agent_executions x
		 where x.flow in ('papers', 'errands') and x.completed_at is null
		   and ((x.input ->> 'n')::int % 3 = 1 and random() < 0.1 or x.waiting_for = 'event')`, func(x []string) {
		p.give("EVENT_COMPLETED", "event "+x[0], map[string]any{"is": "event " + x[0]}, true)
	})
}

// hurry makes the first wait of the patient time out, and then raises their event.
func (p *people) hurry(ctx context.Context) error {
	_, err := p.db.Exec(ctx, `
		update agent_executions set waiting_until = clock_timestamp()
		 where flow = 'patient' and status = 'waiting' and waiting_for = 'event' and waiting_until > clock_timestamp() and wait_number = 1`)
	if err != nil {
		return err
	}
	return p.each(ctx, `
		select array[x.input ->> 'n'] from agent_executions x
		 where x.flow = 'patient' and x.wait_number >= 1
		   and exists (select from agent_checkpoints c where c.execution_id = x.id and c.output ->> 'timed_out' = 'true')`, func(x []string) {
		p.give("EVENT_COMPLETED", "event "+x[0], map[string]any{"is": "event " + x[0]}, true)
	})
}

// cancel cancels those that are to be cancelled, when their child waits.
func (p *people) cancel(ctx context.Context) error {
	return p.each(ctx, `
		select array[x.id::text] from agent_executions x join agent_executions c on c.parent_id = x.id
		 where x.flow = 'stopped' and x.status = 'waiting' and x.waiting_for = 'agent' and c.flow = 'stays' and c.status = 'waiting'`,
		func(x []string) {
			if !p.first("cancelled " + x[0]) {
				return
			}
			p.jobs.Go(func() error {
				p.insist("cancel", func(ctx context.Context) error {
					_, err := p.post(ctx, "/v1/executions/"+x[0]+"/cancel", "", map[string]any{"reason": "no longer wanted"})
					return err
				})
				return nil
			})
		})
}

// tooLate gives what nobody waits for any more, and then what the slow child waits for.
func (p *people) tooLate(ctx context.Context) error {
	return p.each(ctx, `
		select array[x.flow, x.input ->> 'n', x.id::text, coalesce(x.thread_id, ''),
		             coalesce((select r.id::text from agent_requests r where r.execution_id = x.id and r.kind = 'document'), '')]
		  from agent_executions x where x.flow in ('late', 'overdue', 'stubborn') and x.completed_at is not null`, func(x []string) {
		p.give("EVENT_COMPLETED", "late "+x[1], map[string]any{"late": true}, false)
		if x[0] == "late" {
			p.give("DOCUMENT_UPLOADED", x[4], map[string]any{"document": "INE", "late": true}, true) // the request keeps it
			p.say(x[3], "too late", "late "+x[2], false)
			p.give("EVENT_COMPLETED", "slow "+x[1], map[string]any{}, true)
		}
	})
}
