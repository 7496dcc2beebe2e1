package skills_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestPutGrowsTheRevisionOnlyOnAChange(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := skills.Definition{Name: "sizes", Description: "table sizes", Handler: "sql:select @n", Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}})}
	steps := []struct {
		what     string
		change   func()
		changed  bool
		revision int
	}{
		{"new", func() {}, true, 1},
		{"same", func() {}, false, 1},
		{"defaults spelt out", func() { d.Scope, d.Trust, d.Timeout = "internal", "auto", "30s" }, false, 1},
		{"other trust", func() { d.Trust = "approve" }, true, 2},
		{"other query", func() { d.Handler = "sql:select @n + 1" }, true, 3},
		{"same again", func() {}, false, 3},
	}
	for _, step := range steps {
		step.change()
		changed, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
		if err != nil || changed != step.changed {
			t.Fatalf("%s: changed %v, %v; want %v", step.what, changed, err, step.changed)
		}
		if s, _ := skills.Get(t.Context(), pool, "sizes"); s.Revision != step.revision {
			t.Errorf("%s: revision %d, want %d", step.what, s.Revision, step.revision)
		}
	}
}

func TestPutStoresNothingOfABadDefinition(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := skills.Put(t.Context(), pool, skills.Definition{Name: "a", Handler: "mcp:x"}, skills.SourceWorkspace); err == nil {
		t.Error("accepted")
	}
	if _, err := skills.Get(t.Context(), pool, "a"); !errors.Is(err, skills.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func TestPutLeavesServiceStateAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := skills.Definition{Name: "a", Handler: "builtin:a"}
	put(t, pool, d)
	if ok, err := skills.Disable(t.Context(), pool, "a", "self_heal", "3 failures", map[string]any{"calls": []string{"x\x00y"}}); !ok || err != nil {
		t.Fatal(ok, err)
	}
	d.Description = "changed"
	s := put(t, pool, d)
	if s.Enabled || s.DisabledBy != "self_heal" || s.DisabledReason != "3 failures" || s.DisabledAt == nil || len(s.Evidence) < 5 || s.Revision != 2 {
		t.Errorf("got %+v", s)
	}
}

func TestABuiltinNeverReplacesAWorkspaceSkill(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, skills.Definition{Name: "a", Handler: "builtin:a", Trust: "approve"})
	changed, err := skills.Put(t.Context(), pool, skills.Definition{Name: "a", Handler: "builtin:a"}, skills.SourceBuiltin)
	if changed || err != nil {
		t.Fatal(changed, err)
	}
	if s, _ := skills.Get(t.Context(), pool, "a"); s.Trust != "approve" || s.Source != skills.SourceWorkspace {
		t.Errorf("the binary took over: %+v", s)
	}
}

