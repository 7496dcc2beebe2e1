package api

import (
	"encoding/json"
	"reflect"
	"strings"
	"unicode"
)

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
