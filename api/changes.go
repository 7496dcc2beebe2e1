package api

import (
	"context"
	"errors"
	"maps"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
	hooks "github.com/lanekeeper/lanekeeper/webhooks"
)

// change is the result of an admin action. Changed is false if the action had no effect.
type change struct {
	Name       string `json:"name"`
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// revisionChecks lock an object and compare its revision with If-Match. The key is the object's field in the audit
// input.
var revisionChecks = map[string]func(ctx context.Context, tx pgx.Tx, name string, revision int) error{
	"objective": objectives.AtRevision, "automation": automations.AtRevision, "skill": skills.AtRevision,
}

// withCurrent attaches the current object to a StaleError.
func (s *server) withCurrent(ctx context.Context, err error) error {
	stale, ok := errors.AsType[*postgres.StaleError](err)
	if !ok {
		return err
	}
	var current any
	var getErr error
	switch stale.What {
	case "objective":
		current, getErr = objectives.Get(ctx, s.pool, stale.Name)
	case "automation":
		var a automations.Automation
		a, getErr = automations.Get(ctx, s.pool, stale.Name)
		a.Arguments = redact.JSON(a.Arguments, maxShown)
		current = a
	case "skill":
		current, getErr = skills.Get(ctx, s.pool, stale.Name)
	}
	if getErr != nil {
		return getErr
	}
	p, _ := problem.Of(stale)
	return p.WithBoth(current, nil)
}

// record wraps [activity.Record]. input identifies the object.
func (s *server) record(ctx context.Context, action, reason string, input map[string]any,
	fn func(tx pgx.Tx, traceID string) (output any, err error),
) (change, error) {
	r, err := activity.Record(ctx, s.pool, activity.Act{Name: action, Reason: reason, Input: input}, fn)
	return change{TraceID: r.TraceID, ActivityID: r.ActivityID}, err
}

type objectiveDetail struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func (s *server) listObjectives(r request) (response, error) {
	listing, err := readPage("objectives", r.query, func(o objectives.Objective) string { return o.ID },
		func(before string, limit int) ([]objectives.Objective, error) {
			return objectives.List(r.Context(), s.pool, objectives.Filter{
				Status: r.query["status"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	return response{body: listing}, err
}

func (s *server) getObjective(r request) (response, error) {
	name, err := pathName(r, objectives.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	o, err := objectives.Get(r.Context(), s.pool, name)
	if err != nil {
		return response{}, err
	}
	detail := objectiveDetail{Objective: o}
	if detail.Steps, err = objectives.Steps(r.Context(), s.pool, o.ID); err == nil {
		detail.Evidence, err = objectives.EvidenceOf(r.Context(), s.pool, o.ID)
	}
	detail.Steps, detail.Evidence = orEmpty(detail.Steps), orEmpty(detail.Evidence)
	return response{body: detail, trace: o.LastTraceID, revision: o.Revision}, err
}

func (s *server) acceptObjective(r request) (response, error) {
	return s.decideObjective(r, "accept_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Accept(r.Context(), tx, name, actorName(r.Context()), reason)
	})
}

func (s *server) rejectObjective(r request) (response, error) {
	return s.decideObjective(r, "reject_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Reject(r.Context(), tx, name, actorName(r.Context()), reason)
	})
}

// decideObjective accepts or rejects an open proposal; 409 if it is not open.
func (s *server) decideObjective(
	r request, action string, decide func(pgx.Tx, string, string) (bool, error),
) (response, error) {
	return s.changeNamed(r, action, "objective", objectives.ErrNotFound,
		func(tx pgx.Tx, name, reason string) (bool, error) {
			decided, err := decide(tx, name, reason)
			return requireChanged(decided, err, "objective %s is not an open proposal", name)
		})
}

// requireChanged turns an action without effect into a 409.
func requireChanged(changed bool, err error, format string, args ...any) (bool, error) {
	if err == nil && !changed {
		err = problem.New(http.StatusConflict, format, args...)
	}
	return changed, err
}

// changeNamed runs an audited action on the object in the path.
func (s *server) changeNamed(
	r request, action, kind string, notFound error, fn func(tx pgx.Tx, name, reason string) (bool, error),
) (response, error) {
	name, err := pathName(r, notFound)
	if err != nil {
		return response{}, err
	}
	revision, err := r.ifMatch()
	if err != nil {
		return response{}, err
	}
	checkRevision, guarded := revisionChecks[kind]
	if revision > 0 && !guarded {
		return response{}, badPrecondition("If-Match is invalid here: the object has no revision")
	}
	reason := r.body.(reasonRequest).Reason
	var changed bool
	done, err := s.record(r.Context(), action, reason, map[string]any{kind: name},
		func(tx pgx.Tx, _ string) (any, error) {
			if guarded {
				if err := checkRevision(r.Context(), tx, name, revision); err != nil {
					return nil, err
				}
			}
			var err error
			changed, err = fn(tx, name, reason)
			return map[string]bool{"changed": changed}, err
		})
	if err != nil {
		return response{}, s.withCurrent(r.Context(), err)
	}
	done.Name, done.Changed = name, changed
	return response{body: done, trace: done.TraceID}, nil
}

// pathName returns the name or id in the path. It accepts control characters, because an admin must be able to reject
// any name that a model chose.
func pathName(r request, notFound error) (string, error) {
	name := r.PathValue("id")
	if !postgres.IsText(name) || len(name) > maxText {
		return "", notFound
	}
	return name, nil
}

// listMemory lists entries, or searches them if q is set. A search has one page, because its order has no stable
// cursor.
func (s *server) listMemory(r request) (response, error) {
	if q := r.query["q"]; q != "" {
		for _, other := range []string{"cursor", "category", "prefix", "trace_id"} {
			if r.query[other] != "" {
				return response{}, problem.BadParameter("q cannot be combined with %s", other)
			}
		}
		owner, err := s.owner(r)
		if err != nil {
			return response{}, err
		}
		found, err := s.memory.Search(r.Context(), s.pool, owner, q, r.query.limit())
		return response{body: pageOf(found, "")}, err
	}
	var only *memory.Owner
	if r.query["agent"] != "" {
		owner, err := s.owner(r)
		if err != nil {
			return response{}, err
		}
		only = &owner
	}
	listing, err := readPage("memory", r.query, func(e memory.Entry) string { return e.ID },
		func(before string, limit int) ([]memory.Entry, error) {
			return memory.List(r.Context(), s.pool, memory.Filter{
				Owner: only, Category: r.query["category"], Prefix: r.query["prefix"], TraceIDs: r.query.traceIDs(),
				Before: before, Limit: limit,
			})
		})
	return response{body: listing}, err
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func (s *server) pauseObjective(r request) (response, error) {
	return s.setObjective(r, "pause_objective", objectives.Active, objectives.Paused)
}

func (s *server) resumeObjective(r request) (response, error) {
	return s.setObjective(r, "resume_objective", objectives.Paused, objectives.Active)
}

// setObjective moves an objective between two statuses and rejects any other status.
func (s *server) setObjective(r request, action, from, to string) (response, error) {
	return s.changeNamed(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		o, err := objectives.Get(r.Context(), tx, name)
		if err != nil {
			return false, err
		}
		changed, err := objectives.SetStatus(r.Context(), tx, o.ID, from, to)
		return requireChanged(changed, err, "objective %s is %s, not %s", o.Name, o.Status, from)
	})
}

// forget deletes an entry. The audit row keeps category and key, but not the value.
func (s *server) forget(r request, fn func(tx pgx.Tx) (memory.Entry, error)) (response, error) {
	input := map[string]any{}
	var deleted memory.Entry
	done, err := s.record(r.Context(), "forget_memory", r.body.(reasonRequest).Reason, input,
		func(tx pgx.Tx, _ string) (_ any, err error) {
			deleted, err = fn(tx)
			input["id"] = deleted.ID
			maps.Copy(input, memoryInput(deleted.Owner, deleted.Category, deleted.Key))
			return map[string]bool{"changed": true}, err
		})
	if err != nil {
		return response{}, err
	}
	done.Name, done.Changed = deleted.Key, true
	return response{body: done, trace: done.TraceID}, nil
}

type decisionRequest struct {
	Decision string `json:"decision"` // approve or reject
	Reason   string `json:"reason,omitempty"`
}

func (d decisionRequest) check() error {
	switch {
	case d.Decision != "approve" && d.Decision != "reject":
		return problem.BadBody("decision is %.60q; use approve or reject", d.Decision)
	case len(d.Reason) > maxReason:
		return problem.BadBody("reason is longer than %d bytes", maxReason)
	case !isPrintableText(d.Reason):
		return problem.BadBody("reason has control characters")
	}
	return nil
}

func approvalStatuses() []string {
	return []string{"pending", "approved", "rejected", "expired", "consumed"}
}

func (s *server) listApprovals(r request) (response, error) {
	listing, err := readPage("approvals", r.query, func(a approvals.Approval) string { return a.ID },
		func(before string, limit int) ([]approvals.Approval, error) {
			return approvals.List(r.Context(), s.pool, approvals.Filter{
				Status: r.query["status"], Skill: r.query["skill"], TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	return response{body: listing}, err
}

func (s *server) getApproval(r request) (response, error) {
	id, err := pathUUID(r, "an approval")
	if err != nil {
		return response{}, err
	}
	a, err := approvals.Get(r.Context(), s.pool, id)
	return response{body: a, trace: a.TraceID}, err
}

// decideApproval decides an approval. The decision has an op_ trace of its own, because the approval's trace belongs to
// the waiting execution.
func (s *server) decideApproval(r request) (response, error) {
	id, err := pathUUID(r, "an approval")
	if err != nil {
		return response{}, err
	}
	body := r.body.(decisionRequest)
	audit := trace.New(trace.Operate)
	ctx := trace.With(r.Context(), trace.Span{TraceID: audit, Surface: trace.Operate})
	decided, err := approvals.Decide(ctx, s.pool, id, body.Decision == "approve", actorName(r.Context()), body.Reason)
	if errors.Is(err, approvals.ErrDecided) {
		current, getErr := approvals.Get(r.Context(), s.pool, id)
		return response{trace: current.TraceID}, errors.Join(err, getErr)
	}
	if err != nil {
		return response{}, err
	}
	return response{body: decided, trace: string(audit)}, nil
}

// maxShown bounds a displayed value in bytes.
const maxShown = 64 << 10

// automationDetail is an automation with its latest runs, newest first.
type automationDetail struct {
	automations.Automation
	Runs []automations.Run `json:"runs"`
}

func (s *server) listAutomations(r request) (response, error) {
	listing, err := readPage("automations", r.query, func(a automations.Automation) string { return a.ID },
		func(before string, limit int) ([]automations.Automation, error) {
			return automations.List(r.Context(), s.pool, automations.Filter{
				Enabled: r.query.flag("enabled"), Skill: r.query["skill"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	for i := range listing.Items {
		listing.Items[i].Arguments = redact.JSON(listing.Items[i].Arguments, maxShown)
	}
	return response{body: listing}, err
}

func (s *server) getAutomation(r request) (response, error) {
	name, err := pathName(r, automations.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	a, err := automations.Get(r.Context(), s.pool, name)
	if err != nil {
		return response{}, err
	}
	runs, err := automations.Runs(r.Context(), s.pool, automations.RunFilter{AutomationID: a.ID, Limit: defaultPage})
	if err != nil {
		return response{}, err
	}
	a.Arguments = redact.JSON(a.Arguments, maxShown)
	for i := range runs {
		runs[i].Output = redact.JSON(runs[i].Output, maxShown)
	}
	return response{body: automationDetail{a, orEmpty(runs)}, trace: a.LastTraceID, revision: a.Revision}, nil
}

func (s *server) enableAutomation(r request) (response, error) {
	return s.changeNamed(r, "enable_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, _ string) (bool, error) {
			return automations.Enable(r.Context(), tx, name)
		})
}

func (s *server) disableAutomation(r request) (response, error) {
	return s.changeNamed(r, "disable_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, reason string) (bool, error) {
			return automations.Disable(r.Context(), tx, name, actorName(r.Context()), reason)
		})
}

func (s *server) acceptAutomation(r request) (response, error) {
	return s.changeNamed(r, "accept_automation", "automation", automations.ErrNotFound,
		func(tx pgx.Tx, name, _ string) (bool, error) {
			accepted, err := automations.Accept(r.Context(), tx, name, actorName(r.Context()))
			return requireChanged(accepted, err, "automation %s is not an open proposal", name)
		})
}

// runAutomation enqueues a run with this request's trace. Any process may claim it.
func (s *server) runAutomation(r request) (response, error) {
	name, err := pathName(r, automations.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	reason := r.body.(reasonRequest).Reason
	var run automations.Run
	_, err = s.record(r.Context(), "run_automation", reason, map[string]any{"automation": name},
		func(tx pgx.Tx, traceID string) (any, error) {
			var err error
			if run, err = automations.Enqueue(r.Context(), tx, name, traceID); err == nil {
				err = automations.Notify(r.Context(), tx)
			}
			return map[string]string{"run_id": run.ID}, err
		})
	if err != nil {
		return response{}, err
	}
	return response{body: run, status: http.StatusAccepted, trace: run.TraceID}, nil
}

// redriveRun gives a dead run one more attempt. Any process may claim it.
func (s *server) redriveRun(r request) (response, error) {
	id, err := pathUUID(r, "a run of an automation")
	if err != nil {
		return response{}, err
	}
	reason := r.body.(reasonRequest).Reason
	var run automations.Run
	input := map[string]any{"run": id}
	done, err := s.record(r.Context(), "redrive_automation", reason, input,
		func(tx pgx.Tx, _ string) (any, error) {
			changed, err := automations.Redrive(r.Context(), tx, id)
			if err != nil {
				return nil, err
			}
			if run, err = automations.GetRun(r.Context(), tx, id); err != nil {
				return nil, err
			}
			if !changed {
				return nil, problem.New(http.StatusConflict, "run %s is not dead: status %s", id, run.Status)
			}
			a, err := automations.Get(r.Context(), tx, run.AutomationID)
			if err != nil {
				return nil, err
			}
			input["automation"] = a.Name
			return map[string]string{"automation_id": run.AutomationID}, automations.Notify(r.Context(), tx)
		})
	if err != nil {
		return response{}, err
	}
	run.Output = redact.JSON(run.Output, maxShown)
	return response{body: run, status: http.StatusAccepted, trace: done.TraceID}, nil
}

// setEnabledFunc enables or disables a webhook endpoint or target.
type setEnabledFunc func(
	ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string,
) (bool, error)

func (s *server) listTargets(r request) (response, error) {
	targets, err := hooks.Targets(r.Context(), s.pool)
	return response{body: pageOf(targets, "")}, err
}

func (s *server) setWebhookEnabled(
	action, kind string, enabled bool, set setEnabledFunc,
) func(request) (response, error) {
	return func(r request) (response, error) {
		return s.changeNamed(r, action, kind, hooks.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
			return set(r.Context(), tx, name, enabled, actorName(r.Context()), reason)
		})
	}
}

// resendWebhook gives a dead message one more attempt.
func (s *server) resendWebhook(r request) (response, error) {
	if _, err := pathUUID(r, "an outgoing message"); err != nil {
		return response{}, err
	}
	return s.changeNamed(r, "resend_webhook", "webhook_id", hooks.ErrNotFound,
		func(tx pgx.Tx, id, _ string) (bool, error) {
			resent, err := hooks.Resend(r.Context(), tx, id)
			return requireChanged(resent, err, "message %s is not dead: it was sent or is pending", id)
		})
}

// webhookRoutes returns the routes of admin actions on webhooks. Package surfaces/webhook registers the rest.
func (s *server) webhookRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/webhooks/targets", response: page[hooks.Target]{}, handle: s.listTargets,
			about: "Targets of outgoing webhooks by name, with their pending and dead messages.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/enable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("enable_webhook_target", "target", true, hooks.SetTarget),
			about:  "Enable a target by name and send its pending messages.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/disable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("disable_webhook_target", "target", false, hooks.SetTarget),
			about:  "Disable a target by name. Pending messages wait; new events are not sent.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/enable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("enable_webhook", "endpoint", true, hooks.SetEndpoint),
			about:  "Enable an endpoint by name.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/disable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("disable_webhook", "endpoint", false, hooks.SetEndpoint),
			about:  "Disable an endpoint by name. Requests to it get 404.",
		}, {
			method: "POST", path: "/v1/webhooks/outbox/{id}/resend", body: reasonRequest{}, response: change{},
			handle:    s.resendWebhook,
			conflicts: true,
			about:     "Give a dead outgoing message one more attempt under the same webhook-id. 409 if it is not dead.",
		},
	}
}
