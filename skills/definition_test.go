package skills_test

import (
	"strings"
	"testing"

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
			skills.Definition{Name: "a b", Handler: "shell:rm", Scope: "world", Trust: "blind", Timeout: "soon", Parameters: map[string]any{"type": "string"}},
			[]string{"name: ", "handler: ", "scope: ", "trust: ", "timeout: ", "parameters.type: "},
		},
		"long name":       {skills.Definition{Name: strings.Repeat("a", 65), Handler: "builtin:x"}, []string{"name: "}},
		"flow":            {skills.Definition{Name: "a", Handler: "flow:1x"}, []string{"handler: flow:1x must name a flow"}},
		"mcp":             {skills.Definition{Name: "a", Handler: "mcp:x"}, []string{"handler: mcp:x must name a server", "config.pin: must be the hash"}},
		"builtin unnamed": {skills.Definition{Name: "a", Handler: "builtin:"}, []string{"handler: builtin:"}},
		"timeout zero":    {skills.Definition{Name: "a", Handler: "builtin:x", Timeout: "0s"}, []string{"timeout: "}},
		"timeout days":    {skills.Definition{Name: "a", Handler: "builtin:x", Timeout: "48h"}, []string{"timeout: "}},
		"schema type word": {
			skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{"p": map[string]any{"type": "objekt"}, "q": map[string]any{"minimum": "1"}})},
			[]string{"parameters.properties.p.type: value", "parameters.properties.p.type: got", "parameters.properties.q.minimum: "},
		},
		"schema remote": {
			skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{"p": map[string]any{"$ref": "https://example.com/s.json"}})},
			[]string{"outside this schema"},
		},
		"schema file": {
			skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{"p": map[string]any{"$ref": "file:///etc/passwd"}})},
			[]string{"outside this schema"},
		},
		"schema bad pattern": {
			skills.Definition{Name: "a", Handler: "builtin:x", Parameters: object(map[string]any{"p": map[string]any{"pattern": "("}})},
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
		"sql empty":      {skills.Definition{Name: "a", Handler: "sql:"}, []string{"config.query: is empty"}},
		"sql twice":      {skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"query": "select 2"}}, []string{"handler: the query"}},
		"sql odd field":  {skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"limit": 2}}, []string{`config: unknown field "limit"`}},
		"sql wrong type": {skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"row_limit": "2"}}, []string{"config.row_limit: must be a int"}},
		"sql limits": {
			skills.Definition{Name: "a", Handler: "sql:select 1", Config: map[string]any{"row_limit": 100000, "statement_timeout_ms": -1}},
			[]string{"config.row_limit: ", "config.statement_timeout_ms: "},
		},
		"sql names": {
			skills.Definition{Name: "a", Handler: "sql:select @one, '@quoted', @two -- @comment", Parameters: object(map[string]any{"two": text, "three": text, "quoted": text})},
			[]string{"config.query: @one is not declared", "parameters.properties.three: ", "parameters.properties.quoted: "},
		},
		"http no url":  {skills.Definition{Name: "a", Handler: "http:"}, []string{"config.url: is empty"}},
		"http scheme":  {skills.Definition{Name: "a", Handler: "http:GET ftp://h/x"}, []string{"config.url: must begin"}},
		"http method":  {skills.Definition{Name: "a", Handler: "http:BREW https://h/x"}, []string{"config.method: "}},
		"http user":    {skills.Definition{Name: "a", Handler: "http:https://u:p@h/x"}, []string{"config.url: must not hold a user"}},
		"http host":    {skills.Definition{Name: "a", Handler: "http:https://{h}/x", Parameters: object(map[string]any{"h": text})}, []string{"config.url: an argument must not choose the host"}},
		"http unknown": {skills.Definition{Name: "a", Handler: "http:https://h/{x}"}, []string{"config.url: {x} is not declared"}},
		"http url secret": {
			skills.Definition{Name: "a", Handler: "http:https://h/x?key=${env:KEY}"}, []string{"config.url: secrets are only taken in headers"},
		},
		"http headers": {
			skills.Definition{Name: "a", Handler: "http:https://h/", Config: map[string]any{"headers": map[string]any{
				"Authorization": "Bearer abc", "Host": "x", "a b": "c", "X-A": "a\r\nb", "X-B": "${HOME}",
			}}},
			[]string{"Authorization: do not write a secret", "Host: is set by", `"a b" is not a header`, "X-A: must be one line", "X-B: write a reference"},
		},
		"http body of GET": {skills.Definition{Name: "a", Handler: "http:https://h/", Config: map[string]any{"body": map[string]any{}}}, []string{"config.body: "}},
		"http body names": {
			skills.Definition{Name: "a", Handler: "http:POST https://h/", Config: map[string]any{"body": "{x}"}, Parameters: object(map[string]any{"y": text})},
			[]string{"config.body: {x}", "parameters.properties.y: neither"},
		},
	})
}

func expectProblems(t *testing.T, tests map[string]badDefinition) {
	t.Helper()
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := skills.Validate(test.d)
			if err == nil {
				t.Fatal("accepted")
			}
			joined, ok := err.(interface{ Unwrap() []error })
			if !ok || len(joined.Unwrap()) != len(test.want) && len(test.want) > 1 {
				t.Errorf("want %d problems, got:\n%v", len(test.want), err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("no %q in:\n%v", want, err)
				}
			}
		})
	}
}

func TestValidateAccepts(t *testing.T) {
	t.Parallel()
	text := map[string]any{"type": "string"}
	tests := map[string]skills.Definition{
		"least":       {Name: "a", Handler: "builtin:x"},
		"inner ref":   {Name: "a", Handler: "builtin:x", Parameters: map[string]any{"type": "object", "$defs": map[string]any{"n": text}, "properties": map[string]any{"n": map[string]any{"$ref": "#/$defs/n"}}}},
		"sql inline":  {Name: "a", Handler: "sql:select 1;"},
		"sql config":  {Name: "a", Handler: "sql:", Config: map[string]any{"query": "select @n", "row_limit": 5}, Parameters: object(map[string]any{"n": text}, "n")},
		"http inline": {Name: "a", Handler: "http:DELETE https://h/x/{id}?q={q}", Parameters: object(map[string]any{"id": text, "q": text})},
		"http config": {Name: "a", Handler: "http:", Timeout: "500ms", Trust: "approve", Scope: "both", Config: map[string]any{
			"method": "post", "url": "https://h/", "headers": map[string]any{"authorization": "Bearer ${env:TOKEN}"}, "body": map[string]any{"t": "{x}"},
		}, Parameters: object(map[string]any{"x": text})},
	}
	for name, d := range tests {
		t.Run(name, func(t *testing.T) {
			if err := skills.Validate(d); err != nil {
				t.Error(err)
			}
		})
	}
}

// To compile one takes minutes, and schemas come from servers of tools as well.
func TestASchemaThatIsTooDeepIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	nested := func(levels int) map[string]any {
		schema := map[string]any{"type": "object", "description": strings.Repeat(`[{"\`, 300)}
		for range levels {
			schema = map[string]any{"type": "object", "properties": map[string]any{"a": schema}}
		}
		return schema
	}
	for levels, refused := range map[int]bool{90: false, 3000: true} {
		err := skills.Validate(skills.Definition{Name: "deep", Description: "d", Handler: "builtin:x", Parameters: nested(levels)})
		if refused != (err != nil) || refused && !strings.Contains(err.Error(), "nested more than 200 levels deep") {
			t.Errorf("%d levels: %v", levels, err)
		}
	}
}
