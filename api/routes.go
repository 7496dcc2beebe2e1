package api

import (
	"cmp"
	"encoding/json"
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
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/threads"
)

// route declares one HTTP route: its handler, access and limits, and its entry in the OpenAPI document.
type route struct {
	method, path string
	about        string
	access       Access                          // default Admin
	scopes       []principals.Scope              // of Admin routes, from scopes.go; one suffices
	secret       bool                            // the response has a secret, so the route accepts no key
	params       []param                         // of the query; the server rejects others
	body         any                             // zero value of the request body; nil for none
	response     any                             // zero value of the response body
	status       int                             // of the response; 200 when 0
	contentType  string                          // of the response; JSON when empty
	unready      bool                            // may respond with 503
	alreadyDone  bool                            // responds with 200 if already done
	safeToRetry  bool                            // an idempotent POST: it needs no key, and invoke retries it
	derivesKey   bool                            // the Idempotency-Key is the row's dedupe key, so a retry is safe
	conflicts    bool                            // may respond with 409
	notFound     bool                            // may respond with 404 for an id in the body
	deferred     bool                            // may respond with 202
	hasETag      bool                            // the response has an ETag, the object's revision
	ifMatch      bool                            // supports If-Match, may respond with 412
	stream       bool                            // no deadline
	finite       bool                            // a stream; a shutdown waits for its end
	openAI       bool                            // errors in OpenAI's format
	crossOrigin  bool                            // accepts cross-origin requests
	replica      bool                            // may read from the replica
	csv          bool                            // a listing that can be a table
	page         bool                            // not in the OpenAPI document; errors are HTML pages
	acceptsKey   bool                            // supports Idempotency-Key
	maxBody      int64                           // bytes
	expect       expectation                     // runs before the server reads the body; may be nil
	probe        bool                            // bypasses admission
	handle       func(request) (response, error) // of this package's routes
	httpHandler  http.Handler                    // of streams and of endpoints
}

// response is the result of a handler.
type response struct {
	status int // 200 when 0
	body   any
	trace  string
	// revision becomes the ETag; 0 for none.
	revision int
}

// routes returns the package's routes and the endpoints. It completes the package's routes: access and scopes, the CSV
// parameter, the limit of the body, and support of Idempotency-Key.
func (s *server) routes(endpoints []Endpoint) ([]route, error) {
	table := slices.Concat(
		s.probeRoutes(), s.readRoutes(), s.agentRoutes(), s.reportRoutes(), s.whyRoutes(), s.stateRoutes(), s.actionRoutes(),
		s.executionRoutes(), s.forkRoutes(),
		s.flowRoutes(), s.decisionRoutes(), s.memoryRoutes(), s.threadRoutes(), s.accessRoutes(), s.webhookRoutes(),
		s.loginRoutes(), s.oidcRoutes(), s.principalRoutes(), s.pauseRoutes(), s.monitorRoutes(),
		s.retentionRoutes(), s.documentRoutes(), s.channelRoutes(), s.evalRoutes(),
	)
	for i := range table {
		if table[i].access == 0 {
			table[i].access, table[i].scopes = Admin, scopesOf(table[i].method, table[i].path)
		}
		if table[i].csv {
			table[i].params = append(slices.Clip(table[i].params), csvParam)
		}
		table[i].maxBody = cmp.Or(table[i].maxBody, maxBody)
		table[i].acceptsKey = table[i].method == http.MethodPost && !table[i].safeToRetry && !table[i].page &&
			!table[i].secret
	}
	for _, e := range endpoints {
		rt, err := e.route()
		if err != nil {
			return nil, err
		}
		if rt.page && rt.path == loginPath {
			rt.httpHandler = s.redirectLoggedIn(rt.httpHandler)
		}
		table = append(table, rt)
	}
	return table, nil
}

func (s *server) probeRoutes() []route {
	return []route{
		{
			method: "GET", path: "/healthz", access: Public, probe: true, response: health{}, handle: s.healthz,
			about: "Whether the process is alive, without any check.",
		}, {
			method: "GET", path: "/readyz", access: Public, probe: true, response: readiness{}, unready: true, handle: s.readyz,
			about: "Whether this process accepts work: database, schema, writes, worker, not shutting down.",
		},
	}
}

