package builtins_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// interleavings is the number of random orders.
const interleavings = 300

// version is one written value. The model compares versions by pointer, not by revision.
type version struct {
	token string
}

// trial is one key with its model.
type trial struct {
	t        *testing.T
	pool     *pgxpool.Pool
	registry *skills.Registry
	skills   map[string]skills.Skill
	rng      *rand.Rand
	key      string
	order    uint64
	current  *version // nil if the key has no entry
	tokens   int
	trace    []string
	failed   bool
}

func (s *trial) fail(format string, args ...any) {
	if !s.failed {
		s.failed = true
		s.t.Errorf("%s; interleaving %d: %s", fmt.Sprintf(format, args...), s.order, strings.Join(s.trace, ", "))
	}
}

func (s *trial) log(format string, args ...any) {
	s.trace = append(s.trace, fmt.Sprintf(format, args...))
}

func (s *trial) token(who string) *version {
	s.tokens++
	return &version{fmt.Sprintf("%s-%d", who, s.tokens)}
}

func tokenOf(value json.RawMessage) string { return strings.Trim(string(value), `"`) }

// expectVersion checks that an entry is the version.
func (s *trial) expectVersion(what string, e *memory.Entry, want *version) {
	switch {
	case e == nil && want != nil:
		s.fail("%s: no entry, want %s", what, want.token)
	case e != nil && want == nil:
		s.fail("%s: entry %s, want none", what, e.Value)
	case e != nil && tokenOf(e.Value) != want.token:
		s.fail("%s: entry %s, want %s", what, e.Value, want.token)
	}
}

// recordedStep is a call of a run with its recorded answer.
type recordedStep struct {
	skill  string
	answer json.RawMessage
}

// runner is a durable run. A crash keeps its record, from which it rebuilds what it has read.
type runner struct {
	name   string
	record []recordedStep
	seen   memory.Seen  // the revisions that it has read, as the runtime keeps them
	read   *version     // the version that it has read, in the model
	retry  *retriedCall // a call whose process died before its answer was recorded
}

// retriedCall is a call that may be retried, with the version that it writes.
type retriedCall struct {
	skill   string
	wrote   *version
	applied bool
}

// replay rebuilds the run in another process.
func (r *runner) replay(s *trial) {
	r.seen = memory.Seen{}
	for _, d := range r.record {
		r.learn(s, d)
	}
}

func (r *runner) learn(s *trial, d recordedStep) {
	skill := s.skills[d.skill]
	r.seen.Add(builtins.Sights(skill, d.answer, len(d.answer))...)
	r.seen.Add(builtins.SightsWritten(skill, d.answer)...)
}

// step makes one call of a run, and compares the result with the model. It may lose the process before or after the
// answer is recorded.
func (r *runner) step(s *trial) {
	call := r.retry
	if call == nil {
		call = &retriedCall{
			skill: []string{"recall", "memory_write", "memory_write", "memory_forget"}[s.rng.IntN(4)],
			wrote: s.token(r.name),
		}
	}
	r.retry = nil
	args := map[string]any{"category": "test", "key": s.key}
	switch call.skill {
	case "recall":
		args = map[string]any{"category": "test", "query": s.key}
	case "memory_write":
		args["value"] = call.wrote.token
		if s.rng.IntN(3) == 0 {
			args["revision"] = s.rng.IntN(6) // the model's argument does not matter
		}
	}
	answer := s.call(r, call.skill, args)
	lost := s.rng.IntN(5) == 0
	s.log("%s %s (answer lost: %v)", r.name, call.skill, lost)
	read := r.checkAnswer(s, call, answer)
	if lost {
		r.retry = call
		r.replay(s)
		return
	}
	r.read = read
	r.record = append(r.record, recordedStep{call.skill, answer})
	r.learn(s, r.record[len(r.record)-1])
	if s.rng.IntN(5) == 0 {
		s.log("%s moves to another process", r.name)
		r.replay(s)
	}
}

// call makes the call like the runtime.
func (s *trial) call(r *runner, name string, args map[string]any) json.RawMessage {
	raw, err := json.Marshal(args)
	require.NoError(s.t, err)
	skill := s.skills[name]
	ctx := trace.With(s.t.Context(), trace.Span{
		TraceID: trace.ID("hb_" + r.name), Agent: "agent",
		Surface: trace.Heartbeat,
	})
	answer, err := s.registry.Invoke(ctx, skills.Call{Skill: skill, Args: builtins.WithRevisions(skill, raw, r.seen)})
	require.NoError(s.t, err, name)
	return answer
}

