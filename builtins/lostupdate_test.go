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

// version is a value of a key at a time. The model identifies versions by identity, not by revision.
type version struct {
	token string
}

// scene is one key with its model.
type scene struct {
	t        *testing.T
	pool     *pgxpool.Pool
	registry *skills.Registry
	skills   map[string]skills.Skill
	dice     *rand.Rand
	key      string
	order    uint64
	there    *version // nil: nothing
	tokens   int
	story    []string
	failed   bool
}

func (s *scene) fail(format string, args ...any) {
	if !s.failed {
		s.failed = true
		s.t.Errorf("%s; order %d went: %s", fmt.Sprintf(format, args...), s.order, strings.Join(s.story, ", "))
	}
}

func (s *scene) tell(format string, args ...any) {
	s.story = append(s.story, fmt.Sprintf(format, args...))
}

func (s *scene) token(who string) *version {
	s.tokens++
	return &version{fmt.Sprintf("%s-%d", who, s.tokens)}
}

func tokenOf(value json.RawMessage) string { return strings.Trim(string(value), `"`) }

// shows checks that an entry is the version.
func (s *scene) shows(what string, e *memory.Entry, want *version) {
	switch {
	case e == nil && want != nil:
		s.fail("%s: nothing is there, not %s", what, want.token)
	case e != nil && want == nil:
		s.fail("%s: %s is there, not nothing", what, e.Value)
	case e != nil && tokenOf(e.Value) != want.token:
		s.fail("%s: %s is there, not %s", what, e.Value, want.token)
	}
}

// done is a recorded step of a run.
type done struct {
	skill  string
	answer json.RawMessage
}

// runner is a durable run. Its read entries come from its record, which survives a crash.
type runner struct {
	name   string
	record []done
	seen   memory.Seen // in the runtime's form
	read   *version    // in the model's form
	again  *redo       // a call whose process died before its answer was recorded
}

// redo is a repeated call, with the version that it wrote.
type redo struct {
	skill string
	wrote *version
	did   bool
}

// replay rebuilds the run in another process.
func (r *runner) replay(s *scene) {
	r.seen = memory.Seen{}
	for _, d := range r.record {
		r.learn(s, d)
	}
}

func (r *runner) learn(s *scene, d done) {
	skill := s.skills[d.skill]
	r.seen.Add(builtins.Sights(skill, d.answer, len(d.answer))...)
	r.seen.Add(builtins.SightsWritten(skill, d.answer)...)
}

// step makes one call of a run, and compares the result with the model. It may lose the process before or after the
// answer is recorded.
func (r *runner) step(s *scene) {
	call := r.again
	if call == nil {
		call = &redo{
			skill: []string{"recall", "memory_write", "memory_write", "memory_forget"}[s.dice.IntN(4)],
			wrote: s.token(r.name),
		}
	}
	r.again = nil
	args := map[string]any{"category": "test", "key": s.key}
	switch call.skill {
	case "recall":
		args = map[string]any{"category": "test", "query": s.key}
	case "memory_write":
		args["value"] = call.wrote.token
		if s.dice.IntN(3) == 0 {
			args["revision"] = s.dice.IntN(6) // the model's argument does not matter
		}
	}
	answer := s.call(r, call.skill, args)
	lost := s.dice.IntN(5) == 0
	s.tell("%s %s%s", r.name, call.skill, map[bool]string{true: " and is lost", false: ""}[lost])
	read := r.judge(s, call, answer)
	if lost {
		r.again = call
		r.replay(s)
		return
	}
	r.read = read
	r.record = append(r.record, done{call.skill, answer})
	r.learn(s, r.record[len(r.record)-1])
	if s.dice.IntN(5) == 0 {
		s.tell("%s goes on elsewhere", r.name)
		r.replay(s)
	}
}

