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
			http.Redirect(w, r, "/login?next="+url.QueryEscape(back), http.StatusSeeOther)
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
	inner.Header.Set("Accept", "application/json") // selects the complete outcome
	for _, name := range []string{"Authorization", "Cookie"} {
		if values, ok := r.Header[name]; ok {
			inner.Header[name] = values
		}
	}
	a.setPrecondition(r.PostForm, inner.Header)
	recorder := &responseRecorder{header: http.Header{}}
	room.API().ServeHTTP(recorder, inner)
	return max(recorder.status, http.StatusOK), recorder.header, recorder.body.Bytes()
}

// body encodes the form for the route.
func (a action) body(form url.Values) ([]byte, error) {
	kinds := map[string]kind{}
	for _, f := range a.fields {
		kinds[f.name] = f.kind
	}
	object := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(form)) {
		k, known := kinds[name]
		if !known && name != backField {
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

// read converts a form's values. given is false for an empty field.
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
	asFlag                 // true for "true", "on" and "1", false for "false", "0" and nothing
	asNumber               // a number
	asJSON                 // JSON
	asRevision             // the shown revision, for If-Match or, for 0 (absent), If-None-Match
)

// reasonField is the body of most actions.
var reasonField = []field{{"reason", asText}}

// versionedFields are the fields of an action on a versioned object.
var versionedFields = append([]field{{"if_revision", asRevision}}, reasonField...)

// returnsSecret reports whether the response has a secret, which the page shows once.
func (a action) returnsSecret() bool {
	return a.path == "/v1/tokens" || strings.HasSuffix(a.path, "/login_links")
}

// actions lists all actions. The Engine Room calls no other routes.
func actions() []action {
	return slices.Concat(accessActions(), triggerActions(), []action{
		{
			"POST", "/v1/monitor/acknowledge", append([]field{{"mark", asText}}, reasonField...),
			"The reasons are acknowledged. They count again when they change.",
		},
		{"POST", "/v1/pause", reasonField, "Autonomous work is paused."},
		{"POST", "/v1/resume", reasonField, "Autonomous work is resumed."},
		{
			"POST", "/v1/executions", append(
				[]field{{"flow", asText}, {"input", asJSON}, {"thread_id", asText}}, reasonField...),
			"The execution is started.",
		},
		{"POST", "/v1/executions/{id}/cancel", reasonField, "The execution is cancelled."},
		{"POST", "/v1/executions/bulk", append([]field{{"action", asText}, {"ids", asList}}, reasonField...), ""},
		{"POST", "/v1/executions/{id}/retry", nil, "A new execution repeats the failed step."},
		{"POST", "/v1/executions/{id}/fork", append([]field{{"from", asText}, {"input", asJSON}, {"latest", asFlag}},
			reasonField...), "A new execution continues from there."},
		{"POST", "/v1/executions/{id}/replay", nil, "The execution was replayed against its record."},
		{"POST", "/v1/skills/{name}/enable", versionedFields, "Skill {name} is enabled."},
		{"POST", "/v1/skills/{name}/disable", versionedFields, "Skill {name} is disabled."},
		{"POST", "/v1/lanes/{lane}/break", reasonField, "Lane {lane} is released."},
		{"POST", "/v1/approvals/{id}", []field{{"decision", asText}, {"reason", asText}}, "The decision is recorded. The " +
			"waiting run resumes."},
		{"POST", "/v1/objectives/{id}/accept", versionedFields, "The objective is accepted."},
		{"POST", "/v1/objectives/{id}/reject", versionedFields, "The objective is rejected."},
		{"POST", "/v1/objectives/{id}/pause", versionedFields, "The objective is paused."},
		{"POST", "/v1/objectives/{id}/resume", versionedFields, "The objective is resumed."},
		{"POST", "/v1/memory/{id}/forget", versionedFields, "The entry is forgotten."},
		{
			"POST", "/v1/memory/conflicts/{id}/decide", append([]field{{"decision", asText}}, versionedFields...),
			"The conflict is decided.",
		},
		{
			"POST", "/v1/evals/runs",
			[]field{{"suite", asText}, {"model", asText}, {"trials", asNumber}},
			"The run has started. Its results appear here.",
		},
		{
			"POST", "/v1/evals/labels", []field{
				{"run", asText}, {"case", asText}, {"trial", asNumber}, {"label", asText}, {"note", asText},
			}, "The label is stored.",
		},
		{"PATCH", "/v1/threads/{id}", []field{{"title", asText}}, "The name is changed."},
		{"POST", "/v1/threads/{id}/messages", []field{{"content", asText}}, "The message was sent, or waits for its turn."},
	})
}

// triggerActions lists the actions on automations, events and webhooks, which start executions.
func triggerActions() []action {
	return []action{
		{
			"POST", "/v1/events",
			[]field{{"event", asText}, {"key", asText}, {"data", asJSON}, {"id", asText}},
			"The event was emitted.",
		},
		{"POST", "/v1/automations/{id}/enable", versionedFields, "Automation {id} is enabled."},
		{"POST", "/v1/automations/{id}/disable", versionedFields, "Automation {id} is disabled."},
		{"POST", "/v1/automations/{id}/accept", versionedFields, "Automation {id} is accepted."},
		{"POST", "/v1/automations/{id}/run", reasonField, "Automation {id} runs now."},
		{
			"POST", "/v1/webhooks/deliveries/{id}/replay", append([]field{{"replays", asNumber}}, reasonField...),
			"The delivery is replayed.",
		},
		{"POST", "/v1/webhooks/outbox/{id}/resend", reasonField, "The message gets one more attempt."},
		{"POST", "/v1/webhooks/targets/{id}/enable", reasonField, "Target {id} is enabled."},
		{"POST", "/v1/webhooks/targets/{id}/disable", reasonField, "Target {id} is disabled."},
		{"POST", "/v1/webhooks/endpoints/{id}/enable", reasonField, "Endpoint {id} is enabled."},
		{"POST", "/v1/webhooks/endpoints/{id}/disable", reasonField, "Endpoint {id} is disabled."},
		{"POST", "/v1/automations/runs/{id}/redrive", reasonField, "The run gets one more attempt."},
	}
}

// accessActions lists the actions on principals and their rights.
func accessActions() []action {
	return []action{
		{
			"POST", "/v1/principals", append([]field{{"name", asText}, {"kind", asText}, {"role", asText}}, reasonField...),
			"The principal is created.",
		},
		{
			"PATCH", "/v1/principals/{id}", append([]field{{"role", asText}, {"enabled", asFlag}}, reasonField...),
			"The principal is changed.",
		},
		{
			"POST", "/v1/principals/{id}/identities", append([]field{{"issuer", asText}, {"subject", asText}}, reasonField...),
			"The identity is linked.",
		},
		{"POST", "/v1/principals/{id}/login_links", reasonField, "The link is created."},
		{
			"POST", "/v1/tokens", append([]field{
				{"principal", asText}, {"name", asText}, {"scopes", asList}, {"expires_in", asText},
			}, reasonField...), "The token is created.",
		},
		{"POST", "/v1/tokens/{id}/revoke", reasonField, "The token is revoked."},
		{"POST", "/v1/sessions/{id}/revoke", reasonField, "The session has ended."},
		{"POST", "/v1/channels/pair", append([]field{{"code", asText}}, reasonField...), "The sender may write."},
		{"POST", "/v1/channels/{id}/unpair", append([]field{{"sender", asText}}, reasonField...), "The sender is forgotten."},
		{"POST", "/v1/channels/{id}/enable", reasonField, "Channel {id} is enabled."},
		{"POST", "/v1/channels/{id}/disable", reasonField, "Channel {id} is disabled."},
	}
}
