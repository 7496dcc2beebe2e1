package api

import (
	"errors"
	"slices"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// approvalRoutes returns the routes that read and decide approvals.
func (s *server) approvalRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/approvals", response: page[approvals.Approval]{}, handle: s.listApprovals,
			about: "Calls that need approval, newest first.",
			params: listParams(enumParam("status", "State of the approval", approvalStatuses()...),
				textParam("skill", "Name of the skill"),
				traceParam),
		}, {
			method: "GET", path: "/v1/approvals/{id}", response: approvals.Approval{}, handle: s.getApproval,
			about: "One call that needs approval, with its exact arguments.",
		}, {
			method: "POST", path: "/v1/approvals/{id}", body: decisionRequest{}, response: approvals.Approval{},
			handle:    s.decideApproval,
			conflicts: true,
			about:     "Approve or reject a call once. The waiting execution resumes. 409 if it was decided or has expired.",
		},
	}
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

func approvalStatuses() []string {
	return []string{"pending", "approved", "rejected", "expired", "consumed"}
}

func (s *server) getApproval(r request) (response, error) {
	id, err := pathUUID(r, "an approval")
	if err != nil {
		return response{}, err
	}
	a, err := approvals.Get(r.Context(), s.pool, id)
	return response{body: a, trace: a.TraceID}, err
}

var approvalDecisions = []string{"approve", "reject"}

type decisionRequest struct {
	Decision string `json:"decision"`
	Reason   string `json:"reason,omitempty"`
}

func (d decisionRequest) check() error {
	if !slices.Contains(approvalDecisions, d.Decision) {
		return problem.BadBody("decision is %.60q; use approve or reject", d.Decision)
	}
	return checkReason(d.Reason)
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
