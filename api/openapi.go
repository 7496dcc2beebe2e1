package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/skills"
)

// openAPI serves the OpenAPI document of the routes.
func (s *server) openAPI(table []route) (http.Handler, error) {
	encoded, err := encode(buildDocument(table))
	if err != nil {
		return nil, fmt.Errorf("describe API: %w", err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "public, max-age=300")
		if _, err := w.Write(encoded); err != nil {
			s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
		}
	}), nil
}

var pathParam = regexp.MustCompile(`\{(\w+)\}`)

// buildDocument builds the OpenAPI 3.1 description of the table.
func buildDocument(table []route) object {
	s := &schemas{components: object{}}
	paths := object{}
	for _, rt := range table {
		if rt.page {
			continue
		}
		path := plainPath(rt.path)
		pathItem, known := paths[path].(object)
		if !known {
			pathItem = object{}
			paths[path] = pathItem
		}
		pathItem[strings.ToLower(rt.method)] = s.operation(rt)
	}
	s.schema(reflect.TypeFor[problem.Problem]()) // registers the component, which each error response refers to
	return object{
		"openapi": "3.1.0",
		"servers": []object{{"url": "/"}},
		"tags":    tags(table),
		"info": object{
			"title": "Lanekeeper", "version": "1", "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "The agent's state and history, admin actions, and the surfaces. Errors are RFC 9457 problems, " +
				"or OpenAI's error objects for its clients.",
		},
		"paths": paths,
		"components": object{
			"schemas": s.components,
			"securitySchemes": object{
				"principal": object{
					"type": "http", "scheme": "bearer",
					"description": "An API token lk_…, whose principal has the scope, or AGENT_ADMIN_TOKEN",
				},
				"visitor": object{"type": "http", "scheme": "bearer", "description": "a key of AGENT_CHAT_KEY"},
			},
		},
	}
}

// plainPath converts a pattern of http.ServeMux to OpenAPI.
func plainPath(pattern string) string {
	return strings.ReplaceAll(strings.TrimSuffix(pattern, "{$}"), "...}", "}")
}

// operation describes a route: its access, parameters, body and responses.
func (s *schemas) operation(rt route) object {
	op := object{
		"operationId": operationID(rt), "description": rt.about, "parameters": s.parameters(rt), "responses": s.responses(rt),
		"security": []object{}, "tags": []string{tagOf(rt)}, "summary": summary(rt.about),
	}
	switch rt.access {
	case Admin:
		op["security"], op["x-scope"] = []object{{"principal": rt.scopes}}, rt.scopes[0]
	case Visitor:
		op["security"] = []object{{"visitor": []string{}}}
	case Public:
	}
	switch rt.body.(type) {
	case nil:
	case FileForm:
		op["requestBody"] = object{"required": true, "content": content("multipart/form-data", object{
			"type": "object", "required": []string{"file"},
			"properties": object{"file": object{"type": "string", "format": "binary"}},
		})}
	default:
		op["requestBody"] = object{
			"required": !rt.optionalBody,
			"content":  content("application/json", s.schema(reflect.TypeOf(rt.body))),
		}
	}
	return op
}

// tagOf returns the tag of a route: its first path segment after /v1.
func tagOf(rt route) string {
	words := strings.Split(strings.TrimPrefix(rt.path, "/v1"), "/")
	return words[1]
}