// call makes the call like the runtime.
func (s *scene) call(r *runner, name string, args map[string]any) json.RawMessage {
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

// judge compares an answer with the model, updates the model, and returns the version that the run has read with it.
func (r *runner) judge(s *scene, call *redo, answer json.RawMessage) *version {
	var refusal struct {
		Error     string
		Theirs    *memory.Entry
		Yours     json.RawMessage
		Memories  []memory.Entry
		Forgotten *bool
	}
	require.NoError(s.t, json.Unmarshal(answer, &refusal))
	switch {
	case call.skill == "recall":
		if len(refusal.Memories) == 0 {
			s.shows("recall", nil, s.there)
			return r.read // an answer without the key shows no version
		}
		s.shows("recall", &refusal.Memories[0], s.there)
		return s.there
	case refusal.Error != "":
		if s.there == r.read {
			s.fail("%s is refused though nobody wrote", call.skill)
		}
		s.shows("conflict", refusal.Theirs, s.there)
		if call.skill == "memory_write" && tokenOf(refusal.Yours) != call.wrote.token {
			s.fail("the conflict shows %s as what was to be written", refusal.Yours)
		}
		if s.there == nil {
			return r.read
		}
		return s.there
	case call.did && s.there == call.wrote: // it finds its own write
		return s.there
	case s.there != r.read && (call.skill == "memory_write" || s.there != nil):
		s.fail("%s of %s overwrote what %s had not read", call.skill, r.name, r.name)
		return s.there
	case call.skill == "memory_forget":
		s.there = nil
		return nil
	}
	if call.did { // its write is gone, and it writes again
		call.wrote = &version{call.wrote.token}
	}
	s.there, call.did = call.wrote, true
	return s.there
}

// person is an admin with an open page. The page shows the version from its loading.
type person struct {
	name string
	open bool
	page *memory.Entry
	read *version
}

func (p *person) look(s *scene) {
	p.open, p.page, p.read = true, nil, s.there
	e, err := memory.Shared.Get(s.t.Context(), s.pool, "test", s.key)
	switch {
	case err == nil:
		p.page = &e
	case !errors.Is(err, memory.ErrNotFound):
		s.t.Fatal(err)
	}
	s.shows("page", p.page, s.there)
	s.tell("%s looks", p.name)
}

func (p *person) revision() int {
	if p.page == nil {
		return memory.Absent
	}
	return p.page.Revision
}

// act writes or deletes, based on the page.
func (p *person) act(s *scene) {
	fresh, next := p.read == s.there, s.token(p.name)
	var err error
	if forget := s.dice.IntN(4) == 0; forget {
		next = nil
		_, err = memory.Shared.Forget(s.t.Context(), s.pool, "test", s.key, p.revision())
		fresh = fresh || s.there == nil
	} else {
		note := memory.Note{Category: "test", Key: s.key, Value: next.token, Revision: p.revision(), TraceID: "op_" + p.name}
		_, err = memory.Save(s.t.Context(), s.pool, note)
	}
	conflict, refused := errors.AsType[*memory.ConflictError](err)
	s.tell("%s acts (conflict: %v)", p.name, refused)
	switch {
	case err != nil && !refused:
		s.t.Fatal(err)
	case refused == fresh:
		s.fail("%s acted on what is there (%v) and was refused (%v)", p.name, fresh, refused)
	case refused:
		s.shows("refusal", conflict.Theirs, s.there)
	default:
		s.there = next
	}
	p.open = false
}

// expire ends the entry's time. A sweep may remove it.
func (s *scene) expire() {
	s.tell("it expires")
	pgtest.Exec(s.t, s.pool, `
		update agent_memory set expires_at = clock_timestamp() - interval '1 second' where category = 'test'
		  and key = $1`, s.key)
	if s.dice.IntN(2) == 0 {
		s.tell("it is swept")
		_, err := memory.Expire(s.t.Context(), s.pool)
		require.NoError(s.t, err)
	}
	s.there = nil
}

// play runs one interleaving of two runs and two admins.
func (s *scene) play() {
	runs := []*runner{{name: "one" + s.key, seen: memory.Seen{}}, {name: "two" + s.key, seen: memory.Seen{}}}
	admins := []*person{{name: "ana"}, {name: "bea"}}
	for range 6 + s.dice.IntN(10) {
		r, p := runs[s.dice.IntN(2)], admins[s.dice.IntN(2)]
		switch n := s.dice.IntN(20); {
		case n < 11:
			r.step(s)
		case n < 18 && p.open:
			p.act(s)
		case n < 18:
			p.look(s)
		default:
			s.expire()
		}
		if s.failed {
			return
		}
	}
	(&person{name: "end"}).look(s)
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
		s := &scene{
			t: t, pool: pool, registry: registry, skills: all, order: n, dice: rand.New(rand.NewPCG(n, 24)),
			key: fmt.Sprintf("k%d", n),
		}
		if s.play(); s.failed {
			return
		}
	}
}
