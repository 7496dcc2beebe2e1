package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/threads"
)

// route is one row of the table: all that is known about an endpoint.
type route struct {
	method, path string
	about        string
	access       Access                        // Admin when left out
	params       []param                       // of the query; others are refused
	body         any                           // zero value of what is read; nil for none
	answer       any                           // zero value of what is answered
	status       int                           // of the answer; 200 when 0
	contentType  string                        // of the answer; JSON when empty
	unready      bool                          // the answer may also come with 503
	again        bool                          // the answer comes with 200 when it was so already
	repeatable   bool                          // of a POST: doing it again changes nothing, so it needs no Idempotency-Key
	keyed        bool                          // is an effect of its Idempotency-Key: with one, doing it again changes nothing
	conflicts    bool                          // may be refused with 409
	versioned    bool                          // the answer has an ETag, the revision of what it shows
	guarded      bool                          // takes If-Match, and may be refused with 412
	stream       bool                          // has no deadline
	ends         bool                          // of a stream: it is waited for at shutdown
	openAI       bool                          // is refused in OpenAI's format
	foreign      bool                          // takes what a browser sends from another origin
	replica      bool                          // may be answered from the read replica
	page         bool                          // for people: not in the document, refused with a page
	idempotent   bool                          // honours Idempotency-Key
	maxBody      int64                         // bytes
	expect       expectation                   // before the body; nil for nothing
	probe        bool                          // is answered whatever else is under way
	handle       func(request) (answer, error) // of this package's routes
	handler      http.Handler                  // of streams and of endpoints
}

// answer is what a handler returns: a value, and the trace it belongs to where there is one.
type answer struct {
	status int // 200 when 0
	body   any
	trace  string
	// revision of what is shown, for the ETag; 0 for none.
	revision int
}

// table is all routes: the own ones, then the endpoints.
func (s *server) table(endpoints []Endpoint) ([]route, error) {
	table := slices.Concat(
		s.probes(), s.reading(), s.naming(), s.reports(), s.explaining(), s.state(), s.acting(), s.running(), s.travelling(),
		s.flowing(), s.deciding(), s.remembering(), s.speaking(), s.admitting(), s.hooking(), s.loggingIn(), s.pausing(),
		s.retaining(), s.documenting(),
	)
	for i := range table {
		if table[i].access == 0 {
			table[i].access = Admin
		}
		table[i].maxBody = cmp.Or(table[i].maxBody, maxBody)
		table[i].idempotent = table[i].method == http.MethodPost && !table[i].repeatable && !table[i].page
	}
	for _, e := range endpoints {
		rt, err := e.route()
		if err != nil {
			return nil, err
		}
		if rt.page && rt.path == loginPath {
			rt.handler = s.unlessLoggedIn(rt.handler)
		}
		table = append(table, rt)
	}
	return table, nil
}

func (s *server) probes() []route {
	return []route{
		{
			method: "GET", path: "/healthz", access: Public, probe: true, answer: health{}, handle: s.healthz,
			about: "Whether the process is alive. Asks nobody, not even the database.",
		}, {
			method: "GET", path: "/readyz", access: Public, probe: true, answer: readiness{}, unready: true, handle: s.readyz,
			about: "Whether this process would do work: database, schema, writes, worker, not shutting down.",
		},
	}
}

