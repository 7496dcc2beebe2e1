package engineroom

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// backField names the form's page. performAction does not forward it.
const backField = "back"

// onceField has the idempotency key of a form whose answer has a secret, so a reload makes no other secret.
const onceField = "once"

// performAction runs an action. It calls the API's route as the sender of the form, and redirects back with a message.
func (room *Room) performAction(a action) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			room.Refuse(w, r, problem.New(http.StatusBadRequest, "this is no form of an action"))
			return
		}
		back := originPage(r)
		body, err := a.body(r.PostForm)
		if err != nil {
			room.redirectBack(w, r, back, flash{Text: err.Error(), Bad: true})
			return
		}
		status, header, reply := room.callRoute(r, a, body)
		switch {
		case status == http.StatusUnauthorized:
			http.Redirect(w, r, "/login?unsent=1&next="+url.QueryEscape(back), http.StatusSeeOther)
		case status == http.StatusCreated && a.returnsSecret():
			room.showSecret(w, r, back, reply)
		case status >= http.StatusOK && status < http.StatusMultipleChoices:
			room.redirectBack(w, r, back, flash{Text: a.successMessage(r, reply), Trace: header.Get("X-Trace-Id")})
		default:
			room.redirectBack(w, r, back, flash{Text: problemDetail(status, reply), Bad: true, Trace: header.Get("X-Trace-Id")})
		}
	})
}

// redirectBack stores a message and redirects.
func (room *Room) redirectBack(w http.ResponseWriter, r *http.Request, back string, f flash) {
	room.setFlash(w, r, f)
	setSecurityHeaders(w.Header())
	http.Redirect(w, r, back, http.StatusSeeOther)
}

// originPage returns the form's page.
func originPage(r *http.Request) string {
	if back := r.PostForm.Get(backField); back != "" {
		return origin.Path(back)
	}
	return origin.Referer(r)
}

// callRoute sends the body to the route within this process.
func (room *Room) callRoute(r *http.Request, a action, body []byte) (status int, header http.Header, reply []byte) {
	target := *r.URL
	target.Path, target.RawPath, target.RawQuery = strings.TrimPrefix(target.Path, "/act"),
		strings.TrimPrefix(target.RawPath, "/act"), ""
	inner, err := http.NewRequestWithContext(r.Context(), a.method, target.RequestURI(), bytes.NewReader(body))
	if err != nil || room.API == nil {
		room.Logger.ErrorContext(r.Context(), "action not run: there is no API", "error", err)
		return http.StatusInternalServerError, http.Header{}, nil
	}
	inner.RequestURI, inner.Host, inner.RemoteAddr, inner.TLS = target.RequestURI(), r.Host, r.RemoteAddr, r.TLS
	inner.Header.Set("Content-Type", "application/json")
	inner.Header.Set("Accept", "application/json")             // selects the complete outcome
	for _, name := range []string{"Authorization", "Cookie"} { // other headers describe the form
		if values, ok := r.Header[name]; ok {
			inner.Header[name] = values
		}
	}
	if key := r.PostForm.Get(onceField); key != "" {
		inner.Header.Set("Idempotency-Key", key)
	}
	a.setPrecondition(r.PostForm, inner.Header)
	recorder := &responseRecorder{header: http.Header{}}
	room.API().ServeHTTP(recorder, inner)
	// A handler that writes nothing has the status 200.
	return max(recorder.status, http.StatusOK), recorder.header, recorder.body.Bytes()
}

// body encodes the form as the JSON body of the route. It rejects fields that the action does not have.
func (a action) body(form url.Values) ([]byte, error) {
	kinds := map[string]kind{}
	for _, f := range a.fields {
		kinds[f.name] = f.kind
	}
	object := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(form)) {
		k, known := kinds[name]
		if !known && name != backField && name != onceField {
			return nil, fmt.Errorf("the form has a field %.60q, which this action does not accept", name)
		}
		if !known || k == asRevision {
			continue
		}
		value, given, err := k.read(form[name])
		if err != nil {
			return nil, fmt.Errorf("%s %w", name, err)
		}
		if given {
			object[name] = value
		}
	}
	return json.Marshal(object)
}

