package skills_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

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

func TestUndeclaredArguments(t *testing.T) {
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
		invalid, ok := errors.AsType[*skills.InvalidParams](err)
		assert.Truef(t, ok == test.refused && (!ok || strings.Contains(invalid.Error(), "'b'")), "%s: %v", name, err)
	}
}

type badDefinition struct {
	d    skills.Definition
	want []string
}

func TestValidateReportsEveryProblem(t *testing.T) {
	t.Parallel()
	expectProblems(t, map[string]badDefinition{
		"nothing at all": {skills.Definition{}, []string{"name: ", "handler: "}},
		"all at once": {
			skills.Definition{
				Name: "a b", Handler: "shell:rm", Scope: "world", Trust: "blind", Timeout: "soon",
				Parameters: map[string]any{"type": "string"},
			},
			[]string{"name: ", "handler: ", "scope: ", "trust: ", "timeout: ", "parameters.type: "},
		},
		"long name": {skills.Definition{Name: strings.Repeat("a", 65), Handler: "builtin:x"}, []string{"name: "}},
		"flow":      {skills.Definition{Name: "a", Handler: "flow:1x"}, []string{"handler: flow:1x must name a flow"}},
		"mcp": {
			skills.Definition{Name: "a", Handler: "mcp:x"},
			[]string{"handler: mcp:x must name a server", "config.pin: must be the hash"},
		},
		"builtin unnamed": {skills.Definition{Name: "a", Handler: "builtin:"}, []string{"handler: builtin:"}},
		"timeout zero":    {skills.Definition{Name: "a", Handler: "builtin:x", Timeout: "0s"}, []string{"timeout: "}},
		"timeout days":    {skills.Definition{Name: "a", Handler: "builtin:x", Timeout: "48h"}, []string{"timeout: "}},
		"schema type word": {
			skills.Definition{
				Name: "a", Handler: "builtin:x",
				Parameters: object(map[string]any{"p": map[string]any{"type": "objekt"}, "q": map[string]any{"minimum": "1"}}),
			},
			[]string{
				"parameters.properties.p.type: value", "parameters.properties.p.type: got",
				"parameters.properties.q.minimum: ",
			},
		},
		"schema remote": {
			skills.Definition{
				Name: "a", Handler: "builtin:x",
				Parameters: object(map[string]any{"p": map[string]any{"$ref": "https://example.com/s.json"}}),
			},
			[]string{"outside this schema"},
		},
		"schema file": {
			skills.Definition{
				Name: "a", Handler: "builtin:x",
				Parameters: object(map[string]any{"p": map[string]any{"$ref": "file:///etc/passwd"}}),
			},
			[]string{"outside this schema"},
		},
		"schema bad pattern": {
			skills.Definition{
				Name: "a", Handler: "builtin:x",
				Parameters: object(map[string]any{"p": map[string]any{"pattern": "("}}),
			},
			[]string{"parameters.properties.p.pattern: "},
		},
		"schema not JSON": {
			skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{"p": map[any]any{1: 2}})},
			[]string{"parameters: "},
		},
	})
}

