package api_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every operation is whole: what its path names is a parameter, each answer has a description, every schema compiles,
// and what asks for a key says which.
func TestEveryOperationOfTheDocumentIsWhole(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	schemes := a.doc["components"].(map[string]any)["securitySchemes"].(map[string]any)
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, described := range methods.(map[string]any) {
			op := described.(map[string]any)
			at := strings.ToUpper(method) + " " + path
			var named []string
			for _, p := range op["parameters"].([]any) {
				if p := p.(map[string]any); p["in"] == "path" {
					named = append(named, "{"+p["name"].(string)+"}")
				}
			}
			if want := regexp.MustCompile(`\{\w+\}`).FindAllString(path, -1); !slices.Equal(named, want) {
				t.Errorf("%s: path parameters are %v", at, named)
			}
			for _, alternative := range op["security"].([]any) {
				for scheme := range alternative.(map[string]any) {
					if schemes[scheme] == nil {
						t.Errorf("%s: no scheme %s", at, scheme)
					}
				}
			}
			if op["description"] == "" || op["operationId"] == "" {
				t.Errorf("%s is not described", at)
			}
			a.answersOf(at, path, method, op["responses"].(map[string]any))
		}
	}
}

// Where a bound can be met the document says so: 429 everywhere but at the probes, and 413 where a body is read.
func TestTheDocumentSaysWhereABoundCanBeMet(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, described := range methods.(map[string]any) {
			answers := described.(map[string]any)["responses"].(map[string]any)
			full, bounded := answers["429"].(map[string]any)
			if probe := path == "/healthz" || path == "/readyz"; bounded == probe {
				t.Errorf("%s %s: 429 is described: %t", method, path, bounded)
			}
			if headers, _ := full["headers"].(map[string]any); bounded && headers["Retry-After"] == nil {
				t.Errorf("%s %s: 429 without Retry-After", method, path)
			}
			large, reads := answers["413"].(map[string]any)
			if reads != (method != "get") {
				t.Errorf("%s %s: 413 is described: %t", method, path, reads)
			}
			if large["headers"] != nil {
				t.Errorf("%s %s: 413 is for good, but has headers", method, path)
			}
		}
	}
}

// answersOf checks the answers of one operation.
func (a *agent) answersOf(at, path, method string, answers map[string]any) {
	a.t.Helper()
	escape := strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D")
	done := false
	for status, described := range answers {
		answer := described.(map[string]any)
		done = done || status[0] == '2'
		content, has := answer["content"].(map[string]any)
		if !has || len(content) == 0 || answer["description"] == "" {
			a.t.Errorf("%s: %s is not described", at, status)
		}
		for kind := range content {
			pointer := "openapi.json#/paths/" + escape.Replace(path) + "/" + method + "/responses/" + status + "/content/" + escape.Replace(kind) + "/schema"
			if _, err := a.schemas.Compile(pointer); err != nil {
				a.t.Errorf("%s: %s: %v", at, status, err)
			}
		}
	}
	if !done {
		a.t.Errorf("%s never succeeds", at)
	}
}
