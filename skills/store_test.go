package skills_test

import (
	"slices"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestPutRevision(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := skills.Definition{
		Name: "sizes", Description: "table sizes", Handler: "sql:select @n",
		Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}}),
	}
	steps := []struct {
		what     string
		change   func()
		changed  bool
		revision int
	}{
		{"new", func() {}, true, 1},
		{"repeated", func() {}, false, 1},
		{"explicit defaults", func() { d.Scope, d.Trust, d.Timeout = "internal", "auto", "30s" }, false, 1},
		{"other trust", func() { d.Trust = "approve" }, true, 2},
		{"other query", func() { d.Handler = "sql:select @n + 1" }, true, 3},
		{"unchanged", func() {}, false, 3},
	}
	for _, step := range steps {
		step.change()
		changed, err := skills.Put(t.Context(), pool, d, skills.SourceWorkspace)
		require.Truef(t, err == nil && changed == step.changed,
			"%s: changed %v, %v; want %v", step.what, changed, err, step.changed)
		s, _ := skills.Get(t.Context(), pool, "sizes")
		assert.Equal(t, step.revision, s.Revision, step.what, "revision")
	}
}

// A read can be made again, also if its declaration does not say so.
func TestReadIsIdempotent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for handler, want := range map[string]bool{
		"sql:select 1": true, "http:GET https://h": true, "http:head https://h": true, "http:POST https://h": false,
		"http:DELETE https://h": false, "builtin:a": false,
	} {
		s := put(t, pool, skills.Definition{Name: "a", Handler: handler})
		assert.Equal(t, want, s.Idempotent, handler)
	}
}

func TestPutRejectsInvalidDefinition(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := skills.Put(t.Context(), pool, skills.Definition{Name: "a", Handler: "mcp:x"}, skills.SourceWorkspace)
	assert.Error(t, err, "accepted")
	_, err = skills.Get(t.Context(), pool, "a")
	assert.ErrorIs(t, err, skills.ErrNotFound, "want ErrNotFound")
}

func TestPutKeepsServiceState(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := skills.Definition{Name: "a", Handler: "builtin:a"}
	put(t, pool, d)
	ok, err := skills.Disable(t.Context(), pool, "a", "self_heal", "3 failures",
		map[string]any{"calls": []string{"x\x00y"}})
	require.True(t, ok && err == nil, ok, err)
	d.Description = "changed"
	s := put(t, pool, d)
	assert.Truef(t, !s.Enabled && s.DisabledBy == "self_heal" && s.DisabledReason == "3 failures" && s.DisabledAt != nil &&
		len(s.Evidence) >= 5 && s.Revision == 2, "got %+v", s)
}

func TestBuiltinKeepsWorkspaceSkill(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, skills.Definition{Name: "a", Handler: "builtin:a", Trust: "approve"})
	changed, err := skills.Put(t.Context(), pool, skills.Definition{Name: "a", Handler: "builtin:a"}, skills.SourceBuiltin)
	require.True(t, !changed && err == nil, changed, err)
	s, _ := skills.Get(t.Context(), pool, "a")
	assert.Truef(t, s.Trust == "approve" && s.Source == skills.SourceWorkspace, "the builtin replaced it: %+v", s)
}

func TestRemove(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, name := range []string{"a", "b", "c"} {
		put(t, pool, skills.Definition{Name: name, Handler: "builtin:x"})
	}
	_, err := skills.Put(t.Context(), pool, skills.Definition{Name: "d", Handler: "builtin:x"}, skills.SourceBuiltin)
	require.NoError(t, err)
	removed, err := skills.Remove(t.Context(), pool, []string{"b"})
	assert.Truef(t, err == nil && slices.Equal(removed, []string{"a", "c"}), "removed %v, %v", removed, err)
	removed, err = skills.Remove(t.Context(), pool, nil)
	assert.Truef(t, err == nil && slices.Equal(removed, []string{"b"}), "removed %v, %v", removed, err)
}

func TestConcurrentDisable(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	before := put(t, pool, skills.Definition{Name: "a", Handler: "builtin:x"})
	ok, err := skills.Enable(t.Context(), pool, "a", "admin", "")
	assert.Truef(t, !ok && err == nil, "enable an enabled one: %v, %v", ok, err)
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
	assert.Equal(t, 1, n)
	ok, err = skills.Enable(t.Context(), pool, "a", "admin", "fixed")
	require.True(t, ok && err == nil, ok, err)
	after, _ := skills.Get(t.Context(), pool, "a")
	assert.Truef(t, after.Enabled && after.EnabledAt.After(before.EnabledAt) && after.DisabledBy == "" &&
		after.DisabledAt == nil && after.TrialAt == nil, "got %+v", after)
	_, err = skills.Enable(t.Context(), pool, "nobody", "admin", "")
	assert.ErrorIs(t, err, skills.ErrNotFound, "want ErrNotFound")
	_, err = skills.Disable(t.Context(), pool, "a", " ", "", nil)
	assert.Error(t, err, "disabled by nobody")
}

func TestFailTrial(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, skills.Definition{Name: "a", Handler: "builtin:x"})
	fail := func(want bool) {
		t.Helper()
		ok, err := skills.FailTrial(t.Context(), pool, "a", "again")
		require.Truef(t, ok == want && err == nil, "fail trial: %v, %v; want %v", ok, err, want)
	}
	fail(false)
	_, err := skills.Disable(t.Context(), pool, "a", "self_heal", "r", nil)
	require.NoError(t, err)
	fail(false)
	offer := func() {
		t.Helper()
		pgtest.Exec(t, pool, `
			update agent_skills set trial_at = clock_timestamp(), disabled_at = disabled_at - interval '1 day' where name = 'a'`)
	}
	offer()
	before, _ := skills.Get(t.Context(), pool, "a")
	fail(true)
	s, _ := skills.Get(t.Context(), pool, "a")
	assert.Truef(t, s.TrialAt == nil && !s.Enabled && s.DisabledReason == "again" &&
		s.DisabledAt.After(*before.DisabledAt), "got %+v", s)
	offer()
	_, err = skills.Enable(t.Context(), pool, "a", "self_heal", "trial succeeded")
	require.NoError(t, err)
	s, _ = skills.Get(t.Context(), pool, "a")
	assert.Truef(t, s.TrialAt == nil && s.Enabled, "got %+v", s)
}

func TestListAndAvailable(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	r := registry(t, skills.Options{Builtins: map[string]skills.Builtin{"x": returnNil}, Pool: pool})
	for name, d := range map[string]skills.Definition{
		"in": {Handler: "builtin:x"}, "out": {Handler: "builtin:x", Scope: "external"},
		"both": {Handler: "builtin:x", Scope: "both"},
		"gone": {Handler: "builtin:gone", Scope: "both"}, "off": {Handler: "builtin:x", Scope: "both"},
	} {
		d.Name = name
		put(t, pool, d)
	}
	_, err := skills.Disable(t.Context(), pool, "off", "admin", "", nil)
	require.NoError(t, err)
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
	require.True(t, err == nil && len(first) == 3, len(first), err)
	rest, err := skills.List(t.Context(), pool, skills.Filter{Before: first[2].ID})
	assert.NoError(t, err)
	assert.Equal(t, 2, len(rest))
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
