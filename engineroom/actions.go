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

	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// backField says where the form was; it is not sent on.
const backField = "back"

// act pulls a lever: it calls the route of the API as the one who sent the form, and goes back to where the form
// was with a message of what came of it.
func (room *Room) act(l lever) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseForm(); err != nil {
			room.Refuse(w, r, problem.New(http.StatusBadRequest, "this is not the form of a lever"))
			return
		}
		back := whereFrom(r)
		body, err := l.body(r.PostForm)
		if err != nil {
			room.goBack(w, r, back, flash{Text: err.Error(), Bad: true})
			return
		}
		status, header, said := room.call(r, l, body)
		switch {
		case status == http.StatusUnauthorized:
			http.Redirect(w, r, "/login?next="+url.QueryEscape(back), http.StatusSeeOther)
		case status >= http.StatusOK && status < http.StatusMultipleChoices:
			room.goBack(w, r, back, flash{Text: l.told(r), Trace: header.Get("X-Trace-Id")})
		default:
			room.goBack(w, r, back, flash{Text: detail(status, said), Bad: true, Trace: header.Get("X-Trace-Id")})
		}
	})
}

// goBack leaves a message and shows the page again.
func (room *Room) goBack(w http.ResponseWriter, r *http.Request, back string, f flash) {
	room.setFlash(w, r, f)
	guard(w.Header())
	http.Redirect(w, r, back, http.StatusSeeOther)
}

// whereFrom is the page that the form was on.
func whereFrom(r *http.Request) string {
	if given := r.PostForm.Get(backField); given != "" {
		return local.Path(given)
	}
	from, err := url.Parse(r.Referer())
	if err != nil || from.Host != r.Host {
		return "/"
	}
	return local.Path(from.RequestURI())
}

// call sends the body to the route, in this process.
func (room *Room) call(r *http.Request, l lever, body []byte) (status int, header http.Header, said []byte) {
	target := *r.URL
	target.Path, target.RawPath, target.RawQuery = strings.TrimPrefix(target.Path, "/act"), strings.TrimPrefix(target.RawPath, "/act"), ""
	inner, err := http.NewRequestWithContext(r.Context(), l.method, target.RequestURI(), bytes.NewReader(body))
	if err != nil || room.API == nil {
		room.Logger.ErrorContext(r.Context(), "lever not pulled: there is no API", "error", err)
		return http.StatusInternalServerError, http.Header{}, nil
	}
	inner.RequestURI, inner.Host, inner.RemoteAddr, inner.TLS = target.RequestURI(), r.Host, r.RemoteAddr, r.TLS
	inner.Header.Set("Content-Type", "application/json")
	inner.Header.Set("Accept", "application/json") // the whole of what came of it
	for _, name := range []string{"Authorization", "Cookie"} {
		if given, has := r.Header[name]; has {
			inner.Header[name] = given
		}
	}
	l.condition(r.PostForm, inner.Header)
	answer := &answered{header: http.Header{}}
	room.API().ServeHTTP(answer, inner)
	return max(answer.status, http.StatusOK), answer.header, answer.body.Bytes()
}

// body is the JSON that the route reads.
func (l lever) body(form url.Values) ([]byte, error) {
	kinds := map[string]kind{}
	for _, f := range l.fields {
		kinds[f.name] = f.kind
	}
	object := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(form)) {
		k, known := kinds[name]
		if !known && name != backField {
			return nil, fmt.Errorf("the form has a field %.60q, which this lever does not take", name)
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

// condition says to the route on which revision the form is based.
func (l lever) condition(form url.Values, header http.Header) {
	for _, f := range l.fields {
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

// read makes a value of what a form has. given is false for a field that was left empty.
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
		if _, err := strconv.ParseFloat(strings.TrimSpace(last), 64); err != nil || !json.Valid([]byte(strings.TrimSpace(last))) {
			return nil, false, fmt.Errorf("is %.60q; it has to be a number", last)
		}
		return json.Number(strings.TrimSpace(last)), true, nil
	case asRevision: // see condition
		return nil, false, nil
	case asJSON:
		if !json.Valid([]byte(last)) {
			return nil, false, fmt.Errorf("is not JSON; a text is written in quotation marks")
		}
		return json.RawMessage(last), true, nil
	}
	return nil, false, fmt.Errorf("cannot be read")
}

// told is what the page says when it worked.
func (l lever) told(r *http.Request) string {
	text := l.done
	for _, m := range wildcard.FindAllStringSubmatch(l.path, -1) {
		text = strings.ReplaceAll(text, m[0], cut(120, r.PathValue(m[1])))
	}
	return text
}

// detail is what a problem says.
func detail(status int, body []byte) string {
	var p problem.Problem
	if json.Unmarshal(body, &p) != nil || p.Detail == "" {
		return fmt.Sprintf("It did not work: status %d. The log has the cause.", status)
	}
	return p.Detail
}

// answered keeps what a handler answers.
type answered struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *answered) Header() http.Header { return a.header }

func (a *answered) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
}

