package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// readBody decodes the body into a new value of zero's type, and rejects unknown fields. If zero is nil, the body must
// be absent or an empty object.
func readBody(r *http.Request, zero any) (any, error) {
	raw, err := admission.Bytes(r.Body)
	if err != nil {
		return nil, err
	}
	if zero == nil {
		if len(bytes.TrimSpace(raw)) == 0 {
			return nil, nil
		}
		return nil, decode(raw, &struct{}{})
	}
	into := reflect.New(reflect.TypeOf(zero))
	if err := decode(raw, into.Interface()); err != nil {
		return nil, err
	}
	body := into.Elem().Interface()
	if c, ok := body.(interface{ check() error }); ok {
		return body, c.check()
	}
	return body, nil
}

// maxBody is the default body limit in bytes.
const maxBody = 1 << 20

// decode reads exactly one JSON object into a struct.
func decode(raw []byte, into any) error {
	if start := bytes.TrimLeft(raw, " \t\r\n"); len(start) == 0 || start[0] != '{' {
		return problem.BadBody("the body is not a JSON object")
	}
	if !utf8.Valid(raw) { // the decoder would replace invalid bytes
		return problem.BadBody("the body is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
			return problem.BadBody("%s must be %s, got %.60s", faultyPart(reflect.TypeOf(into), wrong),
				describeType(wrong.Type), wrong.Value)
		}
		return problem.BadBody("%.200s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return problem.BadBody("unexpected data after the JSON object")
	}
	name, err := problem.UnknownField(raw, into)
	switch {
	case err != nil:
		return problem.BadBody("%s", err)
	case name != "":
		return problem.BadBody("unknown field %.60q", name)
	}
	return nil
}

// faultyPart names the field of a wrong value. The decoder names the list or object also if one of its values is wrong.
func faultyPart(t reflect.Type, wrong *json.UnmarshalTypeError) string {
	values := []reflect.Kind{reflect.Slice, reflect.Array, reflect.Map}
	for name := range strings.SplitSeq(wrong.Field, ".") {
		for t.Kind() == reflect.Pointer || slices.Contains(values, t.Kind()) {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			return wrong.Field
		}
		for _, f := range reflect.VisibleFields(t) {
			if tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); tag == name {
				t = f.Type
				break
			}
		}
	}
	if t != wrong.Type && slices.Contains(values, t.Kind()) {
		return "each value of " + wrong.Field
	}
	return wrong.Field
}

// describeType names the JSON type of a field.
func describeType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "a boolean"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		return "an array"
	case reflect.Struct, reflect.Map, reflect.Pointer:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	default:
		return "an integer"
	}
}

// isPrintableText reports whether PostgreSQL can store a text and a terminal can print it.
func isPrintableText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' && r != '\t'
	})
}

// notNull returns nil for JSON null.
func notNull(v json.RawMessage) json.RawMessage {
	if !isSet(v) {
		return nil
	}
	return v
}

// isSet reports a value other than null.
func isSet(v json.RawMessage) bool { return len(v) > 0 && string(v) != "null" }

// readDuration parses a field that holds seconds, or text such as "90m", "24h" or "7d"; 0 if absent.
func readDuration(field string, raw json.RawMessage) (time.Duration, error) {
	if !isSet(raw) {
		return 0, nil
	}
	var text string
	wrong := problem.BadBody("%s is %.60s; use a positive number of seconds, or text such as \"90m\", \"24h\" or \"7d\"",
		field, raw)
	if json.Unmarshal(raw, &text) != nil {
		seconds, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || !(seconds > 0) || seconds > 1e9 {
			return 0, wrong
		}
		return time.Duration(math.Ceil(seconds * float64(time.Second))), nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseFloat(days, 64)
		if err != nil || !(n > 0) || n > 1e4 {
			return 0, wrong
		}
		return time.Duration(math.Ceil(n * float64(24*time.Hour))), nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, wrong
	}
	return d, nil
}

// encode writes JSON with UTC times and without HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(inUTC(v)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

var timeType = reflect.TypeFor[time.Time]()

// inUTC returns a copy of v with its times in UTC. It copies structs, slices and pointers only: times in maps, arrays
// and interface values stay unchanged. Embedded structs must be exported. Times of the database are in UTC already.
func inUTC(v any) any {
	if v == nil {
		return nil
	}
	return copyUTC(reflect.ValueOf(v)).Interface()
}

func copyUTC(v reflect.Value) reflect.Value {
	if v.Type() == timeType {
		return reflect.ValueOf(v.Interface().(time.Time).UTC())
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return v
		}
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(copyUTC(v.Elem()))
		return to
	case reflect.Slice:
		if v.IsNil() || v.Type().Elem().Kind() == reflect.Uint8 {
			return v
		}
		to := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		for i := range v.Len() {
			to.Index(i).Set(copyUTC(v.Index(i)))
		}
		return to
	case reflect.Struct:
		to := reflect.New(v.Type()).Elem()
		to.Set(v)
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				to.Field(i).Set(copyUTC(v.Field(i)))
			}
		}
		return to
	}
	return v
}
