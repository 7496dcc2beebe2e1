package skills_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
)

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

func TestCheckBoundsViolations(t *testing.T) {
	t.Parallel()
	s := row(t, skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{
		"tags": map[string]any{"type": "array", "items": map[string]any{"type": "string"}},
	})})
	err := registry(t, skills.Options{}).Check(s, json.RawMessage(`{"tags": [0`+strings.Repeat(",0", 149)+`]}`))
	invalid, ok := errors.AsType[*skills.InvalidParams](err)
	assert.Truef(t, ok && len(invalid.Violations) == 101 && strings.HasSuffix(err.Error(), "; and 50 more"), "got %v", err)
}

func TestCompiledSchemasFollowRevision(t *testing.T) {
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

func errorClass(err error) string {
	if ce, ok := errors.AsType[*skills.CallError](err); ok {
		return ce.Class
	}
	return ""
}