func (s *server) readRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/traces", response: page[activity.TraceSummary]{}, handle: s.listTraces, replica: true,
			about: "Traces, newest first, each summed up in one row.",
			params: listParams(surfaceParam, enumParam("status", "State of the root execution", statuses()...),
				textParam("agent", "Agent of the root execution"), sinceParam),
		}, {
			method: "GET", path: "/v1/traces/{id}", response: activity.Trace{}, handle: s.getTrace, replica: true,
			about: "A trace with its activities. The id may be prefixed, its ULID alone, or the 32 hex digits of OpenTelemetry.",
		}, {
			method: "GET", path: "/v1/traces/{id}/prompts", response: prompts.Page{}, handle: s.getPrompts, replica: true,
			about: "The exact prompt of each model call of a trace, redacted; shared parts occur once.",
			params: []param{
				{name: "activity_id", about: "Only the model call of this activity", check: checkUUID},
				limitParam("Calls", prompts.MaxCalls, prompts.MaxCalls), textParam("cursor", "next_cursor of the previous page"),
			},
		}, {
			method: "GET", path: "/v1/activity", response: page[activity.Row]{}, handle: s.listActivity, replica: true,
			about: "The activity log, newest first. Without since, trace_id or skill it covers the last 30 days.",
			params: listParams(surfaceParam, enumParam("status", "State of the activity", activityStatuses()...),
				textParam("skill", "Name of the skill"), textParam("lane", "Lane of the work"), traceParam,
				textParam("agent", "Name of the agent"), sinceParam, timeParam("until", "End of the period")),
		}, {
			method: "GET", path: "/v1/executions", response: page[executions.Execution]{}, handle: s.listExecutions,
			csv: true, about: "Executions, newest first.",
			params: listParams(param{
				name: "status", about: "State of the execution, or several with commas: " + strings.Join(statuses(), ", "),
				check: checkStatuses,
			}, surfaceParam,
				textParam("flow", "Name of the flow"), textParam("agent", "Name of the agent"),
				textParam("label", "Label: name=value, or a value"), traceParam,
				timeParam("since", "Created at or after"), timeParam("until", "Created before")),
		}, {
			method: "GET", path: "/v1/executions/{id}", response: executionDetail{}, handle: s.getExecution,
			about: "One execution with its latest checkpoint and open wait.",
		}, {
			method: "GET", path: "/v1/lanes", response: page[lanes.LiveLane]{}, handle: s.listLanes, params: listParams(),
			about: "Held lanes, newest grant first, then running executions, newest first.",
		}, {
			method: "GET", path: "/v1/skills", response: page[skillRow]{}, handle: s.listSkills,
			about: "Skills, newest first, each with its health over the last 7 days.",
			params: listParams(enumParam("enabled", "Whether it is enabled", "true", "false"),
				enumParam("scope", "Its scope", "internal", "external", "both"),
				textParam("source", "Source of the declaration"),
				textParam("disabled_by", "Person or program that disabled it")),
		}, {
			method: "GET", path: "/v1/skills/{name}", response: skillRow{}, handle: s.getSkill, hasETag: true,
			about: "One skill by its name, with its health over the last 7 days. Its ETag is the revision of its state.",
		},
	}
}

func (s *server) stateRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/executions/{id}/events", contentType: "text/event-stream", stream: true,
			httpHandler: http.HandlerFunc(s.followExecution),
			about: "The status of an execution as server-sent events: event status, data {id, trace_id, status, " +
				"waiting_for, at}. First the current state (for external executions the changes since " +
				"Last-Event-ID), then each change until the end. 204 if Last-Event-ID is the end.",
		}, {
			method: "GET", path: "/v1/approvals", response: page[approvals.Approval]{}, handle: s.listApprovals,
			about: "Calls that need approval, newest first.",
			params: listParams(enumParam("status", "State of the approval", approvalStatuses()...),
				textParam("skill", "Name of the skill"),
				traceParam),
		}, {
			method: "GET", path: "/v1/approvals/{id}", response: approvals.Approval{}, handle: s.getApproval,
			about: "One call that needs approval, with its exact arguments.",
		}, {
			method: "GET", path: "/v1/objectives", response: page[objectives.Objective]{}, handle: s.listObjectives,
			about: "Objectives with their progress, newest first.",
			params: listParams(enumParam("status", "State of the objective", objectives.Active, objectives.Paused,
				objectives.Completed, objectives.Failed, objectives.Proposed, objectives.Rejected),
				textParam("source", "Source of the objective")),
		}, {
			method: "GET", path: "/v1/objectives/{id}", response: objectiveDetail{}, hasETag: true, handle: s.getObjective,
			about: "One objective by name or id, with its steps and their evidence.",
		}, {
			method: "GET", path: "/v1/automations", response: page[automations.Automation]{}, handle: s.listAutomations,
			about: "Automations, newest first.",
			params: listParams(enumParam("enabled", "Whether it is enabled", "true", "false"),
				textParam("skill", "Name of the skill"),
				textParam("source", "Source of the declaration")),
		}, {
			method: "GET", path: "/v1/automations/{id}", response: automationDetail{}, hasETag: true, handle: s.getAutomation,
			about: "One automation by name or id, with its latest runs.",
		}, {
			method: "GET", path: "/v1/memory", response: page[memory.Entry]{}, handle: s.listMemory,
			about: "Memories, newest first; with q the best matches on one page.",
			params: listParams(textParam("category", "Only this category"), textParam("prefix", "Prefix of the key"), traceParam,
				textParam("q", "A search query, in the shared memory or that of agent"),
				textParam("agent", "Only this agent's memory")),
		}, {
			method: "GET", path: "/v1/threads", response: page[threads.Thread]{}, handle: s.listThreads,
			about: "Conversations, most recent first. A new message moves its conversation to the front.",
			params: listParams(textParam("channel", "Channel of the conversation"),
				textParam("owner", "Owner of the conversation"), textParam("agent", "Agent of the conversation")),
		}, {
			method: "GET", path: "/v1/threads/{id}", response: threadDetail{}, handle: s.getThread, params: listParams(),
			about: "One conversation with a page of its messages, newest first.",
		},
	}
}