func TestRemoveKeepsWhatIsNamedAndOtherSources(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"a", "b", "c"} {
		put(t, pool, skills.Definition{Name: name, Handler: "builtin:x"})
	}
	if _, err := skills.Put(t.Context(), pool, skills.Definition{Name: "d", Handler: "builtin:x"}, skills.SourceBuiltin); err != nil {
		t.Fatal(err)
	}
	removed, err := skills.Remove(t.Context(), pool, skills.SourceWorkspace, []string{"b"})
	if err != nil || !slices.Equal(removed, []string{"a", "c"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	removed, err = skills.Remove(t.Context(), pool, skills.SourceWorkspace, nil)
	if err != nil || !slices.Equal(removed, []string{"b"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
}

func TestEnableAndDisableAreComparedAndSet(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	before := put(t, pool, skills.Definition{Name: "a", Handler: "builtin:x"})
	if ok, err := skills.Enable(t.Context(), pool, "a", "admin", ""); ok || err != nil {
		t.Errorf("enable an enabled one: %v, %v", ok, err)
	}
	var wins sync.Map
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if ok, _ := skills.Disable(t.Context(), pool, "a", "admin", "r", nil); ok {
				wins.Store(i, true)
			}
		})
	}
	wg.Wait()
	n := 0
	wins.Range(func(any, any) bool { n++; return true })
	if n != 1 {
		t.Errorf("%d callers disabled it, want 1", n)
	}
	if ok, err := skills.Enable(t.Context(), pool, "a", "admin", "fixed"); !ok || err != nil {
		t.Fatal(ok, err)
	}
	after, _ := skills.Get(t.Context(), pool, "a")
	if !after.Enabled || !after.EnabledAt.After(before.EnabledAt) || after.DisabledBy != "" || after.DisabledAt != nil || after.TrialAt != nil {
		t.Errorf("got %+v", after)
	}
	if _, err := skills.Enable(t.Context(), pool, "nobody", "admin", ""); !errors.Is(err, skills.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	if _, err := skills.Disable(t.Context(), pool, "a", " ", "", nil); err == nil {
		t.Error("disabled by nobody")
	}
}

func TestATrialEndsInTheCoolDownOrInService(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, skills.Definition{Name: "a", Handler: "builtin:x"})
	fail := func(want bool) {
		t.Helper()
		if ok, err := skills.FailTrial(t.Context(), pool, "a", "again"); ok != want || err != nil {
			t.Fatalf("fail trial: %v, %v; want %v", ok, err, want)
		}
	}
	fail(false)
	if _, err := skills.Disable(t.Context(), pool, "a", "self_heal", "r", nil); err != nil {
		t.Fatal(err)
	}
	fail(false)
	offer := func() {
		t.Helper()
		if _, err := pool.Exec(t.Context(), `
			update agent_skills set trial_at = clock_timestamp(), disabled_at = disabled_at - interval '1 day' where name = 'a'`); err != nil {
			t.Fatal(err)
		}
	}
	offer()
	before, _ := skills.Get(t.Context(), pool, "a")
	fail(true)
	if s, _ := skills.Get(t.Context(), pool, "a"); s.TrialAt != nil || s.Enabled || s.DisabledReason != "again" || !s.DisabledAt.After(*before.DisabledAt) {
		t.Errorf("got %+v", s)
	}
	offer()
	if _, err := skills.Enable(t.Context(), pool, "a", "self_heal", "trial succeeded"); err != nil {
		t.Fatal(err)
	}
	if s, _ := skills.Get(t.Context(), pool, "a"); s.TrialAt != nil || !s.Enabled {
		t.Errorf("got %+v", s)
	}
}

func TestListAndAvailable(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	r := registry(t, skills.Options{Builtins: map[string]skills.Builtin{"x": nothing}, Pool: pool})
	for name, d := range map[string]skills.Definition{
		"in": {Handler: "builtin:x"}, "out": {Handler: "builtin:x", Scope: "external"}, "both": {Handler: "builtin:x", Scope: "both"},
		"gone": {Handler: "builtin:gone", Scope: "both"}, "off": {Handler: "builtin:x", Scope: "both"},
	} {
		d.Name = name
		put(t, pool, d)
	}
	if _, err := skills.Disable(t.Context(), pool, "off", "admin", "", nil); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ scopes, want []string }{
		"visitors": {[]string{"external"}, []string{"both", "out"}},
		"inside":   {[]string{"internal"}, []string{"both", "in"}},
		"all":      {nil, []string{"both", "in", "out"}},
	} {
		available, err := r.Available(t.Context(), pool, test.scopes...)
		if err != nil || !slices.Equal(names(available), test.want) {
			t.Errorf("%s: got %v, %v; want %v", name, names(available), err, test.want)
		}
	}
	first, err := skills.List(t.Context(), pool, skills.Filter{Limit: 3})
	if err != nil || len(first) != 3 {
		t.Fatal(len(first), err)
	}
	rest, err := skills.List(t.Context(), pool, skills.Filter{Before: first[2].ID})
	if err != nil || len(rest) != 2 {
		t.Errorf("second page has %d, %v; want 2", len(rest), err)
	}
	off := false
	disabled, err := skills.List(t.Context(), pool, skills.Filter{Enabled: &off, DisabledBy: "admin"})
	if err != nil || !slices.Equal(names(disabled), []string{"off"}) {
		t.Errorf("disabled: %v, %v", names(disabled), err)
	}
}

func names(all []skills.Skill) []string {
	var list []string
	for _, s := range all {
		list = append(list, s.Name)
	}
	return list
}

func TestUndeclaredArgumentsAreRefusedUnlessTheSchemaSaysOtherwise(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	r := registry(t, skills.Options{})
	open := object(nil)
	open["additionalProperties"] = true
	for name, test := range map[string]struct {
		parameters map[string]any
		refused    bool
	}{"no_schema": {nil, true}, "closed": {object(map[string]any{"a": map[string]any{}}), true}, "open": {open, false}} {
		s := put(t, pool, skills.Definition{Name: name, Handler: "builtin:x", Parameters: test.parameters})
		err := r.Check(s, json.RawMessage(`{"b": 1}`))
		if invalid, ok := errors.AsType[*skills.InvalidParams](err); ok != test.refused || ok && !strings.Contains(invalid.Error(), "'b'") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