func TestValidateReportsProblemsOfHandlers(t *testing.T) {
	t.Parallel()
	text := map[string]any{"type": "string"}
	expectProblems(t, map[string]badDefinition{
		"sql empty": {skills.Definition{Name: "a", Handler: "sql:"}, []string{"config.query: is empty"}},
		"sql twice": {
			skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"query": "select 2"}},
			[]string{"handler: the query"},
		},
		"sql odd field": {
			skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"limit": 2}},
			[]string{`config: unknown field "limit"`},
		},
		"sql wrong type": {
			skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"row_limit": "2"}},
			[]string{"config.row_limit: must be a int"},
		},
		"sql limits": {
			skills.Definition{
				Name: "a", Handler: "sql:select 1",
				Config: map[string]any{"row_limit": 100000, "statement_timeout_ms": -1},
			},
			[]string{"config.row_limit: ", "config.statement_timeout_ms: "},
		},
		"sql names": {
			skills.Definition{
				Name: "a", Handler: "sql:select @one, '@quoted', @two -- @comment",
				Parameters: object(map[string]any{"two": text, "three": text, "quoted": text}),
			},
			[]string{"config.query: @one is not declared", "parameters.properties.three: ", "parameters.properties.quoted: "},
		},
		"undeclared required": {
			skills.Definition{Name: "a", Handler: "sql:select @one", Parameters: map[string]any{
				"type": "object", "properties": map[string]any{"one": text}, "required": []any{"one", "oen"},
			}},
			[]string{`parameters.required: "oen" is not declared under parameters.properties`},
		},
		"wrong default": {
			skills.Definition{
				Name: "a", Handler: "sql:select @n",
				Parameters: object(map[string]any{"n": map[string]any{"type": "integer", "default": "ten"}}),
			},
			[]string{"parameters.properties.n.default: got string, want integer"},
		},
		"http no url": {skills.Definition{Name: "a", Handler: "http:"}, []string{"config.url: is empty"}},
		"http scheme": {skills.Definition{Name: "a", Handler: "http:GET ftp://h/x"}, []string{"handler: must begin"}},
		"http method": {skills.Definition{Name: "a", Handler: "http:BREW https://h/x"}, []string{"handler: "}},
		"http user": {
			skills.Definition{Name: "a", Handler: "http:https://u:p@h/x"},
			[]string{"handler: must not hold a user"},
		},
		"http host": {skills.Definition{
			Name: "a", Handler: "http:https://{h}/x",
			Parameters: object(map[string]any{"h": text}),
		}, []string{"handler: an argument must not choose the host"}},
		"http unknown": {
			skills.Definition{Name: "a", Handler: "http:https://h/{x}"},
			[]string{"handler: {x} is not declared"},
		},
		"http url secret": {
			skills.Definition{Name: "a", Handler: "http:https://h/x?key=${env:KEY}"},
			[]string{"handler: secrets are only taken in headers"},
		},
		"http headers": {
			skills.Definition{Name: "a", Handler: "http:https://h/", Config: map[string]any{"headers": map[string]any{
				"Authorization": "Bearer abc", "Host": "x", "a b": "c", "X-A": "a\r\nb", "X-B": "${HOME}",
			}}},
			[]string{
				"Authorization: do not write a secret", "Host: is set by", `"a b" is not a header`, "X-A: must be one line",
				"X-B: write a reference",
			},
		},
		"http body of GET": {skills.Definition{
			Name: "a", Handler: "http:https://h/",
			Config: map[string]any{"body": map[string]any{}},
		}, []string{"config.body: "}},
		"http body names": {
			skills.Definition{
				Name: "a", Handler: "http:POST https://h/", Config: map[string]any{"body": "{x}"},
				Parameters: object(map[string]any{"y": text}),
			},
			[]string{"config.body: {x}", "parameters.properties.y: neither"},
		},
	})
}

func expectProblems(t *testing.T, tests map[string]badDefinition) {
	t.Helper()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := skills.Validate(test.d)
			require.Error(t, err, "accepted")
			joined, ok := err.(interface{ Unwrap() []error })
			assert.Truef(t, ok && (len(joined.Unwrap()) == len(test.want) || len(test.want) <= 1),
				"want %d problems, got:\n%v", len(test.want), err)
			assert.Contains(t, err.Error(), test.want...)
		})
	}
}

func TestValidateAccepts(t *testing.T) {
	t.Parallel()
	text := map[string]any{"type": "string"}
	tests := map[string]skills.Definition{
		"least": {Name: "a", Handler: "builtin:x"},
		"inner ref": {Name: "a", Handler: "builtin:x", Parameters: map[string]any{
			"type":  "object",
			"$defs": map[string]any{"n": text}, "properties": map[string]any{"n": map[string]any{"$ref": "#/$defs/n"}},
		}},
		"sql inline": {Name: "a", Handler: "sql:select 1;"},
		"sql config": {
			Name: "a", Handler: "sql:", Config: map[string]any{"query": "select @n", "row_limit": 5},
			Parameters: object(map[string]any{"n": text}, "n"),
		},
		"http inline": {
			Name: "a", Handler: "http:DELETE https://h/x/{id}?q={q}",
			Parameters: object(map[string]any{"id": text, "q": text}),
		},
		"http config": {
			Name: "a", Handler: "http:", Timeout: "500ms", Trust: "approve", Scope: "both",
			Config: map[string]any{
				"method": "post", "url": "https://h/", "headers": map[string]any{"authorization": "Bearer ${env:TOKEN}"},
				"body": map[string]any{"t": "{x}"},
			}, Parameters: object(map[string]any{"x": text}),
		},
	}
	for name, d := range tests {
		t.Run(name, func(t *testing.T) {
			assert.NoError(t, skills.Validate(d))
		})
	}
}

