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
	csv   bool // CSV omits raw JSON columns
}

// serve chains authentication, admission, deadlines, idempotency and the handler.
func (s *server) serve(rt route) http.Handler {
	next := rt.httpHandler
	if next == nil {
		next = s.apiHandler(rt)
	}
	if rt.idempotent {
		next = s.withIdempotency(rt, next)
	}
	return s.authenticateAndAdmit(rt, s.withDeadline(rt, next))
}

// apiHandler adapts rt.fn to http.Handler. writeCSV reads several pages, so its response has no replica header.
func (s *server) apiHandler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := parseRequest(r, rt)
		if err != nil {
			s.writeError(w, r, rt, err, "")
			return
		}
		if wantsCSV(rt, req) {
			s.writeCSV(w, r, rt, req)
			return
		}
		resp, source, err := s.dispatch(rt, req)
		if err != nil {
			s.writeError(w, r, rt, err, resp.trace)
			return
		}
		source.SetHeader(w.Header())
		resp.status = cmp.Or(resp.status, rt.status, http.StatusOK)
		s.write(w, r, rt, resp)
	})
}

// dispatch calls the route's function, possibly on the replica.
func (s *server) dispatch(rt route, req request) (resp response, source *replica.Source, err error) {
	if !rt.replica {
		resp, err = rt.invoke(req)
		return resp, nil, err
	}
	r := req.Request
	source, err = s.read.Do(r.Context(), replica.Fresh(r), func(ctx context.Context) (err error) {
		req.Request = r.WithContext(ctx)
		if replica.From(ctx).Replica() { // no retry on the replica
			resp, err = rt.handle(req)
			return err
		}
		resp, err = rt.invoke(req)
		return err
	})
	return resp, source, err
}

// invoke calls the route's function. It retries repeatable requests after a broken database connection.
func (rt route) invoke(req request) (resp response, err error) {
	retryable := req.Method == http.MethodGet || req.Method == http.MethodHead || rt.repeatable ||
		rt.derivesKey && req.Header.Get(keyHeader) != ""
	if !retryable {
		return rt.handle(req)
	}
	err = postgres.RetryOnDisconnect(req.Context(), func() error {
		resp, err = rt.handle(req)
		return err
	})
	return resp, err
}

// parseRequest reads query and body. Public routes ignore unknown parameters, because probes send many.
func parseRequest(r *http.Request, rt route) (req request, err error) {
	req.Request = r
	if rt.access != Public {
		if req.query, err = readQuery(r.URL.RawQuery, rt.params); err != nil {
			return req, err
		}
	}
	// bufferBody skips the body of GET and HEAD
	if rt.body != nil || r.Method != http.MethodGet && r.Method != http.MethodHead {
		req.body, err = readBody(r, rt.body)
	}
	return req, err
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

// write encodes the body before it sends the first byte, so an encoding error can still become a problem response.
func (s *server) write(w http.ResponseWriter, r *http.Request, rt route, resp response) {
	encoded, err := encode(resp.body)
	if err != nil {
		s.writeError(w, r, rt, err, resp.trace)
		return
	}
	if resp.trace != "" {
		w.Header().Set("X-Trace-Id", resp.trace)
	}
	if resp.revision > 0 {
		w.Header().Set("ETag", etag(resp.revision))
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(encoded)))
	w.WriteHeader(resp.status)
	if _, err := w.Write(encoded); err != nil {
		s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
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

// withMiddleware adds security headers, the log line, and panic handling.
func (s *server) withMiddleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		rec := &statusRecorder{ResponseWriter: w}
		defer func() {
			s.log.DebugContext(r.Context(), "request", "method", r.Method, "path", problem.Path(r), "status", rec.status,
				"bytes", rec.bytes, "duration", time.Since(began))
		}()
		defer func() {
			if value := recover(); value != nil {
				s.handlePanic(rec, r, value)
			}
		}()
		setSecurityHeaders(w.Header())
		if s.isDraining() {
			w.Header().Set("Connection", "close") // makes the client reconnect to another process
		}
		next.ServeHTTP(rec, r)
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

// handlePanic writes a 500 unless the handler already wrote.
func (s *server) handlePanic(w *statusRecorder, r *http.Request, value any) {
	if value == http.ErrAbortHandler { //nolint:errorlint // net/http compares the value
		panic(value)
	}
	s.log.ErrorContext(r.Context(), "request panicked", "method", r.Method, "path", problem.Path(r), "panic", value,
		"stack", string(debug.Stack()))
	if w.status != 0 {
		panic(http.ErrAbortHandler) // abort the partial response
	}
	s.writeError(w, r, w.route, problem.New(http.StatusInternalServerError, "internal server error"), "")
}

// statusRecorder stores status and size for the log, and the route for the response to a panic.
type statusRecorder struct {
	http.ResponseWriter
	status, bytes int
	route         route // set by authenticateAndAdmit
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
	case !isPrintableText(b.Reason):
		return problem.BadBody("reason has control characters")
	}
	return nil
}

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
			return problem.BadBody("%s must be %s, got %s", wrong.Field, describeType(wrong.Type), wrong.Value)
		}
		return problem.BadBody("%s", strings.TrimPrefix(err.Error(), "json: "))
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