// tags lists the tags of all operations.
func tags(table []route) (list []object) {
	names := map[string]bool{}
	for _, rt := range table {
		if !rt.page {
			names[tagOf(rt)] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		list = append(list, object{"name": name, "description": "Routes of " + name + "."})
	}
	return list
}

// summaryLength bounds a summary in characters.
const summaryLength = 80

// summary returns the first sentence of a description up to a colon, cut at a blank if it is too long.
func summary(about string) string {
	sentence, _, _ := strings.Cut(about, ". ")
	sentence, _, _ = strings.Cut(sentence, ": ")
	sentence = strings.TrimSuffix(sentence, ".")
	if runes := []rune(sentence); len(runes) > summaryLength {
		cut := string(runes[:summaryLength])
		return strings.TrimRight(cut[:max(strings.LastIndexByte(cut, ' '), 0)], ",;") + " …"
	}
	return sentence
}

// operationID joins method and path into one word.
func operationID(rt route) string {
	words := strings.FieldsFunc(strings.TrimPrefix(plainPath(rt.path), "/v1"),
		func(r rune) bool { return strings.ContainsRune("/{}.-", r) })
	return strings.ToLower(rt.method) + "_" + strings.Join(words, "_")
}

func (s *schemas) parameters(rt route) []object {
	list := []object{}
	for _, found := range pathParam.FindAllStringSubmatch(plainPath(rt.path), -1) {
		list = append(list, object{"name": found[1], "in": "path", "required": true, "schema": object{"type": "string"}})
	}
	if rt.acceptsKey {
		list = append(list, object{
			"name": keyHeader, "in": "header", "description": "Makes repeated requests within 24 hours run once.",
			"schema": object{"type": "string", "minLength": 1, "maxLength": maxKey},
		})
	}
	if rt.ifMatch {
		list = append(list, object{
			"name": "If-Match", "in": "header", "description": "The ETag of the expected state; 412 if it has changed.",
			"schema": object{"type": "string"},
		})
	}
	for _, name := range slices.Sorted(maps.Keys(rt.headers)) {
		list = append(list, object{
			"name": name, "in": "header", "description": rt.headers[name], "schema": object{"type": "string"},
		})
	}
	for _, p := range rt.params {
		schema := object{"type": "string", "minLength": 1, "maxLength": maxText}
		switch {
		case p.format == "integer":
			schema = object{"type": "integer", "minimum": 1}
			if p.max > 0 {
				schema["maximum"], schema["default"] = p.max, p.def
			}
		case p.format != "":
			schema = object{"type": "string", "format": p.format}
		case p.enum != nil:
			schema = object{"type": "string", "enum": p.enum}
		}
		list = append(list, object{"name": p.name, "in": "query", "description": p.about, "schema": schema})
	}
	return list
}

// responses lists the possible responses of a route.
func (s *schemas) responses(rt route) object {
	done := s.responseContent(rt)
	all := object{strconv.Itoa(cmp.Or(rt.status, http.StatusOK)): okResponse(rt, done)}
	if rt.alreadyDone {
		all["200"] = object{"description": "Already done", "content": done}
	}
	if rt.deferred {
		all["202"] = object{"description": "Accepted", "content": done}
	}
	if rt.noContent != "" {
		all["204"] = object{"description": rt.noContent}
	}
	if rt.unready {
		all["503"] = object{"description": "Not ready", "content": done}
	}
	failed := s.errorContent(rt)
	for _, status := range errorStatuses(rt) {
		failure := object{"description": http.StatusText(status), "content": failed}
		if status == http.StatusTooManyRequests {
			failure["headers"] = object{"Retry-After": object{
				"description": "Seconds until a retry.", "schema": object{"type": "integer", "minimum": 1},
			}}
		}
		all[strconv.Itoa(status)] = failure
	}
	if rt.httpHandler != nil && rt.path != "/openapi.json" {
		all["default"] = object{"description": "Refused", "content": failed}
	}
	return all
}

func okResponse(rt route, content object) object {
	response := object{"description": "Done", "content": content}
	if headers := headersOf(rt); len(headers) > 0 {
		response["headers"] = headers
	}
	return response
}

// errorContent describes the errors of a route: problems, or OpenAI's error objects.
func (s *schemas) errorContent(rt route) object {
	if !rt.openAI {
		return content(problem.ContentType, s.schema(reflect.TypeFor[problem.Problem]()))
	}
	return content("application/json", object{
		"type": "object", "properties": object{"error": s.schema(reflect.TypeFor[chatwire.Failure]())},
		"required": []string{"error"},
	})
}

func headersOf(rt route) object {
	headers := object{}
	if strings.Contains(rt.path, "{") || rt.httpHandler != nil {
		headers["X-Trace-Id"] = object{"description": "The trace of the response.", "schema": object{"type": "string"}}
	}
	for name, about := range rt.sends {
		headers[name] = object{"description": about, "schema": object{"type": "string"}}
	}
	if rt.acceptsKey && rt.secret == "" {
		headers[replayedHeader] = object{
			"description": "true: the stored response to the first request with the " + keyHeader + ".",
			"schema":      object{"type": "string", "enum": []string{"true"}},
		}
	}
	if rt.hasETag {
		headers["ETag"] = object{"description": "The revision of the shown object.", "schema": object{"type": "string"}}
	}
	if rt.replica {
		headers[replica.Header] = object{
			"description": "Lag of the read replica in seconds. Cache-Control: no-cache reads from the primary.",
			"schema":      object{"type": "number"},
		}
	}
	return headers
}

// responseContent describes a response: JSON, an event stream, or both.
func (s *schemas) responseContent(rt route) object {
	events := object{"type": "string"}
	switch {
	case rt.stream && rt.response != nil:
		both := content("application/json", s.schema(reflect.TypeOf(rt.response)))
		both["text/event-stream"] = object{"schema": events}
		return both
	case rt.contentType != "" && rt.contentType != "application/json":
		return content(rt.contentType, events)
	case rt.response == nil:
		return content("application/json", object{})
	}
	one := content("application/json", s.schema(reflect.TypeOf(rt.response)))
	if rt.csv {
		one["text/csv"] = object{"schema": object{"type": "string"}}
	}
	return one
}

// errorStatuses lists the error statuses of a route.
func errorStatuses(rt route) []int {
	list := slices.Clone(rt.errors)
	if rt.access != Public {
		list = append(list, http.StatusBadRequest, http.StatusUnauthorized, http.StatusForbidden,
			http.StatusInternalServerError, http.StatusServiceUnavailable)
		if strings.Contains(rt.path, "{") || rt.notFound {
			list = append(list, http.StatusNotFound)
		}
	}
	if !rt.probe {
		list = append(list, http.StatusTooManyRequests)
	}
	if rt.method != http.MethodGet && rt.method != http.MethodHead { // the server always reads its body
		list = append(list, http.StatusRequestTimeout, http.StatusRequestEntityTooLarge)
	}
	if rt.wantsJSON() {
		list = append(list, http.StatusUnsupportedMediaType)
	}
	if rt.conflicts || rt.acceptsKey {
		list = append(list, http.StatusConflict)
	}
	if rt.acceptsKey {
		list = append(list, http.StatusUnprocessableEntity)
	}
	if rt.ifMatch {
		list = append(list, http.StatusPreconditionFailed)
		if !rt.acceptsKey {
			list = append(list, http.StatusPreconditionRequired)
		}
	}
	return list
}

// content describes a body of a media type.
func content(mediaType string, schema object) object {
	return object{mediaType: object{"schema": schema}}
}

// object is a part of the document.
type object = map[string]any

// schemas derives JSON Schema 2020-12 from the Go types of requests and responses. Those types have no MarshalJSON of
// their own, and only slices tagged nullable may be nil. Named structs become referenced components. The tag doc
// describes a field.
type schemas struct {
	components object
}

var rawType = reflect.TypeFor[json.RawMessage]()

// typeEnums has the values of types with a closed set.
var typeEnums = map[reflect.Type][]string{
	reflect.TypeFor[executions.Status](): executions.Statuses(),
	reflect.TypeFor[activity.Status]():   activity.Statuses(),
	reflect.TypeFor[principals.Role]():   principals.Roles(),
}

// fieldEnums has the values of text fields with a closed set, by component and field.
var fieldEnums = map[string][]string{
	"StartRequest.on_lost":              lossPolicies,
	"StartRequest.queue":                {executions.Background, executions.Interactive},
	"ReleaseRequest.status":             releaseStatuses,
	"ReleaseRequest.waiting_for":        withoutLane(executions.WaitKinds()),
	"DecisionRequest.decision":          approvalDecisions,
	"ConflictDecision.decision":         conflictDecisions,
	"Wait.waiting_for":                  executions.WaitKinds(),
	"executions_Execution.on_lost":      lossPolicies,
	"executions_Execution.queue":        {executions.Background, executions.Interactive},
	"executions_Execution.waiting_for":  executions.WaitKinds(),
	"executions_WaitingRow.waiting_for": executions.WaitKinds(),
	"approvals_Approval.status":         approvalStatuses(),
	"skills_Skill.trust":                skills.Trusts(),
}

// withoutLane returns the waits of external workers, which do not wait for lanes.
func withoutLane(kinds []string) []string {
	return slices.DeleteFunc(kinds, func(kind string) bool { return kind == "lane" })
}

// schema describes the JSON of a type. A kind that it does not list counts as an integer.
func (s *schemas) schema(t reflect.Type) object {
	switch t {
	case timeType:
		return object{"type": "string", "format": "date-time"}
	case rawType:
		return object{"description": "Any JSON."}
	}
	if values, closed := typeEnums[t]; closed {
		return object{"type": "string", "enum": values}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return nullable(s.schema(t.Elem()))
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Float32, reflect.Float64:
		return object{"type": "number"}
	case reflect.Slice, reflect.Array:
		return object{"type": "array", "items": s.schema(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.schema(t.Elem())}
	case reflect.Struct:
		return s.structSchema(t)
	case reflect.Interface:
		return object{}
	}
	return object{"type": "integer"}
}

// nullable extends a schema by null.
func nullable(schema object) object {
	if name, plain := schema["type"].(string); plain && schema["enum"] == nil {
		schema["type"] = []string{name, "null"}
		return schema
	}
	return object{"anyOf": []object{schema, {"type": "null"}}}
}

// structSchema describes a struct, by reference if it is named.
func (s *schemas) structSchema(t reflect.Type) object {
	name := componentName(t)
	if name == "" {
		return s.fields(t)
	}
	if _, known := s.components[name]; !known {
		s.components[name] = object{} // breaks the recursion of recursive types
		s.components[name] = s.fields(t)
	}
	return object{"$ref": "#/components/schemas/" + name}
}

func (s *schemas) fields(t reflect.Type) object {
	properties, required := object{}, []string{}
	for _, f := range reflect.VisibleFields(t) {
		tag, tagged := f.Tag.Lookup("json")
		name, options, _ := strings.Cut(tag, ",")
		if !f.IsExported() || !tagged || name == "-" || name == "" {
			continue
		}
		property := s.schema(f.Type)
		owner := t
		if n := len(f.Index) - 1; n > 0 { // the field of an embedded struct
			owner = t.FieldByIndex(f.Index[:n]).Type
		}
		if values, closed := fieldEnums[componentName(owner)+"."+name]; closed {
			property = object{"type": "string", "enum": values}
			if f.Type.Kind() == reflect.Pointer {
				property = nullable(property)
			}
		}
		if f.Tag.Get("nullable") == "true" { // a slice that may be null, not only empty
			property = nullable(property)
		}
		if about := f.Tag.Get("doc"); about != "" {
			property["description"] = about
		}
		properties[name] = property
		if !strings.Contains(options, "omit") {
			required = append(required, name)
		}
	}
	return object{"type": "object", "properties": properties, "required": required}
}

// componentName joins package and type, such as activity_Row; it is empty for unnamed and generic types.
func componentName(t reflect.Type) string {
	if t.Name() == "" || strings.ContainsRune(t.Name(), '[') {
		return ""
	}
	name := []rune(t.Name())
	name[0] = unicode.ToUpper(name[0])
	pkg := t.PkgPath()[strings.LastIndexByte(t.PkgPath(), '/')+1:]
	if pkg == "api" || strings.EqualFold(pkg, t.Name()) {
		return string(name)
	}
	return pkg + "_" + string(name)
}
