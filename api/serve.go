package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// request is one that has passed its route's checks.
type request struct {
	*http.Request
	query query
	body  any
}

// serve runs a route: who calls, what is sent, its handler.
func (s *server) serve(rt route) http.Handler {
	next := rt.handler
	if next == nil {
		next = s.own(rt)
	}
	if rt.idempotent {
		next = s.once(rt, next)
	}
	return s.enter(rt, s.timed(rt, next))
}

// own runs a route of this package: its query, its body, its function.
func (s *server) own(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, err := accepted(r, rt)
		if err != nil {
			s.refuse(w, r, rt, err, "")
			return
		}
		got, from, err := s.run(rt, in)
		if err != nil {
			s.refuse(w, r, rt, err, got.trace)
			return
		}
		from.Tell(w.Header())
		if got.status == 0 {
			got.status = max(rt.status, http.StatusOK)
		}
		s.write(w, r, got)
	})
}

// run calls the route's function, which may read from the replica.
func (s *server) run(rt route, in request) (got answer, from *replica.Source, err error) {
	if !rt.replica {
		got, err = rt.run(in)
		return got, nil, err
	}
	r := in.Request
	from, err = s.read.Do(r.Context(), replica.Fresh(r), func(ctx context.Context) (err error) {
		in.Request = r.WithContext(ctx)
		if replica.From(ctx).Replica() { // a connection that breaks is no reason to ask there again
			got, err = rt.handle(in)
			return err
		}
		got, err = rt.run(in)
		return err
	})
	return got, from, err
}

// run calls the route's function. What may be done twice is done again when a connection to the database broke under
// it, so that a client need not.
func (rt route) run(in request) (got answer, err error) {
	twice := in.Method == http.MethodGet || in.Method == http.MethodHead || rt.repeatable || rt.keyed && in.Header.Get(keyHeader) != ""
	if !twice {
		return rt.handle(in)
	}
	err = postgres.Again(in.Context(), func() error {
		got, err = rt.handle(in)
		return err
	})
	return got, err
}

// accepted reads query and body. Probes come with parameters of all kinds, and are not refused for them.
func accepted(r *http.Request, rt route) (in request, err error) {
	in.Request = r
	if rt.access != Public {
		if in.query, err = readQuery(r.URL.RawQuery, rt.params); err != nil {
			return in, err
		}
	}
	if rt.body != nil || r.Method != http.MethodGet && r.Method != http.MethodHead { // whose body is not read (see takeBody)
		in.body, err = readBody(r, rt.body)
	}
	return in, err
}

// refuse answers with an error, in the route's format.
func (s *server) refuse(w http.ResponseWriter, r *http.Request, rt route, err error, traceID string) {
	if rt.openAI {
		problem.WriteOpenAI(w, r, err, traceID, s.log)
		return
	}
	if rt.page && !rt.stream && s.pages != nil {
		s.refusePage(w, r, err)
		return
	}
	problem.Write(w, r, err, traceID, s.log)
}

// write answers with a value. It is encoded before anything is sent, so an answer is whole or a problem.
func (s *server) write(w http.ResponseWriter, r *http.Request, a answer) {
	encoded, err := encode(a.body)
	if err != nil {
		problem.Write(w, r, err, a.trace, s.log)
		return
	}
	if a.trace != "" {
		w.Header().Set("X-Trace-Id", a.trace)
	}
	if a.revision > 0 {
		w.Header().Set("ETag", etag(a.revision))
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(encoded)))
	w.WriteHeader(a.status)
	if _, err := w.Write(encoded); err != nil {
		s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
	}
}

// encode is JSON with times in UTC and without HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(inUTC(v)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// wrap is what every request goes through: security headers, the log line, and panics.
func (s *server) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		seen := &recorder{ResponseWriter: w}
		defer func() {
			s.log.DebugContext(r.Context(), "request", "method", r.Method, "path", problem.Path(r), "status", seen.status,
				"bytes", seen.bytes, "duration", time.Since(began))
		}()
		defer func() {
			if value := recover(); value != nil {
				s.panicked(seen, r, value)
			}
		}()
		secure(w.Header())
		if s.leaving() {
			w.Header().Set("Connection", "close") // the client's next request goes to a process that stays
		}
		next.ServeHTTP(seen, r)
	})
}

// secure sets what a browser has to know. A handler that serves a page says otherwise for itself.
func secure(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// panicked answers for a handler that panicked, if it has not answered itself.
func (s *server) panicked(w *recorder, r *http.Request, value any) {
	if value == http.ErrAbortHandler { //nolint:errorlint // the very value that net/http asks for
		panic(value)
	}
	s.log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", problem.Path(r), "panic", value,
		"stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // half an answer is out: the connection is closed, so that it shows
	}
	problem.Write(w, r, problem.New(http.StatusInternalServerError, "something went wrong here; the log has the cause"), "", s.log)
}

// recorder remembers what was answered.
type recorder struct {
	http.ResponseWriter
	status, bytes int
}

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(b)
	w.bytes += n
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

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

// readBody decodes a body into the type of zero, and refuses what that does not say. A route without a body takes
// none, or an empty object: what is said to it would be ignored.
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

var timeType = reflect.TypeFor[time.Time]()

// inUTC is v with every time in it put into UTC: the database driver gives times in the zone of the
// process. What v points to is not changed. Structs that are embedded have to be exported.
func inUTC(v any) any {
	if v == nil {
		return nil
	}
	return shift(reflect.ValueOf(v)).Interface()
}

// shift copies as far down as times may be.
func shift(v reflect.Value) reflect.Value {
	if v.Type() == timeType {
		return reflect.ValueOf(v.Interface().(time.Time).UTC())
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return v
		}
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(shift(v.Elem()))
		return to
	case reflect.Slice:
		if v.IsNil() || v.Type().Elem().Kind() == reflect.Uint8 {
			return v
		}
		to := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		for i := range v.Len() {
			to.Index(i).Set(shift(v.Index(i)))
		}
		return to
	case reflect.Struct:
		to := reflect.New(v.Type()).Elem()
		to.Set(v)
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				to.Field(i).Set(shift(v.Field(i)))
			}
		}
		return to
	}
	return v
}