func (s *server) reading() []route {
	return []route{
		{
			method: "GET", path: "/v1/traces", answer: page[activity.TraceSummary]{}, handle: s.listTraces, replica: true,
			about: "Pieces of work, newest first, each rolled up to one line.",
			params: listing(surfaceParam, oneOf("status", "State of the root execution", statuses()...),
				text("agent", "Who acted in the root execution"), sinceParam),
		}, {
			method: "GET", path: "/v1/traces/{id}", answer: activity.Trace{}, handle: s.getTrace, replica: true,
			about: "The story of a trace. The id may be the prefixed one, its ULID alone, or the 32 hex digits of OpenTelemetry.",
		}, {
			method: "GET", path: "/v1/traces/{id}/prompts", answer: prompts.Page{}, handle: s.getPrompts, replica: true,
			about: "The exact prompt of each model call of a trace, redacted; a part that several calls share is in it once.",
			params: []param{
				{name: "activity_id", about: "Only the model call of this activity", check: checkUUID},
				limitParam("Calls", prompts.MaxCalls, prompts.MaxCalls), text("cursor", "next_cursor of the page before"),
			},
		}, {
			method: "GET", path: "/v1/activity", answer: page[activity.Row]{}, handle: s.listActivity, replica: true,
			about: "What was done, newest first. Without since, trace_id and skill the other filters look back 30 days.",
			params: listing(surfaceParam, oneOf("status", "State of the activity", activityStatuses()...),
				text("skill", "Name of the skill"), text("lane", "Lane the work was done in"), traceParam,
				text("agent", "Who acted"), sinceParam, moment("until", "Only what began before this moment")),
		}, {
			method: "GET", path: "/v1/executions", answer: page[executions.Execution]{}, handle: s.listExecutions,
			about: "Durable runs, newest first.",
			params: listing(oneOf("status", "State of the execution", statuses()...), surfaceParam,
				text("flow", "Name of the flow"), text("agent", "Who acted"), traceParam),
		}, {
			method: "GET", path: "/v1/executions/{id}", answer: executionDetail{}, handle: s.getExecution,
			about: "One durable run, with its latest checkpoint and what it waits for.",
		}, {
			method: "GET", path: "/v1/lanes", answer: page[lanes.LiveLane]{}, handle: s.listLanes, params: listing(),
			about: "Every lane that is held now, newest grant first, then every execution that is run now, newest first.",
		}, {
			method: "GET", path: "/v1/skills", answer: page[skillRow]{}, handle: s.listSkills,
			about: "Skills, newest first, each with its health over the last 7 days.",
			params: listing(oneOf("enabled", "Whether it is in service", "true", "false"),
				oneOf("scope", "Who may be offered it", "internal", "external", "both"),
				text("source", "Where its declaration came from"), text("disabled_by", "Who took it out of service")),
		}, {
			method: "GET", path: "/v1/skills/{name}", answer: skillRow{}, handle: s.getSkill, versioned: true,
			about: "One skill by its name, with its health over the last 7 days. Its ETag is the revision of its state.",
		},
	}
}

// state is what the agent keeps about itself.
func (s *server) state() []route {
	return []route{
		{
			method: "GET", path: "/v1/executions/{id}/events", contentType: "text/event-stream", stream: true,
			handler: http.HandlerFunc(s.followExecution),
			about: "The status of a durable run as server-sent events: event status, data {id, trace_id, status, waiting_for, at}. " +
				"First the present state (after Last-Event-ID what was missed, of runs of workers outside), then each change, until the end. With the end as Last-Event-ID: 204.",
		}, {
			method: "GET", path: "/v1/approvals", answer: page[approvals.Approval]{}, handle: s.listApprovals,
			about: "Calls that need an admin's leave, newest first.",
			params: listing(oneOf("status", "State of the approval", approvalStatuses()...), text("skill", "Name of the skill"),
				traceParam),
		}, {
			method: "GET", path: "/v1/approvals/{id}", answer: approvals.Approval{}, handle: s.getApproval,
			about: "One call that needs leave, with the exact arguments that a decision is about.",
		}, {
			method: "GET", path: "/v1/objectives", answer: page[objectives.Objective]{}, handle: s.listObjectives,
			about: "Objectives with their progress, newest first.",
			params: listing(oneOf("status", "State of the objective", "active", "paused", "completed", "failed", "proposed", "rejected"),
				text("source", "Where it came from")),
		}, {
			method: "GET", path: "/v1/objectives/{id}", answer: objectiveDetail{}, versioned: true, handle: s.getObjective,
			about: "One objective by name or id, with its steps and their evidence.",
		}, {
			method: "GET", path: "/v1/automations", answer: page[automations.Automation]{}, handle: s.listAutomations,
			about: "Automations, newest first.",
			params: listing(oneOf("enabled", "Whether it is in service", "true", "false"), text("skill", "Name of the skill"),
				text("source", "Where its declaration came from")),
		}, {
			method: "GET", path: "/v1/automations/{id}", answer: automationDetail{}, versioned: true, handle: s.getAutomation,
			about: "One automation by name or id, with its latest runs.",
		}, {
			method: "GET", path: "/v1/memory", answer: page[memory.Entry]{}, handle: s.listMemory,
			about: "What the agent remembers, newest first; with q what matches best, on one page.",
			params: listing(text("category", "Only of this category"), text("prefix", "What the key begins with"), traceParam,
				text("q", "Words to search for, as in a web search; in the shared memory, or that of the agent"),
				text("agent", "Only what this agent remembers")),
		}, {
			method: "GET", path: "/v1/threads", answer: page[threads.Thread]{}, handle: s.listThreads,
			about:  "Conversations, the one spoken in last first. One that is spoken in meanwhile moves to the front.",
			params: listing(text("channel", "Where it is held"), text("owner", "Who opened it"), text("agent", "The agent that it is with")),
		}, {
			method: "GET", path: "/v1/threads/{id}", answer: threadDetail{}, handle: s.getThread, params: listing(),
			about: "One conversation with a page of its messages, newest first.",
		},
	}
}

