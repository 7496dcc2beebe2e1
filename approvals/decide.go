package approvals

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Decide approves or rejects for the principal by, and resumes the waiting execution. It records an activity under the
// trace of ctx, or a new op_ trace. It returns [ErrDecided] if it is too late, [ErrFourEyes] if by requested the call,
// and [ErrNotFound] for an unknown id. The reason is stored as [postgres.Text].
func Decide(ctx context.Context, db postgres.Beginner, id string, approve bool, by, reason string) (Approval, error) {
	reason = postgres.Text(reason)
	if span, ok := trace.From(ctx); !ok || span.TraceID == "" {
		ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate})
	}
	var decided Approval
	broken := false // a try lost its connection, perhaps after its commit
	decide := func(tx pgx.Tx) error {
		if err := activity.SetActor(ctx, tx); err != nil {
			return err
		}
		rows, err := tx.Query(ctx,
			`select `+columns+` from decide_agent_approval(@id, @approve, @by, @reason) a`+joinRequester,
			postgres.Strict{"id": id, "approve": approve, "by": by, "reason": reason})
		decided, err = postgres.CollectOne(rows, err, ErrNotFound, "record decision", pgx.RowToStructByPos[Approval])
		if postgres.IsCode(err, codeFourEyes) {
			return ErrFourEyes
		}
		if err != nil {
			return err
		}
		return recordDecision(ctx, tx, decided, approve)
	}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		err := postgres.InTx(ctx, db, decide)
		if errors.Is(err, ErrNotFound) {
			current, getErr := Get(ctx, db, id)
			switch {
			case postgres.Broken(getErr):
				return getErr
			case errors.Is(getErr, ErrNotFound):
				err = ErrNotFound
			case getErr != nil:
				err = getErr
			case broken && current.DecidedBy == by && current.Reason == reason && approve == (current.Status != "rejected"):
				decided, err = current, nil // that try decided
			default:
				err = &DecidedError{current}
			}
		}
		broken = broken || postgres.Broken(err)
		return err
	})
	if err != nil {
		return Approval{}, fmt.Errorf("decide approval %s: %w", id, err)
	}
	return decided, nil
}

// recordDecision writes the row of the activity log.
func recordDecision(ctx context.Context, tx pgx.Tx, a Approval, approve bool) error {
	input := map[string]any{
		"approval_id": a.ID, "skill": a.SkillName,
		"decision": map[bool]string{true: "approve", false: "reject"}[approve], "by": a.DecidedBy, "reason": a.Reason,
	}
	if a.Own(a.DecidedBy) {
		input["four_eyes"] = "the requester decided"
	}
	_, err := activity.Note(ctx, tx, activity.Entry{
		Skill: "decide_approval", Input: activity.WithActorFields(ctx, input),
	}, activity.Outcome{Output: map[string]string{"status": a.Status, "trace_id": a.TraceID}})
	return err
}

// DecidedError explains an [ErrDecided].
type DecidedError struct{ Approval Approval }

func (e *DecidedError) Unwrap() error { return ErrDecided }

func (e *DecidedError) Error() string {
	a := e.Approval
	at := func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" }
	switch {
	case a.DecidedAt != nil:
		was := "approved"
		if a.Status == "rejected" {
			was = "rejected"
		}
		message := fmt.Sprintf("the approval was decided already: %s by %s at %s", was, a.Decider(), at(*a.DecidedAt))
		if a.Reason != "" {
			message += ": " + a.Reason
		}
		if a.ConsumedAt != nil {
			message += "; it was used at " + at(*a.ConsumedAt)
		} else if a.Status == "expired" {
			message += "; it has expired since"
		}
		return message
	case a.Reason != "":
		return "the approval is closed: " + a.Reason
	case a.Status == "expired" && a.Parked:
		return "the approval is closed: its execution has ended, or it expired at " + at(a.ExpiresAt)
	case a.Status == "expired":
		return "the approval expired at " + at(a.ExpiresAt)
	}
	return "the approval is for a skill that has changed since"
}

// Decision is how an approval was decided.
type Decision struct {
	Status   string // approved, rejected or expired
	Reason   string // the admin's words, or why it expired
	TimedOut bool   `json:"-"` // nobody decided in time
}

// Await waits durably for the decision on an approval, until the approval expires. name is that of the wait's step.
func Await(ctx context.Context, name string, a Approval) (d Decision, err error) {
	timeout := time.Second + max(0, time.Until(a.ExpiresAt)) // an approval may expire during an earlier wait
	out, err := executions.Wait(ctx, name, executions.Approval(a.ID, min(timeout, Lifetime)))
	switch {
	case err != nil:
		return d, err
	case out.TimedOut:
		d = Decision{Status: "expired", TimedOut: true}
	default:
		if err := json.Unmarshal(out.Data, &d); err != nil {
			return d, fmt.Errorf("read the decision on approval %s: %w", a.ID, err)
		}
	}
	reasons := map[string]string{"expired": "nobody decided in time", "rejected": "an admin rejected it"}
	d.Reason = cmp.Or(d.Reason, reasons[d.Status])
	return d, nil
}