// checkAnswer compares an answer with the model and updates the model. It returns the version that the run has then
// read.
func (r *runner) checkAnswer(s *trial, call *retriedCall, answer json.RawMessage) *version {
	var result struct {
		Error     string
		Theirs    *memory.Entry
		Yours     json.RawMessage
		Memories  []memory.Entry
		Forgotten *bool
	}
	require.NoError(s.t, json.Unmarshal(answer, &result))
	switch {
	case call.skill == "recall":
		if len(result.Memories) == 0 {
			s.expectVersion("recall", nil, s.current)
			return r.read // an answer without the key shows no version
		}
		s.expectVersion("recall", &result.Memories[0], s.current)
		return s.current
	case result.Error != "":
		if s.current == r.read {
			s.fail("%s: rejected without a concurrent write", call.skill)
		}
		s.expectVersion("conflict", result.Theirs, s.current)
		if call.skill == "memory_write" && tokenOf(result.Yours) != call.wrote.token {
			s.fail("the conflict shows %s as the rejected value", result.Yours)
		}
		return s.current
	case call.applied && s.current == call.wrote: // it finds its own write
		return s.current
	case s.current != r.read && (call.skill == "memory_write" || s.current != nil):
		s.fail("%s of %s overwrote a version that %s had not read", call.skill, r.name, r.name)
		return s.current
	case call.skill == "memory_forget":
		s.current = nil
		return nil
	}
	if call.applied { // its first write was overwritten, so it writes again
		call.wrote = &version{call.wrote.token}
	}
	s.current, call.applied = call.wrote, true
	return s.current
}

// person is an admin with an open page. The page shows the version from its loading.
type person struct {
	name string
	open bool
	page *memory.Entry
	read *version
}

func (p *person) loadPage(s *trial) {
	p.open, p.page, p.read = true, nil, s.current
	e, err := memory.Shared.Get(s.t.Context(), s.pool, "test", s.key)
	switch {
	case err == nil:
		p.page = &e
	case !errors.Is(err, memory.ErrNotFound):
		s.t.Fatal(err)
	}
	s.expectVersion("page", p.page, s.current)
	s.log("%s loads the page", p.name)
}

func (p *person) revision() int {
	if p.page == nil {
		return memory.Absent
	}
	return p.page.Revision
}

// act writes or deletes, based on the page.
func (p *person) act(s *trial) {
	fresh, next := p.read == s.current, s.token(p.name)
	var err error
	if forget := s.rng.IntN(4) == 0; forget {
		next = nil
		_, err = memory.Shared.Forget(s.t.Context(), s.pool, "test", s.key, p.revision())
		fresh = fresh || s.current == nil
	} else {
		note := memory.Note{Category: "test", Key: s.key, Value: next.token, Revision: p.revision(), TraceID: "op_" + p.name}
		_, err = memory.Save(s.t.Context(), s.pool, note)
	}
	conflict, rejected := errors.AsType[*memory.ConflictError](err)
	s.log("%s writes or deletes (conflict: %v)", p.name, rejected)
	switch {
	case err != nil && !rejected:
		s.t.Fatal(err)
	case rejected == fresh:
		s.fail("%s: fresh=%v conflict=%v", p.name, fresh, rejected)
	case rejected:
		s.expectVersion("rejection", conflict.Theirs, s.current)
	default:
		s.current = next
	}
	p.open = false
}

// expire sets expires_at in the past. A sweep may remove the entry.
func (s *trial) expire() {
	s.log("the entry expires")
	pgtest.Exec(s.t, s.pool, `
		update agent_memory set expires_at = clock_timestamp() - interval '1 second' where category = 'test'
		  and key = $1`, s.key)
	if s.rng.IntN(2) == 0 {
		s.log("the sweep removes it")
		_, err := memory.Expire(s.t.Context(), s.pool)
		require.NoError(s.t, err)
	}
	s.current = nil
}

// play runs one interleaving of two runs and two admins.
func (s *trial) play() {
	runs := []*runner{{name: "one" + s.key, seen: memory.Seen{}}, {name: "two" + s.key, seen: memory.Seen{}}}
	admins := []*person{{name: "ana"}, {name: "bea"}}
	for range 6 + s.rng.IntN(10) {
		r, p := runs[s.rng.IntN(2)], admins[s.rng.IntN(2)]
		switch n := s.rng.IntN(20); {
		case n < 11:
			r.step(s)
		case n < 18 && p.open:
			p.act(s)
		case n < 18:
			p.loadPage(s)
		default:
			s.expire()
		}
		if s.failed {
			return
		}
	}
	(&person{name: "end"}).loadPage(s)
}

func newRegistry(t *testing.T, pool *pgxpool.Pool) (*skills.Registry, map[string]skills.Skill) {
	t.Helper()
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil)})
	require.NoError(t, err)
	all := map[string]skills.Skill{}
	for _, name := range []string{"recall", "memory_write", "memory_forget"} {
		all[name], err = skills.Get(t.Context(), pool, name)
		require.NoError(t, err)
	}
	return registry, all
}

// TestNoUpdateIsLostInAnyOrder plays two runs with process losses and two admins in random orders, against a model.
// Nobody overwrites an unread version, no rejection is needless, and every rejection shows the current version.
func TestNoUpdateIsLostInAnyOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	registry, all := newRegistry(t, pool)
	for n := range uint64(interleavings) {
		s := &trial{
			t: t, pool: pool, registry: registry, skills: all, order: n, rng: rand.New(rand.NewPCG(n, 24)),
			key: fmt.Sprintf("k%d", n),
		}
		if s.play(); s.failed {
			return
		}
	}
}
