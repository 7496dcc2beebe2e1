package api

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"unicode/utf8"

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

// change is what an admin's lever did. Changed is false when it was so already.
type change struct {
	Name       string `json:"name"`
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// atRevision lock what an admin changes, by what it is called in the record, where the request says on which revision
// that is based.
var atRevision = map[string]func(ctx context.Context, tx pgx.Tx, name string, revision int) error{
	"objective": objectives.AtRevision, "automation": automations.AtRevision, "skill": skills.AtRevision,
}

// withCurrent adds what is there now to the refusal of a change that was based on something else.
func (s *server) withCurrent(ctx context.Context, err error) error {
	stale, ok := errors.AsType[*postgres.StaleError](err)
	if !ok {
		return err
	}
	var current any
	var unread error
	switch stale.What {
	case "objective":
		current, unread = objectives.Get(ctx, s.pool, stale.Name)
	case "automation":
		var a automations.Automation
		a, unread = automations.Get(ctx, s.pool, stale.Name)
		a.Arguments = redact.JSON(a.Arguments, maxShown)
		current = a
	case "skill":
		current, unread = skills.Get(ctx, s.pool, stale.Name)
	}
	if unread != nil {
		return unread
	}
	p, _ := problem.Of(stale)
	return p.WithBoth(current, nil)
}

// audited is [activity.Record] for the admin of a request: input names the object.
func (s *server) audited(ctx context.Context, action, reason string, input map[string]any,
	fn func(tx pgx.Tx, traceID string) (output any, err error),
) (change, error) {
	r, err := activity.Record(ctx, s.pool, activity.Act{Name: action, Reason: reason, Input: input}, fn)
	return change{TraceID: r.TraceID, ActivityID: r.ActivityID}, err
}

// objectiveDetail is an objective with its steps and what shows that they are done.
type objectiveDetail struct {
	objectives.Objective
	Steps    []objectives.Step     `json:"steps"`
	Evidence []objectives.Evidence `json:"evidence"`
}

func (s *server) listObjectives(r request) (answer, error) {
	got, err := paged("objectives", r.query, func(o objectives.Objective) string { return o.ID },
		func(before string, limit int) ([]objectives.Objective, error) {
			return objectives.List(r.Context(), s.pool, objectives.Filter{
				Status: r.query["status"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func (s *server) getObjective(r request) (answer, error) {
	name, err := nameIn(r, objectives.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	o, err := objectives.Get(r.Context(), s.pool, name)
	if err != nil {
		return answer{}, err
	}
	detail := objectiveDetail{Objective: o}
	if detail.Steps, err = objectives.Steps(r.Context(), s.pool, o.ID); err == nil {
		detail.Evidence, err = objectives.EvidenceOf(r.Context(), s.pool, o.ID)
	}
	detail.Steps, detail.Evidence = orEmpty(detail.Steps), orEmpty(detail.Evidence)
	return answer{body: detail, trace: o.LastTraceID, revision: o.Revision}, err
}

func (s *server) acceptObjective(r request) (answer, error) {
	return s.decideObjective(r, "accept_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Accept(r.Context(), tx, name, admin, reason)
	})
}

func (s *server) rejectObjective(r request) (answer, error) {
	return s.decideObjective(r, "reject_objective", func(tx pgx.Tx, name, reason string) (bool, error) {
		return objectives.Reject(r.Context(), tx, name, admin, reason)
	})
}

// decideObjective decides a proposal; one that is decided already stays as it is.
func (s *server) decideObjective(r request, action string, decide func(pgx.Tx, string, string) (bool, error)) (answer, error) {
	return s.pull(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
		decided, err := decide(tx, name, reason)
		if err == nil && !decided {
			err = problem.New(http.StatusConflict, "objective %s is no proposal, or was decided already", name)
		}
		return decided, err
	})
}

// pull is a lever on something with a name: audited, with a reason.
func (s *server) pull(r request, action, thing string, missing error, fn func(tx pgx.Tx, name, reason string) (bool, error)) (answer, error) {
	name, err := nameIn(r, missing)
	if err != nil {
		return answer{}, err
	}
	based, err := r.known()
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var changed bool
	done, err := s.audited(r.Context(), action, reason, map[string]any{thing: name},
		func(tx pgx.Tx, _ string) (any, error) {
			if hold, guarded := atRevision[thing]; guarded {
				if err := hold(r.Context(), tx, name, based); err != nil {
					return nil, err
				}
			}
			var err error
			changed, err = fn(tx, name, reason)
			return map[string]bool{"changed": changed}, err
		})
	if err != nil {
		return answer{}, s.withCurrent(r.Context(), err)
	}
	done.Name, done.Changed = name, changed
	return answer{body: done, trace: done.TraceID}, nil
}

// nameIn is the name or id in the path. What a model has named is looked for as it named it, controls and all: it must
// be possible to refuse it.
func nameIn(r request, missing error) (string, error) {
	name := r.PathValue("id")
	if !utf8.ValidString(name) || !keepable(name) || len(name) > maxText {
		return "", missing
	}
	return name, nil
}

// listMemory lists, or with q searches, which gives one page: the order of matches is no place to go on from.
func (s *server) listMemory(r request) (answer, error) {
	if q := r.query["q"]; q != "" {
		for _, other := range []string{"cursor", "category", "prefix", "trace_id"} {
			if r.query[other] != "" {
				return answer{}, badParameter("parameters q and %s do not go together", other)
			}
		}
		owner, err := s.owner(r)
		if err != nil {
			return answer{}, err
		}
		found, err := s.memory.Search(r.Context(), s.pool, owner, q, r.query.limit())
		return answer{body: pageOf(found, "")}, err
	}
	var only *memory.Owner
	if r.query["agent"] != "" {
		owner, err := s.owner(r)
		if err != nil {
			return answer{}, err
		}
		only = &owner
	}
	got, err := paged("memory", r.query, func(e memory.Entry) string { return e.ID },
		func(before string, limit int) ([]memory.Entry, error) {
			return memory.List(r.Context(), s.pool, memory.Filter{
				Owner: only, Category: r.query["category"], Prefix: r.query["prefix"], TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func (s *server) pauseObjective(r request) (answer, error) {
	return s.setObjective(r, "pause_objective", objectives.Active, objectives.Paused)
}

func (s *server) resumeObjective(r request) (answer, error) {
	return s.setObjective(r, "resume_objective", objectives.Paused, objectives.Active)
}

// setObjective moves an objective from one status to another; it is refused when it has a third.
func (s *server) setObjective(r request, action, from, to string) (answer, error) {
	return s.pull(r, action, "objective", objectives.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		o, err := objectives.Get(r.Context(), tx, name)
		if err != nil {
			return false, err
		}
		changed, err := objectives.SetStatus(r.Context(), tx, o.ID, from, to)
		if err == nil && !changed {
			err = problem.New(http.StatusConflict, "objective %s is %s, not %s", o.Name, o.Status, from)
		}
		return changed, err
	})
}

// forget deletes an entry. The record has its category and key, and not its value: what is forgotten is gone.
func (s *server) forget(r request, fn func(tx pgx.Tx) (memory.Entry, error)) (answer, error) {
	input := map[string]any{}
	var gone memory.Entry
	done, err := s.audited(r.Context(), "forget_memory", r.body.(because).Reason, input, func(tx pgx.Tx, _ string) (_ any, err error) {
		gone, err = fn(tx)
		input["id"] = gone.ID
		maps.Copy(input, memoryInput(gone.Owner, gone.Category, gone.Key))
		return map[string]bool{"changed": true}, err
	})
	if err != nil {
		return answer{}, err
	}
	done.Name, done.Changed = gone.Key, true
	return answer{body: done, trace: done.TraceID}, nil
}

// decision is what an admin says to an approval.
type decision struct {
	Decision string `json:"decision"` // approve or reject
	Reason   string `json:"reason,omitempty"`
}

func (d decision) check() error {
	switch {
	case d.Decision != "approve" && d.Decision != "reject":
		return badBody("decision is %.60q; it can be approve or reject", d.Decision)
	case len(d.Reason) > maxReason:
		return badBody("reason is longer than %d bytes", maxReason)
	case !storable(d.Reason):
		return badBody("reason has control characters")
	}
	return nil
}

func approvalStatuses() []string {
	return []string{"pending", "approved", "rejected", "expired", "consumed"}
}

func (s *server) listApprovals(r request) (answer, error) {
	got, err := paged("approvals", r.query, func(a approvals.Approval) string { return a.ID },
		func(before string, limit int) ([]approvals.Approval, error) {
			return approvals.List(r.Context(), s.pool, approvals.Filter{
				Status: r.query["status"], Skill: r.query["skill"], TraceIDs: r.query.traceIDs(), Before: before, Limit: limit,
			})
		})
	return answer{body: got}, err
}

func (s *server) getApproval(r request) (answer, error) {
	id, err := uuidIn(r, "an approval")
	if err != nil {
		return answer{}, err
	}
	got, err := approvals.Get(r.Context(), s.pool, id)
	return answer{body: got, trace: got.TraceID}, err
}

// decideApproval is recorded under an op_ trace of its own, by the package that decides.
func (s *server) decideApproval(r request) (answer, error) {
	id, err := uuidIn(r, "an approval")
	if err != nil {
		return answer{}, err
	}
	said := r.body.(decision)
	audit := trace.New(trace.Operate)
	ctx := trace.With(r.Context(), trace.Span{TraceID: audit, Surface: trace.Operate})
	got, err := approvals.Decide(ctx, s.pool, id, said.Decision == "approve", admin, said.Reason)
	if errors.Is(err, approvals.ErrDecided) {
		late, unread := approvals.Get(r.Context(), s.pool, id)
		return answer{trace: late.TraceID}, errors.Join(fmt.Errorf("decide: %w", err), unread)
	}
	if err != nil {
		return answer{}, fmt.Errorf("decide: %w", err)
	}
	return answer{body: got, trace: string(audit)}, nil
}

// maxShown is how many bytes of one value are shown.
const maxShown = 64 << 10

// automationDetail is an automation with its latest runs, newest first.
type automationDetail struct {
	automations.Automation
	Runs []automations.Run `json:"runs"`
}

func (s *server) listAutomations(r request) (answer, error) {
	got, err := paged("automations", r.query, func(a automations.Automation) string { return a.ID },
		func(before string, limit int) ([]automations.Automation, error) {
			return automations.List(r.Context(), s.pool, automations.Filter{
				Enabled: r.query.flag("enabled"), Skill: r.query["skill"], Source: r.query["source"], Before: before, Limit: limit,
			})
		})
	for i := range got.Items {
		got.Items[i].Arguments = redact.JSON(got.Items[i].Arguments, maxShown)
	}
	return answer{body: got}, err
}

func (s *server) getAutomation(r request) (answer, error) {
	name, err := nameIn(r, automations.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	a, err := automations.Get(r.Context(), s.pool, name)
	if err != nil {
		return answer{}, err
	}
	runs, err := automations.Runs(r.Context(), s.pool, automations.RunFilter{AutomationID: a.ID, Limit: defaultPage})
	if err != nil {
		return answer{}, err
	}
	a.Arguments = redact.JSON(a.Arguments, maxShown)
	for i := range runs {
		runs[i].Output = redact.JSON(runs[i].Output, maxShown)
	}
	return answer{body: automationDetail{a, orEmpty(runs)}, trace: a.LastTraceID, revision: a.Revision}, nil
}

func (s *server) enableAutomation(r request) (answer, error) {
	return s.pull(r, "enable_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		return automations.Enable(r.Context(), tx, name)
	})
}

func (s *server) disableAutomation(r request) (answer, error) {
	return s.pull(r, "disable_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
		return automations.Disable(r.Context(), tx, name, admin, reason)
	})
}

// acceptAutomation accepts a proposal; one that is none stays as it is.
func (s *server) acceptAutomation(r request) (answer, error) {
	return s.pull(r, "accept_automation", "automation", automations.ErrNotFound, func(tx pgx.Tx, name, _ string) (bool, error) {
		accepted, err := automations.Accept(r.Context(), tx, name, admin)
		if err == nil && !accepted {
			err = problem.New(http.StatusConflict, "automation %s is no proposal, or was decided already", name)
		}
		return accepted, err
	})
}

// runAutomation makes a run due, under the trace of the admin's order; whichever process sees it first takes it.
func (s *server) runAutomation(r request) (answer, error) {
	name, err := nameIn(r, automations.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var run automations.Run
	_, err = s.audited(r.Context(), "run_automation", reason, map[string]any{"automation": name},
		func(tx pgx.Tx, traceID string) (any, error) {
			var err error
			if run, err = automations.Enqueue(r.Context(), tx, name, traceID); err == nil {
				err = automations.Notify(r.Context(), tx)
			}
			return map[string]string{"run_id": run.ID}, err
		})
	if err != nil {
		return answer{}, err
	}
	return answer{body: run, status: http.StatusAccepted, trace: run.TraceID}, nil
}

// redriveRun gives a dead letter one more attempt; whichever process sees it first takes it.
func (s *server) redriveRun(r request) (answer, error) {
	id, err := uuidIn(r, "a run of an automation")
	if err != nil {
		return answer{}, err
	}
	reason := r.body.(because).Reason
	var run automations.Run
	input := map[string]any{"run": id}
	done, err := s.audited(r.Context(), "redrive_automation", reason, input,
		func(tx pgx.Tx, _ string) (any, error) {
			again, err := automations.Redrive(r.Context(), tx, id)
			if err != nil {
				return nil, err
			}
			if run, err = automations.GetRun(r.Context(), tx, id); err != nil {
				return nil, err
			}
			if !again {
				return nil, problem.New(http.StatusConflict, "run %s is not dead but %s", id, run.Status)
			}
			a, err := automations.Get(r.Context(), tx, run.AutomationID)
			if err != nil {
				return nil, err
			}
			input["automation"] = a.Name
			return map[string]string{"automation_id": run.AutomationID}, automations.Notify(r.Context(), tx)
		})
	if err != nil {
		return answer{}, err
	}
	run.Output = redact.JSON(run.Output, maxShown)
	return answer{body: run, status: http.StatusAccepted, trace: done.TraceID}, nil
}

// switching takes an endpoint or a target of webhooks in or out of service.
type switching func(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error)

func (s *server) listTargets(r request) (answer, error) {
	got, err := hooks.Targets(r.Context(), s.pool)
	return answer{body: pageOf(got, "")}, err
}

// switchWebhook is a lever on an endpoint or a target.
func (s *server) switchWebhook(action, thing string, enabled bool, set switching) func(request) (answer, error) {
	return func(r request) (answer, error) {
		return s.pull(r, action, thing, hooks.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
			return set(r.Context(), tx, name, enabled, admin, reason)
		})
	}
}

// resendWebhook gives a message that was given up one more attempt.
func (s *server) resendWebhook(r request) (answer, error) {
	if _, err := uuidIn(r, "an outgoing message"); err != nil {
		return answer{}, err
	}
	return s.pull(r, "resend_webhook", "webhook_id", hooks.ErrNotFound, func(tx pgx.Tx, id, _ string) (bool, error) {
		again, err := hooks.Resend(r.Context(), tx, id)
		if err == nil && !again {
			err = problem.New(http.StatusConflict, "message %s was not given up: it was sent, or is still to be", id)
		}
		return again, err
	})
}

// hooking is what an admin does about webhooks, beside the routes of the surface that receives them.
func (s *server) hooking() []route {
	return []route{
		{
			method: "GET", path: "/v1/webhooks/targets", answer: page[hooks.Target]{}, handle: s.listTargets,
			about: "Who is told of the agent's events, by name, with how many messages wait for each and how many were given up.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/enable", body: because{}, answer: change{},
			handle: s.switchWebhook("enable_webhook_target", "target", true, hooks.SetTarget),
			about:  "Put a target back into service, by its name. What waited for it is sent.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/disable", body: because{}, answer: change{},
			handle: s.switchWebhook("disable_webhook_target", "target", false, hooks.SetTarget),
			about:  "Take a target out of service, by its name. What is to be sent waits; of new events it is not told.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/enable", body: because{}, answer: change{},
			handle: s.switchWebhook("enable_webhook", "endpoint", true, hooks.SetEndpoint),
			about:  "Put an endpoint back into service, by its name.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/disable", body: because{}, answer: change{},
			handle: s.switchWebhook("disable_webhook", "endpoint", false, hooks.SetEndpoint),
			about:  "Take an endpoint out of service, by its name: what is posted to it is answered with 404.",
		}, {
			method: "POST", path: "/v1/webhooks/outbox/{id}/resend", body: because{}, answer: change{}, handle: s.resendWebhook,
			conflicts: true,
			about:     "Give an outgoing message that was given up one more attempt, under the same webhook-id. 409 when it was not given up.",
		},
	}
}