func (s *server) acting() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/cancel", body: because{}, answer: cancelled{}, handle: s.cancelExecution,
			about: "End an execution now, whatever it does. One that has ended keeps its status, which is answered. 202 with cancel_requested for one " +
				"that another transaction has locked for longer than a second: detail names what may be in the way, and it is cancelled when that ends.",
		}, {
			method: "POST", path: "/v1/skills/{name}/enable", body: because{}, guarded: true, answer: skillChange{}, handle: s.enableSkill,
			about: "Put a skill back into service, with the automations that were paused for it. Failures until now no longer count.",
		}, {
			method: "POST", path: "/v1/skills/{name}/disable", body: because{}, guarded: true, answer: skillChange{}, handle: s.disableSkill,
			about: "Take a skill out of service, and pause its automations until it is enabled.",
		}, {
			method: "POST", path: "/v1/lanes/{lane}/break", body: because{}, answer: laneBreak{}, handle: s.breakLane, conflicts: true,
			about: "Take a lane away from its holder, whose token is void from then on. The lane is path-escaped.",
		},
	}
}

// deciding is what people and systems tell the agent.
func (s *server) deciding() []route {
	return []route{
		{
			method: "POST", path: "/v1/approvals/{id}", body: decision{}, answer: approvals.Approval{}, handle: s.decideApproval,
			conflicts: true,
			about:     "Approve or reject a call, once. Who waits for the decision goes on. 409 when it was decided, or has expired.",
		}, {
			method: "POST", path: "/v1/events", body: event{}, answer: delivered{}, status: http.StatusAccepted, handle: s.raiseEvent, keyed: true,
			about: "Raise an event and resume whoever waits for it; one that nobody waits for is kept for the first that will. " +
				"The same id twice counts once.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/accept", body: because{}, guarded: true, answer: change{}, handle: s.acceptObjective,
			conflicts: true, about: "Accept an objective that the agent proposed. 409 when it is none, or was decided.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/reject", body: because{}, guarded: true, answer: change{}, handle: s.rejectObjective,
			conflicts: true, about: "Reject an objective that the agent proposed. 409 when it is none, or was decided.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/pause", body: because{}, guarded: true, answer: change{}, handle: s.pauseObjective,
			conflicts: true, about: "Leave an active objective alone until it is resumed. 409 when it is not active.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/resume", body: because{}, guarded: true, answer: change{}, handle: s.resumeObjective,
			conflicts: true, about: "Work on a paused objective again. 409 when it is not paused.",
		}, {
			method: "POST", path: "/v1/automations/{id}/enable", body: because{}, guarded: true, answer: change{}, handle: s.enableAutomation,
			about: "Put an automation into service, by its name.",
		}, {
			method: "POST", path: "/v1/automations/{id}/disable", body: because{}, guarded: true, answer: change{}, handle: s.disableAutomation,
			about: "Take an automation out of service, by its name. A proposal is refused that way.",
		}, {
			method: "POST", path: "/v1/automations/{id}/accept", body: because{}, guarded: true, answer: change{}, handle: s.acceptAutomation,
			conflicts: true, about: "Accept an automation that the agent proposed. 409 when it is none, or was decided.",
		}, {
			method: "POST", path: "/v1/automations/{id}/run", body: because{}, answer: automations.Run{}, status: http.StatusAccepted,
			handle: s.runAutomation, about: "Run an automation now, also one that is out of service. It runs under the trace that is answered.",
		}, {
			method: "POST", path: "/v1/automations/runs/{id}/redrive", body: because{}, answer: automations.Run{}, status: http.StatusAccepted,
			handle: s.redriveRun, conflicts: true,
			about: "Give a dead letter, a run whose attempts are used up, one more. 409 when it is not dead.",
		},
	}
}

