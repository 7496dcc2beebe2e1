package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// maxBody is how many bytes of a body are read where a route does not say otherwise.
const maxBody = 1 << 20

// maxReason bounds a reason, in bytes.
const maxReason = 1000

// because is the body of every route that changes something: why.
type because struct {
	Reason string `json:"reason"`
}

// check is called once the body has been read.
func (b because) check() error {
	switch {
	case strings.TrimSpace(b.Reason) == "":
		return badBody("reason is missing: say why, it is kept in the audit")
	case len(b.Reason) > maxReason:
		return badBody("reason is longer than %d bytes", maxReason)
	case !storable(b.Reason):
		return badBody("reason has control characters")
	}
	return nil
}

// readBody decodes a body into the type of zero, and refuses what that does not say. A route without a body takes none, or an
// empty object: what is said to it would be ignored.
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

// decode reads exactly one JSON object into a struct.
func decode(raw []byte, into any) error {
	if start := bytes.TrimLeft(raw, " \t\r\n"); len(start) == 0 || start[0] != '{' {
		return badBody("the body is not a JSON object")
	}
	if !utf8.Valid(raw) { // the decoder would put other characters in the place of what is not
		return badBody("the body is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
			return badBody("%s cannot be a JSON %s: it takes %s", wrong.Field, wrong.Value, takes(wrong.Type))
		}
		return badBody("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return badBody("there is more in the body after the JSON object")
	}
	name, err := problem.Stray(raw, into)
	switch {
	case err != nil:
		return badBody("%s", err)
	case name != "":
		return badBody("unknown field %.60q", name)
	}
	return nil
}

// takes says in words what a field of a type takes.
func takes(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a text"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map, reflect.Pointer:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	default:
		return "a whole number"
	}
}

func badBody(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-body", "Bad body")
}

// storable reports text that PostgreSQL keeps and a terminal survives.
func storable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' && r != '\t'
	})
}