func (s *server) actionRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/cancel", body: reasonRequest{}, response: cancelResponse{},
			handle: s.cancelExecution, deferred: true,
			about: "Cancel an execution now. An ended one keeps its status. 202 with cancel_requested if another " +
				"transaction locks the row for more than a second: detail names the blocker, and the cancel follows when it ends.",
		}, {
			method: "POST", path: "/v1/skills/{name}/enable", body: reasonRequest{}, ifMatch: true, response: skillChange{},
			handle: s.enableSkill,
			about:  "Enable a skill and its paused automations. Earlier failures no longer count.",
		}, {
			method: "POST", path: "/v1/skills/{name}/disable", body: reasonRequest{}, ifMatch: true, response: skillChange{},
			handle: s.disableSkill,
			about:  "Disable a skill and pause its automations.",
		}, {
			method: "POST", path: "/v1/lanes/{lane}/break", body: reasonRequest{}, response: laneBreak{},
			handle: s.breakLane, conflicts: true,
			about: "Break a lane; its holder's fencing token becomes invalid. The lane is path-escaped.",
		},
	}
}

func (s *server) decisionRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/approvals/{id}", body: decisionRequest{}, response: approvals.Approval{},
			handle:    s.decideApproval,
			conflicts: true,
			about:     "Approve or reject a call once. The waiting execution resumes. 409 if it was decided or has expired.",
		}, {
			method: "POST", path: "/v1/events", body: eventRequest{}, response: eventResponse{}, status: http.StatusAccepted,
			handle: s.raiseEvent, derivesKey: true,
			about: "Raise an event and resume its waiters; without a waiter it is stored for the first one. " +
				"The same id counts once; that of another event is refused.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/accept", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.acceptObjective,
			conflicts: true, about: "Accept a proposed or rejected objective. 409 if it is neither.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/reject", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.rejectObjective,
			conflicts: true, about: "Reject a proposed objective. 409 if it is not an open proposal.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/pause", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.pauseObjective,
			conflicts: true, about: "Pause an active objective. 409 if it is not active.",
		}, {
			method: "POST", path: "/v1/objectives/{id}/resume", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.resumeObjective,
			conflicts: true, about: "Resume a paused objective. 409 if it is not paused.",
		}, {
			method: "POST", path: "/v1/automations/{id}/enable", body: reasonRequest{}, ifMatch: true, response: change{},
			handle: s.enableAutomation,
			about:  "Enable an automation, by name or id.",
		}, {
			method: "POST", path: "/v1/automations/{id}/disable", body: reasonRequest{}, ifMatch: true, response: change{},
			handle: s.disableAutomation,
			about:  "Disable an automation, by name or id. This rejects a proposal.",
		}, {
			method: "POST", path: "/v1/automations/{id}/accept", body: reasonRequest{}, ifMatch: true, response: change{},
			handle:    s.acceptAutomation,
			conflicts: true, about: "Accept a proposed automation. 409 if it is not an open proposal.",
		}, {
			method: "POST", path: "/v1/automations/{id}/run", body: reasonRequest{}, response: automations.Run{},
			status: http.StatusAccepted,
			handle: s.runAutomation, about: "Run an automation now, even a disabled one. The response has its trace.",
		}, {
			method: "POST", path: "/v1/automations/runs/{id}/redrive", body: reasonRequest{}, response: automations.Run{},
			status: http.StatusAccepted,
			handle: s.redriveRun, conflicts: true,
			about: "Give a dead run one more attempt. 409 if it is not dead.",
		},
	}
}

// wantsJSON reports whether the route requires Content-Type: application/json.
func (rt route) wantsJSON() bool {
	kind := reflect.TypeOf(rt.body)
	return rt.body != nil && kind != reflect.TypeFor[json.RawMessage]() && kind != reflect.TypeFor[FileForm]()
}
