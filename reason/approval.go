package reason

import (
	"context"
	"errors"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

// ApprovalMode decides how a turn handles a call that needs an approval.
type ApprovalMode int

const (
	// Defer records the request and continues; a later run makes the call.
	Defer ApprovalMode = iota
	// Park waits durably for the decision and makes an approved call.
	Park
)

// approvalRequest is the approval that a call needs.
type approvalRequest struct {
	skill skills.Skill
	key   string // skill and arguments
	row   approvals.Approval
}

// requireApproval decides at once in a sandbox. Park postpones the call until the turn has made the reply's other
// calls. Defer answers with the pending or approved request.
func (w *turn) requireApproval(ctx context.Context, c *call, s skills.Skill) error {
	hash, err := approvals.Hash(c.args)
	if err != nil {
		return err // the schema's check parsed them
	}
	c.approval = &approvalRequest{skill: s, key: s.Name + " " + hash}
	if w.Sandbox != nil {
		return w.decideSandboxed(ctx, c, s)
	}
	if w.Approvals == Park {
		return nil
	}
	if err := w.requestApproval(ctx, c); err != nil || c.result != "" {
		return err
	}
	ending, status, note := " (awaits approval)", "pending_approval",
		"An admin must approve this call. It runs later, if approved; do not ask again."
	if c.approval.row.Status == "approved" { // requested by an earlier run
		ending, status, note = " (approved)", "approved", "This call is approved and runs later; do not ask again."
	}
	w.outcome.Calls = append(w.outcome.Calls, s.Name+ending)
	c.result = encode(map[string]string{"status": status, "approval_id": c.approval.row.ID, "note": note})
	return w.notifyOnce(ctx, c, "deferred", string(activity.PendingApproval), "")
}

// awaitApprovals requests the approvals of a reply and makes each approved call. It requests one of several equal calls
// at a time, because a denial holds for all of them.
func (w *turn) awaitApprovals(ctx context.Context, calls []*call) error {
	for {
		waiting, err := w.requestApprovals(ctx, calls)
		if err != nil || len(waiting) == 0 {
			return err
		}
		if err := w.notifyApprovals(ctx, waiting); err != nil {
			return err
		}
		for _, c := range waiting {
			if err := w.awaitDecision(ctx, c); err != nil {
				return err
			}
		}
	}
}

// requestApprovals requests approvals of the calls without a result, and returns the waiting ones.
func (w *turn) requestApprovals(ctx context.Context, calls []*call) (waiting []*call, err error) {
	requested := map[string]bool{}
	for _, c := range calls {
		if c.approval == nil || c.result != "" || requested[c.approval.key] {
			continue
		}
		if reason, denied := w.deniedReasons[c.approval.key]; denied {
			if err := w.repeatDenial(ctx, c, reason); err != nil {
				return nil, err
			}
			continue
		}
		if err := w.requestApproval(ctx, c); err != nil {
			return nil, err
		}
		if c.result == "" {
			requested[c.approval.key] = true
			waiting = append(waiting, c)
		}
	}
	return waiting, nil
}

// requestApproval requests one approval. If the database cannot store the request, the failure is the call's result.
func (w *turn) requestApproval(ctx context.Context, c *call) error {
	s := c.approval.skill
	args := c.args
	if w.Approvals == Defer { // the later run does not know the read revisions
		args = builtins.WithRevisions(s, args, w.seen)
	}
	approval, err := approvals.Ask(ctx, approvals.Request{
		Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: args, Park: w.Approvals == Park,
	})
	if failure, ok := errors.AsType[*executions.StepError](err); ok {
		c.result = w.limitResult(errorResult(failure))
		return nil
	}
	c.approval.row = approval
	return err
}

// notifyApprovals reports the waiting approvals, at most once over all runs of the turn.
func (w *turn) notifyApprovals(ctx context.Context, waiting []*call) error {
	if w.OnApproval == nil {
		return nil
	}
	first, err := w.firstTime(ctx, "approvals")
	if err != nil || !first {
		return err
	}
	for _, c := range waiting {
		w.OnApproval(c.approval.row)
	}
	w.callbacks.flush(ctx)
	return nil
}

// awaitDecision waits for the decision on a call, and makes or denies it.
func (w *turn) awaitDecision(ctx context.Context, c *call) error {
	id := c.approval.row.ID
	if w.OnWait != nil {
		w.OnWait()
	}
	d, err := approvals.Await(ctx, "decision on "+id, c.approval.row)
	switch {
	case err != nil:
		return err
	case d.Status != "approved":
		return w.deny(ctx, c, d.Reason)
	}
	step, onIntent := approvals.Grant(ctx, id)
	err = w.invokeSkill(ctx, c, c.approval.skill, step, onIntent)
	if approvals.IsUnusable(err) {
		return w.deny(ctx, c, "the approval has expired, or the skill has changed since it was given")
	}
	return err
}

// deny denies a call for the rest of the turn.
func (w *turn) deny(ctx context.Context, c *call, reason string) error {
	w.deniedReasons[c.approval.key] = reason
	w.outcome.Calls = append(w.outcome.Calls, c.name+" (denied)")
	c.result = deniedResult(reason)
	return w.notifyOnce(ctx, c, "denied "+c.approval.row.ID, classDenied, reason)
}

// repeatDenial refuses a call that was denied earlier in the turn, without another request.
func (w *turn) repeatDenial(ctx context.Context, c *call, reason string) error {
	c.result = deniedResult(reason)
	return w.recordRefusal(ctx, c, c.approval.skill.ID, classDenied, "denied before in this turn: "+reason)
}

func deniedResult(reason string) string {
	return encode(map[string]string{"error": "DENIED", "reason": reason, "note": "Do not ask for this call again."})
}
