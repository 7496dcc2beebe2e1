package api

import (
	"bytes"
	"cmp"
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

// request is a validated request.
type request struct {
	*http.Request
	query query
	body  any
	csv   bool // the response is a table, without inputs and results
}

// serve chains authorization, deadlines, idempotency and the handler.
func (s *server) serve(rt route) http.Handler {
	next := rt.handler
	if next == nil {
		next = s.apiHandler(rt)
	}
	if rt.idempotent {
		next = s.withIdempotency(rt, next)
	}
	return s.authorize(rt, s.withDeadline(rt, next))
}

// apiHandler adapts a route of this package.
func (s *server) apiHandler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in, err := parseRequest(r, rt)
		if err != nil {
			s.writeError(w, r, rt, err, "")
			return
		}
		if wantsCSV(rt, in) {
			s.writeCSV(w, r, rt, in)
			return
		}
		got, from, err := s.handle(rt, in)
		if err != nil {
			s.writeError(w, r, rt, err, got.trace)
			return
		}
		from.Tell(w.Header())
		if got.status == 0 {
			got.status = max(rt.status, http.StatusOK)
		}
		s.write(w, r, got)
	})
}

// handle calls the route's function, possibly on the replica.
func (s *server) handle(rt route, in request) (got response, from *replica.Source, err error) {
	if !rt.replica {
		got, err = rt.invoke(in)
		return got, nil, err
	}
	r := in.Request
	from, err = s.read.Do(r.Context(), replica.Fresh(r), func(ctx context.Context) (err error) {
		in.Request = r.WithContext(ctx)
		if replica.From(ctx).Replica() { // no retry on the replica
			got, err = rt.handle(in)
			return err
		}
		got, err = rt.invoke(in)
		return err
	})
	return got, from, err
}

// invoke calls the route's function. It retries repeatable requests after a broken database connection.
func (rt route) invoke(in request) (got response, err error) {
	retryable := in.Method == http.MethodGet || in.Method == http.MethodHead || rt.repeatable ||
		rt.keyed && in.Header.Get(keyHeader) != ""
	if !retryable {
		return rt.handle(in)
	}
	err = postgres.RetryOnDisconnect(in.Context(), func() error {
		got, err = rt.handle(in)
		return err
	})
	return got, err
}

// parseRequest reads query and body. Public routes ignore unknown parameters, because probes send many.
func parseRequest(r *http.Request, rt route) (in request, err error) {
	in.Request = r
	if rt.access != Public {
		if in.query, err = readQuery(r.URL.RawQuery, rt.params); err != nil {
			return in, err
		}
	}
	// bufferBody skips the body of GET and HEAD
	if rt.body != nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
		in.body, err = readBody(r, rt.body)
	}
	return in, err
}

// writeError writes an error in the route's format.
func (s *server) writeError(w http.ResponseWriter, r *http.Request, rt route, err error, traceID string) {
	if rt.openAI {
		problem.WriteOpenAI(w, r, err, traceID, s.log)
		return
	}
	if rt.page && !rt.stream && s.pages != nil {
		s.writeErrorPage(w, r, err)
		return
	}
	problem.Write(w, r, err, traceID, s.log)
}

// write encodes the value before it sends the first byte, so the response is complete or a problem.
func (s *server) write(w http.ResponseWriter, r *http.Request, a response) {
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

// withLogging adds security headers, the log line, and panic handling.
func (s *server) withLogging(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		seen := &statusRecorder{ResponseWriter: w}
		defer func() {
			s.log.DebugContext(r.Context(), "request", "method", r.Method, "path", problem.Path(r), "status", seen.status,
				"bytes", seen.bytes, "duration", time.Since(began))
		}()
		defer func() {
			if value := recover(); value != nil {
				s.handlePanic(seen, r, value)
			}
		}()
		setSecurityHeaders(w.Header())
		if s.isDraining() {
			w.Header().Set("Connection", "close") // makes the client reconnect to another process
		}
		next.ServeHTTP(seen, r)
	})
}

// setSecurityHeaders sets strict defaults. Page handlers override them.
func setSecurityHeaders(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
}

// handlePanic responds for a panicked handler that has not responded.
func (s *server) handlePanic(w *statusRecorder, r *http.Request, value any) {
	if value == http.ErrAbortHandler { //nolint:errorlint // net/http compares the value
		panic(value)
	}
	s.log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", problem.Path(r), "panic", value,
		"stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // close the connection of a partial response
	}
	problem.Write(w, r, problem.New(http.StatusInternalServerError, "internal error; see the log"), "", s.log)
}

// statusRecorder stores status and size for the log.
type statusRecorder struct {
	http.ResponseWriter
	status, bytes int
}

func (w *statusRecorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusRecorder) Write(b []byte) (int, error) {
	w.status = cmp.Or(w.status, http.StatusOK)
	n, err := w.ResponseWriter.Write(b)
	w.bytes += n
	return n, err
}

// Unwrap supports http.ResponseController.
func (w *statusRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// maxBody is the default body limit in bytes.
const maxBody = 1 << 20

// maxReason bounds a reason in bytes.
const maxReason = 1000

// reasonRequest is the body of a change that needs only a reason.
type reasonRequest struct {
	Reason string `json:"reason"`
}

func (b reasonRequest) check() error {
	switch {
	case strings.TrimSpace(b.Reason) == "":
		return problem.BadBody("reason is missing; it is kept in the audit log")
	case len(b.Reason) > maxReason:
		return problem.BadBody("reason is longer than %d bytes", maxReason)
	case !storable(b.Reason):
		return problem.BadBody("reason has control characters")
	}
	return nil
}

// readBody decodes a body into the type of zero and rejects unknown fields. A route without a body accepts no body or
// an empty object.
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
		return problem.BadBody("the body is not a JSON object")
	}
	if !utf8.Valid(raw) { // the decoder would replace invalid bytes
		return problem.BadBody("the body is not UTF-8")
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
			return problem.BadBody("%s is a JSON %s; send %s", wrong.Field, wrong.Value, describeType(wrong.Type))
		}
		return problem.BadBody("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return problem.BadBody("the body continues after the JSON object")
	}
	name, err := problem.Stray(raw, into)
	switch {
	case err != nil:
		return problem.BadBody("%s", err)
	case name != "":
		return problem.BadBody("unknown field %.60q", name)
	}
	return nil
}

// describeType names the JSON type of a field.
func describeType(t reflect.Type) string {
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

// storable reports whether PostgreSQL can store a text and a terminal can print it.
func storable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return unicode.IsControl(r) && r != '\n' && r != '\t'
	})
}

var timeType = reflect.TypeFor[time.Time]()

// inUTC returns a copy of v with all times in UTC, because the driver returns local times. Embedded structs must be
// exported.
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
