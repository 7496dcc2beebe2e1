package executions_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lines collects a program's log.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) into(o *executions.Options) { o.Logger = slog.New(slog.NewJSONHandler(l, nil)) }

// said returns the records, in order, whose message is one of some.
func (l *lines) said(t *testing.T, messages ...string) (got []map[string]any) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	d := json.NewDecoder(bytes.NewReader(l.text.Bytes()))
	for d.More() {
		var record map[string]any
		if err := d.Decode(&record); err != nil {
			t.Fatal(err)
		}
		if slices.Contains(messages, record["msg"].(string)) {
			got = append(got, record)
		}
	}
	return got
}

// The log tells the life of an execution, also when its wait was ended by SQL alone, or by a sweep.
func TestTheLogTellsEveryTransition(t *testing.T) {
	t.Parallel()
	for name, wake := range map[string]string{
		"by SQL": `select deliver_agent_event('EVENT_COMPLETED', 'key', '{}')`,
		"by a sweep": `
			with due as (update agent_executions set waiting_until = clock_timestamp() where status = 'waiting' returning id)
			select count(*) from due`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			l := &lines{}
			p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "thread:x"); err != nil {
					return executions.Result{}, err
				}
				return ends(executions.Wait(ctx, "event", executions.Event("key", 0)))
			}), l.into)
			id := p.begin(t, "flow")
			until(t, pool, id, executions.Waiting)
			exec(t, pool, wake)
			until(t, pool, id, executions.Completed)
			pgtest.Eventually(t, patience, func() bool { return len(l.said(t, "locks released")) > 0 }, "the end is told")
			var told []string
			for _, record := range l.said(t, "execution started", "action requires wait", "execution waiting", "execution resumed",
				"continuing from checkpoint", "execution completed", "event emitted", "locks released") {
				told = append(told, record["msg"].(string))
			}
			want := []string{
				"execution started", "action requires wait", "execution waiting", "execution resumed", "continuing from checkpoint",
				"execution completed", "event emitted", "locks released",
			}
			if !slices.Equal(told, want) {
				t.Errorf("told %q", told)
			}
			if _, named := l.said(t, "execution resumed")[0]["event"]; named == (name == "by a sweep") {
				t.Errorf("an event is named: %t", named)
			}
			for message, attribute := range map[string][2]any{
				"execution waiting":          {"waiting_for", "event"},
				"execution resumed":          {"timed_out", name == "by a sweep"},
				"continuing from checkpoint": {"checkpoints", 1.0},
				"execution completed":        {"result_type", "success"},
				"event emitted":              {"event", "AGENT_COMPLETED"},
				"locks released":             {"count", 1.0},
			} {
				if records := l.said(t, message); len(records) != 1 || records[0][attribute[0].(string)] != attribute[1] {
					t.Errorf("%s: %v, want %v", message, records, attribute)
				}
			}
		})
	}
}

// An end that no run says itself, because another has brought it about, is told all the same, and once.
func TestTheLogTellsAnEndThatCameFromOutside(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		result string
		end    func(t *testing.T, p *process, id string)
	}{
		"a cancel": {"cancelled", func(t *testing.T, p *process, id string) {
			if _, err := p.Cancel(t.Context(), id, "ana", "not wanted"); err != nil {
				t.Fatal(err)
			}
		}},
		"a sweep": {"failure", func(t *testing.T, p *process, id string) {
			expire(t, p.pool, id)
			if err := p.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}},
		"a lock that settles the last": {"failure", func(t *testing.T, p *process, id string) {
			expire(t, p.pool, id)
			if _, err := p.LockRun(t.Context(), id, "second", time.Minute); !errors.Is(err, executions.ErrEnded) {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &lines{}
			p := prepare(t, pgtest.DB(t), nil, l.into)
			id, others := p.external(t), p.external(t)
			p.lock(t, id, "first")
			exec(t, p.pool, `
				insert into agent_events (id, event, key) values (lanekeeper.agent_uuid7_floor(now() + interval '1 minute'), 'AGENT_COMPLETED', @id)`,
				postgres.Strict{"id": others}) // at the same time, by somebody else, who says it
			exec(t, p.pool, `select acquire_agent_lock('thread:x', @owner)`, postgres.Strict{"owner": id + "#1"})
			c.end(t, p, id)
			if _, err := p.Cancel(t.Context(), id, "ana", "again"); err != nil {
				t.Fatal(err)
			}
			for message, attribute := range map[string][2]any{
				"execution completed": {"result_type", c.result},
				"event emitted":       {"key", id},
				"locks released":      {"count", 1.0},
				"lane released":       {"lane", "thread:x"},
			} {
				records := l.said(t, message)
				if len(records) != 1 || records[0]["execution_id"] != id || records[0][attribute[0].(string)] != attribute[1] {
					t.Errorf("%s: %v, want %v", message, records, attribute)
				}
			}
		})
	}
}