func (a *answered) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// lever is a route of the API that a form may call, and the fields that it may send.
type lever struct {
	method string // of the route; the form always posts
	path   string // of the route, as http.ServeMux has it
	fields []field
	done   string // what the page says when it worked; {name} is what the path has there
}

// field is one of the body.
type field struct {
	name string
	kind kind
}

// kind is what a field of a form becomes in the body.
type kind int

const (
	asText     kind = iota // a text
	asList                 // every value that was given, and every line of each
	asFlag                 // true for "true", "on" and "1", false for "false", "0" and nothing
	asNumber               // a number
	asJSON                 // what was written, which has to be JSON
	asRevision             // of what the page showed; it is no part of the body but If-Match, or for 0, when nothing was there, If-None-Match
)

// why is the body of most levers.
var why = []field{{"reason", asText}}

// based are the fields of a lever that changes something which others may have changed since the page showed it.
var based = append([]field{{"if_revision", asRevision}}, why...)

// levers are all that the room can pull. A route that is not here cannot be called through it.
func levers() []lever {
	return []lever{
		{"POST", "/v1/pause", why, "Autonomous work is paused."},
		{"POST", "/v1/resume", why, "Autonomous work goes on."},
		{"POST", "/v1/executions/{id}/cancel", why, "The execution is cancelled."},
		{"POST", "/v1/executions/{id}/retry", nil, "A new execution does again what failed."},
		{"POST", "/v1/executions/{id}/fork", append([]field{{"from", asText}, {"input", asJSON}, {"latest", asFlag}}, why...), "A new execution goes on from there."},
		{"POST", "/v1/executions/{id}/replay", nil, "The execution was replayed against its record."},
		{"POST", "/v1/skills/{name}/enable", based, "Skill {name} is in service."},
		{"POST", "/v1/skills/{name}/disable", based, "Skill {name} is out of service."},
		{"POST", "/v1/lanes/{lane}/break", why, "Lane {lane} was taken from its holder."},
		{"POST", "/v1/approvals/{id}", []field{{"decision", asText}, {"reason", asText}}, "The decision is recorded; who waited for it goes on."},
		{"POST", "/v1/events", []field{{"event", asText}, {"key", asText}, {"data", asJSON}, {"id", asText}}, "The event was raised."},
		{"POST", "/v1/objectives/{id}/accept", based, "The objective is accepted."},
		{"POST", "/v1/objectives/{id}/reject", based, "The objective is rejected."},
		{"POST", "/v1/objectives/{id}/pause", based, "The objective is left alone until it is resumed."},
		{"POST", "/v1/objectives/{id}/resume", based, "The objective is worked on again."},
		{"POST", "/v1/memory/{id}/forget", based, "The entry is forgotten."},
		{"POST", "/v1/memory/conflicts/{id}/decide", append([]field{{"decision", asText}}, based...), "The conflict is decided."},
		{"POST", "/v1/automations/{id}/enable", based, "Automation {id} is in service."},
		{"POST", "/v1/automations/{id}/disable", based, "Automation {id} is out of service."},
		{"POST", "/v1/automations/{id}/accept", based, "Automation {id} is accepted."},
		{"POST", "/v1/automations/{id}/run", why, "Automation {id} runs now."},
		{"POST", "/v1/webhooks/deliveries/{id}/replay", append([]field{{"replays", asNumber}}, why...), "The delivery is handled again."},
		{"POST", "/v1/webhooks/outbox/{id}/resend", why, "The message is sent once more."},
		{"POST", "/v1/webhooks/targets/{id}/enable", why, "Target {id} is in service."},
		{"POST", "/v1/webhooks/targets/{id}/disable", why, "Target {id} is out of service."},
		{"POST", "/v1/webhooks/endpoints/{id}/enable", why, "Endpoint {id} is in service."},
		{"POST", "/v1/webhooks/endpoints/{id}/disable", why, "Endpoint {id} is out of service."},
		{"POST", "/v1/automations/runs/{id}/redrive", why, "The run gets one more attempt."},
		{"POST", "/v1/threads/{id}/messages", []field{{"content", asText}}, "The message was sent, or waits for its turn."},
	}
}