// Access says who may call a route. A row of the table that leaves it out is refused or, among this
// package's own, the admin's.
type Access int

// The kinds of access, the most guarded last.
const (
	Public  Access = iota + 1 // everybody; the handler checks what it has to
	Visitor                   // whoever has a chat key
	Admin                     // whoever has the admin token
)

// Endpoint is a route that a surface brings. Its handler is called for requests that have passed the
// checks of this package; the body it reads is in memory, complete, and within MaxBody.
type Endpoint struct {
	Method, Path string // as http.ServeMux has them; GET also answers HEAD
	About        string // for the document
	Access       Access
	// Body and Answer are zero values for the document, nil for none. With a Body other than
	// json.RawMessage the request has to be application/json.
	Body, Answer any
	// Query names the query parameters and says what they do; it is only documented.
	Query map[string]string
	// Status is that of an answer when all is well, 200 when 0. It is only documented.
	Status int
	// Again says that what was done before is answered with 200 and the same; it is only documented.
	Again bool
	// ContentType is that of the answer, application/json when empty; it is only documented.
	ContentType string
	// Stream lifts the request's deadline. Each write has to get through within half a minute. The request's
	// context ends when the client goes away, and at shutdown, with the cause executions.ErrDraining; the
	// handler has to return then.
	Stream bool
	// Ends marks a stream that is the answer to a request and comes to an end by itself: a shutdown waits for it for a
	// while, because a client may not know whether it can ask again.
	Ends bool
	// OpenAIErrors makes refusals (401, 403, 404, 405, 408, 413, 415, 429) OpenAI's error objects.
	OpenAIErrors bool
	// MaxBody is in bytes, 1 MiB when 0.
	MaxBody int64
	// Expect is called before the body is read. It refuses the request, or returns it and how many bytes its body may
	// have, at most MaxBody. Nil expects MaxBody. Such routes share bounds that no other route has.
	Expect func(r *http.Request) (*http.Request, int64, error)
	// Idempotent honours Idempotency-Key. It needs a caller that is known, so not Public.
	Idempotent bool
	// Page is for people: it is left out of the document, refusals are pages (see Options.Pages), and who has not
	// logged in is led to the login and back. A stream of a page is refused as other streams are.
	Page    bool
	Handler http.Handler
}

// webhooks is where other systems post to, and browsers too if they like: a signature says who it is.
const webhooks = "/webhooks/"

// route is the row of the table.
func (e Endpoint) route() (route, error) {
	name := e.Method + " " + e.Path
	switch {
	case e.Method == "" || e.Method != strings.ToUpper(e.Method) || !strings.HasPrefix(e.Path, "/"):
		return route{}, fmt.Errorf("endpoint %s: method and path are required", name)
	case e.Handler == nil || e.About == "":
		return route{}, fmt.Errorf("endpoint %s: a handler and a description are required", name)
	case e.Access < Public || e.Access > Admin:
		return route{}, fmt.Errorf("endpoint %s: say who may call it", name)
	case e.Idempotent && e.Access == Public:
		return route{}, fmt.Errorf("endpoint %s: a stored answer would be shown to strangers; it cannot be public and idempotent", name)
	}
	rt := route{
		method: e.Method, path: e.Path, about: e.About, access: e.Access, body: e.Body, answer: e.Answer, status: e.Status,
		again: e.Again, contentType: e.ContentType, stream: e.Stream, ends: e.Ends, openAI: e.OpenAIErrors, maxBody: e.MaxBody, idempotent: e.Idempotent,
		foreign: strings.HasPrefix(e.Path, webhooks), page: e.Page, handler: e.Handler, expect: e.Expect,
	}
	for _, name := range slices.Sorted(maps.Keys(e.Query)) {
		rt.params = append(rt.params, text(name, e.Query[name]))
	}
	if rt.maxBody <= 0 {
		rt.maxBody = maxBody
	}
	return rt, nil
}

// wantsJSON reports that a request has to say that it brings JSON.
func (rt route) wantsJSON() bool {
	return rt.body != nil && reflect.TypeOf(rt.body) != reflect.TypeFor[json.RawMessage]()
}