// The compilation of such a schema would take minutes. MCP servers send schemas, so they are not trusted.
func TestDeepSchemaIsRejected(t *testing.T) {
	t.Parallel()
	nested := func(levels int) map[string]any {
		schema := map[string]any{"type": "object", "description": strings.Repeat(`[{"\`, 300)}
		for range levels {
			schema = map[string]any{"type": "object", "properties": map[string]any{"a": schema}}
		}
		return schema
	}
	for levels, refused := range map[int]bool{90: false, 3000: true} {
		err := skills.Validate(skills.Definition{
			Name: "deep", Description: "d", Handler: "builtin:x",
			Parameters: nested(levels),
		})
		assert.Truef(t, refused == (err != nil) &&
			(!refused || strings.Contains(err.Error(), "nested more than 200 levels deep")), "%d levels: %v", levels, err)
	}
}

func returnNil(context.Context, skills.Call) (any, error) { return nil, nil }

func TestCheckReportsEveryViolation(t *testing.T) {
	t.Parallel()
	r := registry(t, skills.Options{})
	s := row(t, skills.Definition{Name: "a", Handler: "builtin:x", Parameters: map[string]any{
		"type": "object", "required": []string{"n", "when"}, "additionalProperties": false,
		"properties": map[string]any{
			"n":    map[string]any{"type": "integer", "minimum": 1},
			"when": map[string]any{"type": "string", "format": "date"},
			"tags": map[string]any{"type": "array", "items": map[string]any{"$ref": "#/$defs/tag"}},
		},
		"$defs": map[string]any{"tag": map[string]any{"type": "string", "maxLength": 3}},
	}})
	tests := map[string]struct {
		args  string
		paths []string
	}{
		"valid":         {`{"n": 1, "when": "2026-01-31", "tags": ["abc"]}`, nil},
		"malformed":     {`{"n": 1,`, []string{""}},
		"two values":    {`{"n": 1, "when": "2026-01-31"} {}`, []string{""}},
		"not an object": {`[1]`, []string{""}},
		"nothing":       {``, []string{""}},
		"missing":       {`{}`, []string{""}},
		"undeclared":    {`{"n": 1, "when": "2026-01-31", "name": 1}`, []string{""}},
		"several":       {`{"n": 0, "when": "soon", "tags": ["abcd", 5]}`, []string{"/n", "/tags/0", "/tags/1", "/when"}},
		"NUL character": {`{"n": 1, "when": "2026-01-31", "tags": ["\u0000"]}`, []string{"/tags/0"}},
		"a huge number": {`{"n": 1e400, "when": "2026-02-28"}`, []string{"/n"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := r.Check(s, json.RawMessage(test.args))
			var paths []string
			if invalid, ok := errors.AsType[*skills.InvalidParams](err); ok {
				for _, v := range invalid.Violations {
					paths = append(paths, v.Path)
				}
				assert.Truef(t, strings.Contains(string(invalid.Schema), `"required"`), "the schema is missing: %s", invalid.Schema)
			} else if err != nil {
				t.Fatal(err)
			}
			assert.Equal(t, "", cmp.Diff(test.paths, sorted(paths)), err)
		})
	}
}

func TestCompiledSchemasFollowTheRevision(t *testing.T) {
	t.Parallel()
	r := registry(t, skills.Options{})
	s := row(t, skills.Definition{
		Name: "a", Handler: "builtin:x",
		Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}}),
	})
	s.ID, s.Revision = "1", 1
	assert.Error(t, r.Check(s, json.RawMessage(`{"n": "text"}`)), "accepted text")
	s.Revision = 2
	s.ToolDefinition = bytes.ReplaceAll(s.ToolDefinition, []byte("integer"), []byte("string"))
	assert.NoError(t, r.Check(s, json.RawMessage(`{"n": "text"}`)), "the old schema was used")
}

func TestInvokeReturnsStorableJSON(t *testing.T) {
	t.Parallel()
	deep := any("bottom")
	for range 200 {
		deep = []any{deep}
	}
	tests := map[string]struct {
		value any
		want  string
		class string
	}{
		"nothing":         {nil, `null`, ""},
		"a struct":        {struct{ A int }{1}, `{"A":1}`, ""},
		"markup":          {"<b>&", `"<b>&"`, ""},
		"NUL":             {map[string]any{"a\x00": []any{"b\x00c"}}, `{"a` + "\uFFFD" + `":["b` + "\uFFFD" + `c"]}`, ""},
		"escaped NUL":     {json.RawMessage(`"\\u0000 \u0000"`), `"\\u0000 ` + "\uFFFD" + `"`, ""},
		"lone surrogate":  {json.RawMessage(`"\ud800"`), `"` + "\uFFFD" + `"`, ""},
		"big integer":     {json.RawMessage(`12345678901234567890`), `12345678901234567890`, ""},
		"huge exponent":   {json.RawMessage(`1e999999`), `"1e999999"`, ""},
		"tiny number":     {json.RawMessage(`1e-999999`), `"1e-999999"`, ""},
		"huge mantissa":   {json.RawMessage(`99999999999e300`), `"99999999999e300"`, ""},
		"huge integer":    {json.RawMessage(strings.Repeat("9", 400)), `"` + strings.Repeat("9", 400) + `"`, ""},
		"large float":     {json.RawMessage(`1e305`), `1e305`, ""},
		"scaled zeros":    {json.RawMessage(`[0e-20000,0.0e+00]`), `["0e-20000",0.0e+00]`, ""},
		"too large":       {strings.Repeat("x", 256<<10), "", skills.ClassTooLarge},
		"much too large":  {strings.Repeat("x", 4<<20), "", skills.ClassTooLarge},
		"too deep":        {deep, "", skills.ClassTooLarge},
		"not JSON at all": {make(chan int), "", skills.ClassHandler},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := registry(t, skills.Options{Builtins: map[string]skills.Builtin{
				"x": func(context.Context, skills.Call) (any, error) { return test.value, nil },
			}})
			got, err := r.Invoke(t.Context(), skills.Call{Skill: row(t, skills.Definition{Name: "a", Handler: "builtin:x"})})
			assert.Truef(t, errorClass(err) == test.class && string(got) == test.want,
				"got %.80s, %v; want %s, class %q", got, err, test.want, test.class)
		})
	}
}

func TestInvokeClassifiesFailures(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	tests := map[string]struct {
		builtin skills.Builtin
		handler string
		class   string
	}{
		"error": {
			func(context.Context, skills.Call) (any, error) { return nil, errors.New("no luck\x00") }, "builtin:x",
			skills.ClassHandler,
		},
		"classed error": {func(context.Context, skills.Call) (any, error) {
			return nil, &skills.CallError{Class: skills.ClassNetwork, Message: "m"}
		}, "builtin:x", skills.ClassNetwork},
		"panic":          {func(context.Context, skills.Call) (any, error) { panic("boom") }, "builtin:x", skills.ClassPanic},
		"no builtin":     {returnNil, "builtin:y", skills.ClassHandler},
		"no database":    {returnNil, "sql:select 1", skills.ClassHandler},
		"unknown kind":   {returnNil, "shell:ls", skills.ClassHandler},
		"cannot run yet": {returnNil, "flow:a", skills.ClassHandler},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			r := registry(t, skills.Options{
				Builtins: map[string]skills.Builtin{"x": test.builtin}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			_, err := r.Invoke(t.Context(), skills.Call{Skill: row(t, skills.Definition{Name: "a", Handler: test.handler})})
			if errorClass(err) != test.class || strings.Contains(err.Error(), "\x00") {
				t.Errorf("got %v of class %q, want %q", err, errorClass(err), test.class)
			}
		})
	}
	assert.Contains(t, log.String(), "boom")
}

func TestTimeoutEndsBuiltin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := registry(t, skills.Options{Builtins: map[string]skills.Builtin{
			"x": func(ctx context.Context, _ skills.Call) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
		}})
		call := skills.Call{Skill: row(t, skills.Definition{Name: "a", Handler: "builtin:x"})}
		start := time.Now()
		_, err := r.Invoke(t.Context(), call)
		assert.Truef(t, errorClass(err) == skills.ClassTimeout && time.Since(start) == call.Skill.Timeout(),
			"got %v after %s", err, time.Since(start))
		cause := errors.New("lane lost")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		if _, err := r.Invoke(ctx, call); !errors.Is(err, cause) || errorClass(err) != "" {
			t.Errorf("the end of the caller's context gave %v of class %q", err, errorClass(err))
		}
	})
}

func TestTool(t *testing.T) {
	t.Parallel()
	s := row(t, skills.Definition{
		Name: "a", Handler: "builtin:x",
		Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}}),
	})
	s.Description = "counts"
	got, err := json.Marshal(s.Tool())
	want := `{"type":"function","function":{"name":"a","description":"counts",` +
		`"parameters":{"properties":{"n":{"type":"integer"}},"type":"object"}}}`
	assert.NoError(t, err, got)
	assert.Equal(t, want, string(got), got)
}

func errorClass(err error) string {
	if ce, ok := errors.AsType[*skills.CallError](err); ok {
		return ce.Class
	}
	return ""
}