// setPrecondition sets the precondition header with the form's revision.
func (a action) setPrecondition(form url.Values, header http.Header) {
	for _, f := range a.fields {
		if f.kind != asRevision || form.Get(f.name) == "" {
			continue
		}
		if revision := form.Get(f.name); revision == "0" {
			header.Set("If-None-Match", "*")
		} else {
			header.Set("If-Match", strconv.Quote(revision))
		}
	}
}

// read converts a form's values. A list uses all of them, any other kind the last. given is false for an empty field,
// which the body omits.
func (k kind) read(values []string) (value any, given bool, err error) {
	last := values[len(values)-1]
	if strings.TrimSpace(last) == "" && k != asList {
		return nil, false, nil
	}
	switch k {
	case asText:
		return strings.ReplaceAll(last, "\r\n", "\n"), true, nil
	case asList:
		list := []string{}
		for _, v := range values {
			for line := range strings.Lines(v) {
				if line = strings.TrimSpace(line); line != "" {
					list = append(list, line)
				}
			}
		}
		return list, len(list) > 0, nil
	case asFlag:
		if last == "on" {
			return true, true, nil
		}
		on, err := strconv.ParseBool(last)
		if err != nil {
			return nil, false, fmt.Errorf("is %.60q; it can be true or false", last)
		}
		return on, true, nil
	case asNumber:
		if _, err := strconv.ParseFloat(strings.TrimSpace(last), 64); err != nil ||
			!json.Valid([]byte(strings.TrimSpace(last))) {
			return nil, false, fmt.Errorf("is %.60q; it has to be a number", last)
		}
		return json.Number(strings.TrimSpace(last)), true, nil
	case asRevision: // setPrecondition sends it
		return nil, false, nil
	case asJSON:
		if !json.Valid([]byte(last)) {
			return nil, false, fmt.Errorf("is not JSON; a text needs quotation marks")
		}
		return json.RawMessage(last), true, nil
	}
	return nil, false, fmt.Errorf("cannot be read")
}

// successMessage returns the message of a success.
func (a action) successMessage(r *http.Request, body []byte) string {
	text := a.success
	if text == "" { // the answer of the route has the message
		return problemDetail(http.StatusOK, body)
	}
	for _, m := range wildcard.FindAllStringSubmatch(a.path, -1) {
		text = strings.ReplaceAll(text, m[0], cut(120, r.PathValue(m[1])))
	}
	return text
}

// problemDetail returns the message of a problem.
func problemDetail(status int, body []byte) string {
	var p problem.Problem
	if json.Unmarshal(body, &p) != nil || p.Detail == "" {
		return fmt.Sprintf("The action failed with status %d. The log shows the cause.", status)
	}
	return p.Detail
}

// responseRecorder records a response.
type responseRecorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *responseRecorder) Header() http.Header { return a.header }

func (a *responseRecorder) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *responseRecorder) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// action is a route of the API that a form may call, with its fields.
type action struct {
	method  string // of the route; the form always uses POST
	path    string // of the route, in http.ServeMux syntax
	fields  []field
	success string // message of a success, {name} is a path value; empty for the detail of the answer
}

// field is a field of the body.
type field struct {
	name string
	kind kind
}

// kind is the conversion of a form field.
type kind int

const (
	asText     kind = iota // a text
	asList                 // all values, split into lines
	asFlag                 // a boolean in the syntax of strconv.ParseBool, or "on"
	asNumber               // a number
	asJSON                 // JSON
	asRevision             // the shown revision, for If-Match or, for 0 (absent), If-None-Match
)

// returnsSecret reports whether the response has a secret, which the page shows once.
func (a action) returnsSecret() bool {
	return a.path == "/v1/tokens" || strings.HasSuffix(a.path, "/login_links")
}
