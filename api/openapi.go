package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// openAPI serves the document that describes the table.
func (s *server) openAPI(table []route) (http.Handler, error) {
	encoded, err := encode(document(table))
	if err != nil {
		return nil, fmt.Errorf("describe API: %w", err)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "public, max-age=300")
		if _, err := w.Write(encoded); err != nil {
			s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
		}
	}), nil
}

var pathParam = regexp.MustCompile(`\{(\w+)\}`)

// document is the OpenAPI 3.1 description of the table.
func document(table []route) object {
	s := &schemas{components: object{}}
	paths := object{}
	for _, rt := range table {
		if rt.page {
			continue
		}
		path := plainPath(rt.path)
		at, known := paths[path].(object)
		if !known {
			at = object{}
			paths[path] = at
		}
		at[strings.ToLower(rt.method)] = s.operation(rt)
	}
	s.of(reflect.TypeFor[problem.Problem]())
	return object{
		"openapi": "3.1.0",
		"info": object{
			"title": "Lanekeeper", "version": "1",
			"description": "What the agent does and did, an admin's levers, and the surfaces. Errors are RFC 9457 problems, " +
				"and OpenAI's error objects where its clients call.",
		},
		"paths": paths,
		"components": object{
			"schemas": s.components,
			"securitySchemes": object{
				"admin":   object{"type": "http", "scheme": "bearer", "description": "AGENT_ADMIN_TOKEN"},
				"visitor": object{"type": "http", "scheme": "bearer", "description": "a key of AGENT_CHAT_KEY"},
			},
		},
	}
}

// plainPath is a pattern of http.ServeMux as OpenAPI writes it.
func plainPath(pattern string) string {
	return strings.ReplaceAll(strings.TrimSuffix(pattern, "{$}"), "...}", "}")
}

// operation describes one route.
func (s *schemas) operation(rt route) object {
	op := object{
		"operationId": operationID(rt), "description": rt.about, "parameters": s.parameters(rt), "responses": s.responses(rt),
		"security": []object{},
	}
	switch rt.access {
	case Admin:
		op["security"] = []object{{"admin": []string{}}}
	case Visitor:
		op["security"] = []object{{"visitor": []string{}}}
	case Public:
	}
	if rt.body != nil {
		op["requestBody"] = object{"required": true, "content": content("application/json", s.of(reflect.TypeOf(rt.body)))}
	}
	return op
}

// operationID is method and path as one word.
func operationID(rt route) string {
	words := strings.FieldsFunc(strings.TrimPrefix(plainPath(rt.path), "/v1"), func(r rune) bool { return strings.ContainsRune("/{}.-", r) })
	return strings.ToLower(rt.method) + "_" + strings.Join(words, "_")
}

