package skills_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

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
		"flow":      {skills.Definition{Name: "a", Handler: "flow:1x"}, []string{`handler: the flow "1x" must be a letter, then at most 99`}},
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

// A resumed turn checks the arguments again. Its transcript must show the model the same text.
func TestViolationsHaveAnOrder(t *testing.T) {
	t.Parallel()
	r := registry(t, skills.Options{})
	closed := object(map[string]any{"a": map[string]any{"type": "integer"}, "b": map[string]any{"type": "integer"}})
	closed["additionalProperties"] = false
	s := row(t, skills.Definition{Name: "h", Handler: "builtin:h", Parameters: closed})
	for args, want := range map[string]string{
		`{"x":1,"y":1,"z":1}`:         "additional properties 'x', 'y', 'z' not allowed",
		`{"a":"x","b":"x"}`:           "/a: got string, want integer; /b: got string, want integer",
		`{"a":"\u0000","b":"\u0000"}`: "/a: has a NUL character; /b: has a NUL character",
	} {
		for range 20 {
			assert.Equal(t, "call h: invalid parameters: "+want, r.Check(s, json.RawMessage(args)).Error())
		}
	}
}
