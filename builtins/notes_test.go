package builtins_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// noter is a run that notes how an objective stands.
type noter struct {
	t        *testing.T
	registry *skills.Registry
	skills   map[string]skills.Skill
	seen     memory.Seen
}

func newNoter(t *testing.T, pool *pgxpool.Pool) *noter {
	t.Helper()
	registry, all := newRegistry(t, pool)
	for _, name := range []string{"objectives_list", "objective_update"} {
		s, err := skills.Get(t.Context(), pool, name)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = s
	}
	return &noter{t, registry, all, memory.Seen{}}
}

// call makes a call as the runtime does, with what the run has read, and has it read the answer.
func (n *noter) call(name string, args map[string]any) map[string]any {
	n.t.Helper()
	raw, err := json.Marshal(args)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx := trace.With(n.t.Context(), trace.Span{TraceID: traceID, Agent: "agent", Surface: trace.Heartbeat})
	answer, err := n.registry.Invoke(ctx, skills.Call{Skill: n.skills[name], Args: builtins.Guarded(n.skills[name], raw, n.seen)})
	if err != nil {
		n.t.Fatal(err)
	}
	n.seen.Add(builtins.Sights(n.skills[name], answer, len(answer))...)
	n.seen.Add(builtins.Wrote(n.skills[name], answer)...)
	var said map[string]any
	if err := json.Unmarshal(answer, &said); err != nil {
		n.t.Fatal(err)
	}
	return said
}

func (n *noter) note(words string, steps ...string) map[string]any {
	n.t.Helper()
	return n.call("objective_update", map[string]any{"objective": "tidy", "note": words, "add_steps": append([]string{}, steps...)})
}

// tidy is an objective.
func tidy(t *testing.T, pool *pgxpool.Pool) objectives.Objective {
	t.Helper()
	if _, err := objectives.Put(t.Context(), pool, objectives.Definition{Name: "tidy", Goal: "Be tidy."}, objectives.SourceAdmin); err != nil {
		t.Fatal(err)
	}
	o, err := objectives.Get(t.Context(), pool, "tidy")
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestANoteReplacesOnlyTheOneThatItsRunHasRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := tidy(t, pool)
	one, two := newNoter(t, pool), newNoter(t, pool)
	stands := func(want string) {
		t.Helper()
		o, err := objectives.Get(t.Context(), pool, o.ID)
		if err != nil || o.Note != want {
			t.Errorf("the note is %q, want %q, %v", o.Note, want, err)
		}
	}
	refused := func(said map[string]any, theirs string) {
		t.Helper()
		if there, _ := said["theirs"].(map[string]any); said["error"] != "conflict" || there["note"] != theirs || said["yours"] == nil {
			t.Errorf("the answer is %v", said)
		}
	}
	one.note("one") // there was none
	one.note("one, again")
	refused(two.note("two", "sweep"), "one, again")
	stands("one, again")
	if steps, err := objectives.Steps(t.Context(), pool, o.ID); err != nil || len(steps) != 0 {
		t.Errorf("a refused call has planned %v, %v", steps, err)
	}
	two.note("one, again, and two", "sweep")
	refused(one.note("one only"), "one, again, and two")
	stands("one, again, and two")
	if said := newNoter(t, pool).note("one, again, and two"); said["error"] != nil {
		t.Errorf("what is made again after a crash does not find its own note: %v", said)
	}
	late := newNoter(t, pool)
	late.call("objectives_list", map[string]any{})
	if _, err := objectives.Put(t.Context(), pool, objectives.Definition{Name: "tidy", Goal: "Be clean."}, objectives.SourceAdmin); err != nil {
		t.Fatal(err)
	}
	refused(late.note("tidy enough"), "one, again, and two")
	late.call("objective_update", map[string]any{"objective": o.ID, "note": "not clean yet"}) // by its id
	stands("not clean yet")
	for _, revision := range []int{0, 1, -1} { // nobody keeps what was read
		answer, err := late.registry.Invoke(trace.With(t.Context(), trace.Span{TraceID: traceID}), skills.Call{
			Skill: late.skills["objective_update"], Args: fmt.Appendf(nil, `{"objective":"tidy","note":"replaced","revision":%d}`, revision),
		})
		if _, conflict := builtins.IsConflict(late.skills["objective_update"], answer); err != nil || conflict != (revision >= 0) {
			t.Errorf("at %d: %s, %v", revision, answer, err)
		}
	}
	stands("replaced")
}

func TestANoteThatWasCutWasNotRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tidy(t, pool)
	if _, err := objectives.SetNote(t.Context(), pool, "tidy", strings.Repeat("long ", 200), "op_1", 0); err != nil {
		t.Fatal(err)
	}
	n := newNoter(t, pool)
	n.call("objectives_list", map[string]any{})
	if said := n.note("short"); said["error"] != "conflict" {
		t.Errorf("a partly shown note was replaced: %v", said)
	}
	n = newNoter(t, pool)
	n.call("objectives_list", map[string]any{"objective": "tidy"})
	if said := n.note("short"); said["error"] != nil || said["note"] != "short" {
		t.Errorf("a note that was shown whole was not replaced: %v", said)
	}
}

// Runs note at the same moment; each adds a word to what it has read.
func TestEveryNoteThatWasAcknowledgedIsInTheEnd(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tidy(t, pool)
	const writers, words = 6, 6
	var group sync.WaitGroup
	for w := range writers {
		n := newNoter(t, pool)
		group.Go(func() {
			for word := range words {
				n.seen = memory.Seen{} // another run
				text := ""
				for {
					said := n.note(strings.TrimSpace(fmt.Sprintf("%s w%dx%d", text, w, word)))
					theirs, conflict := said["theirs"].(map[string]any)
					if !conflict {
						break
					}
					text, _ = theirs["note"].(string)
				}
			}
		})
	}
	group.Wait()
	o, err := objectives.Get(t.Context(), pool, "tidy")
	if got := len(strings.Fields(o.Note)); err != nil || got != writers*words {
		t.Errorf("%d of %d words are there, %v: %s", got, writers*words, err, o.Note)
	}
}