func (s *schemas) parameters(rt route) []object {
	list := []object{}
	for _, found := range pathParam.FindAllStringSubmatch(plainPath(rt.path), -1) {
		list = append(list, object{"name": found[1], "in": "path", "required": true, "schema": object{"type": "string"}})
	}
	if rt.idempotent {
		list = append(list, object{
			"name": keyHeader, "in": "header", "description": "Makes the request count once, however often it is sent within 24 hours.",
			"schema": object{"type": "string", "minLength": 1, "maxLength": maxKey},
		})
	}
	if rt.guarded {
		list = append(list, object{
			"name": "If-Match", "in": "header", "description": "The ETag of what the change is based on: if it was changed since, nothing happens, and the answer is 412.",
			"schema": object{"type": "string"},
		})
	}
	for _, p := range rt.params {
		schema := object{"type": "string", "minLength": 1, "maxLength": maxText}
		switch {
		case p.format == "integer":
			schema = object{"type": "integer", "minimum": 1}
			if p.most > 0 {
				schema["maximum"], schema["default"] = p.most, p.usual
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

// responses lists what a route can answer.
func (s *schemas) responses(rt route) object {
	answer := object{"description": "Done", "content": s.answered(rt)}
	if headers := headersOf(rt); len(headers) > 0 {
		answer["headers"] = headers
	}
	all := object{strconv.Itoa(max(rt.status, http.StatusOK)): answer}
	if rt.again {
		all["200"] = object{"description": "It was so already", "content": answer["content"]}
	}
	if rt.unready {
		all["503"] = object{"description": "Not so", "content": answer["content"]}
	}
	refused := content(problem.ContentType, s.of(reflect.TypeFor[problem.Problem]()))
	if rt.openAI {
		refused = content("application/json", object{
			"type": "object", "properties": object{"error": s.of(reflect.TypeFor[chatwire.Failure]())}, "required": []string{"error"},
		})
	}
	for _, status := range problems(rt) {
		refusal := object{"description": http.StatusText(status), "content": refused}
		if status == http.StatusTooManyRequests {
			refusal["headers"] = object{"Retry-After": object{
				"description": "Seconds after which it may be sent again.", "schema": object{"type": "integer", "minimum": 1},
			}}
		}
		all[strconv.Itoa(status)] = refusal
	}
	if rt.handler != nil && rt.path != "/openapi.json" {
		all["default"] = object{"description": "Refused", "content": refused}
	}
	return all
}

// headersOf describes the headers of an answer.
func headersOf(rt route) object {
	headers := object{}
	if strings.Contains(rt.path, "{") || rt.handler != nil {
		headers["X-Trace-Id"] = object{"description": "The trace that the answer belongs to.", "schema": object{"type": "string"}}
	}
	if rt.versioned {
		headers["ETag"] = object{"description": "The revision of what the answer shows.", "schema": object{"type": "string"}}
	}
	if rt.replica {
		headers[replica.Header] = object{
			"description": "The answer is from a read replica, which was so far behind. Cache-Control: no-cache asks the primary.",
			"schema":      object{"type": "number"},
		}
	}
	return headers
}

// answered describes an answer: JSON, a stream of events, or either, as the request asks.
func (s *schemas) answered(rt route) object {
	events := object{"type": "string"}
	switch {
	case rt.contentType != "" && rt.contentType != "application/json":
		return content(rt.contentType, events)
	case rt.answer == nil:
		return content("application/json", object{})
	case rt.stream:
		both := content("application/json", s.of(reflect.TypeOf(rt.answer)))
		both["text/event-stream"] = object{"schema": events}
		return both
	}
	return content("application/json", s.of(reflect.TypeOf(rt.answer)))
}

// problems lists the statuses of the problems that a route can answer with.
func problems(rt route) []int {
	var list []int
	if rt.access != Public {
		list = append(list, http.StatusBadRequest, http.StatusUnauthorized, http.StatusInternalServerError, http.StatusServiceUnavailable)
		if strings.Contains(rt.path, "{") {
			list = append(list, http.StatusNotFound)
		}
	}
	if !rt.probe {
		list = append(list, http.StatusTooManyRequests)
	}
	if rt.method != http.MethodGet && rt.method != http.MethodHead { // its body is read, whatever it is for
		list = append(list, http.StatusRequestTimeout, http.StatusRequestEntityTooLarge)
	}
	if rt.wantsJSON() {
		list = append(list, http.StatusUnsupportedMediaType)
	}
	if rt.conflicts || rt.idempotent {
		list = append(list, http.StatusConflict)
	}
	if rt.idempotent {
		list = append(list, http.StatusUnprocessableEntity)
	}
	if rt.guarded {
		list = append(list, http.StatusPreconditionFailed)
		if !rt.idempotent {
			list = append(list, http.StatusPreconditionRequired)
		}
	}
	return list
}

func content(kind string, schema object) object { return object{kind: object{"schema": schema}} }

// object is a piece of the document.
type object = map[string]any

// schemas makes JSON Schema (2020-12, as OpenAPI 3.1 uses it) of Go types, as encoding/json writes them.
// Named structs become components and are referred to.
type schemas struct {
	components object
}

var rawType = reflect.TypeFor[json.RawMessage]()

// of is the schema of a type.
func (s *schemas) of(t reflect.Type) object {
	switch t {
	case timeType:
		return object{"type": "string", "format": "date-time"}
	case rawType:
		return object{"description": "Any JSON."}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return nullable(s.of(t.Elem()))
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Float32, reflect.Float64:
		return object{"type": "number"}
	case reflect.Slice, reflect.Array:
		return object{"type": "array", "items": s.of(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.of(t.Elem())}
	case reflect.Struct:
		return s.structure(t)
	case reflect.Interface:
		return object{}
	}
	return object{"type": "integer"}
}

// nullable is a schema that also allows null.
func nullable(schema object) object {
	if name, plain := schema["type"].(string); plain {
		schema["type"] = []string{name, "null"}
		return schema
	}
	return object{"anyOf": []object{schema, {"type": "null"}}}
}

// structure describes a struct: a reference when it has a name of its own.
func (s *schemas) structure(t reflect.Type) object {
	name := componentName(t)
	if name == "" {
		return s.fields(t)
	}
	if _, known := s.components[name]; !known {
		s.components[name] = object{} // a type that contains itself ends here
		s.components[name] = s.fields(t)
	}
	return object{"$ref": "#/components/schemas/" + name}
}

// fields describes what encoding/json writes of a struct.
func (s *schemas) fields(t reflect.Type) object {
	properties, required := object{}, []string{}
	for _, f := range reflect.VisibleFields(t) {
		tag, tagged := f.Tag.Lookup("json")
		name, options, _ := strings.Cut(tag, ",")
		if !f.IsExported() || !tagged || name == "-" || name == "" {
			continue
		}
		properties[name] = s.of(f.Type)
		if f.Tag.Get("nullable") == "true" { // a slice whose nil means something else than an empty one
			properties[name] = nullable(s.of(f.Type))
		}
		if !strings.Contains(options, "omit") {
			required = append(required, name)
		}
	}
	return object{"type": "object", "properties": properties, "required": required}
}

// componentName is package and type, such as activity_Row; empty for types without a plain name.
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
