package api

import (
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/trace"
)

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
