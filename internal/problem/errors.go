package problem

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Of returns the problem that the client may see. forLog reports that the cause belongs in the log, for the operator.
func Of(err error) (p *Problem, forLog bool) {
	if errors.As(err, &p) {
		return p, false
	}
	if p, forLog = ofType(err); p != nil {
		return p, forLog
	}
	switch {
	case is(err, activity.ErrCursor):
		return BadParameter("parameter cursor is not a cursor of this listing"), false
	case is(err, trace.ErrInvalid, lanes.ErrInvalid):
		return New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id"), false
	case is(err, activity.ErrNotFound, executions.ErrNotFound, skills.ErrNotFound, memory.ErrNotFound,
		memory.ErrConflictNotFound, objectives.ErrNotFound,
		automations.ErrNotFound, automations.ErrRunNotFound, approvals.ErrNotFound, threads.ErrNotFound, webhooks.ErrNotFound,
		documents.ErrNotFound, channels.ErrNotFound, evals.ErrNotFound, agents.ErrNotFound):
		return New(http.StatusNotFound, "%s", err), false
	case is(err, approvals.ErrFourEyes):
		return New(http.StatusForbidden, "%s", approvals.ErrFourEyes).Kind("four-eyes", "Four eyes"), false
	case is(err, documents.ErrTooLarge):
		return New(http.StatusRequestEntityTooLarge, "%s", err), false
	case is(err, documents.ErrTooMany):
		return New(http.StatusConflict, "%s", err), false
	case is(err, threads.ErrEmpty, documents.ErrEmpty, documents.ErrForm):
		return BadBody("%s", err), false
	case is(err, memory.ErrConflictDecided, memory.ErrConflictsFull, objectives.ErrNotActive, objectives.ErrConflict,
		objectives.ErrNoEvidence,
		objectives.ErrNameTaken, automations.ErrProposal, automations.ErrSkillDisabled, automations.ErrNameTaken,
		approvals.ErrDecided):
		return New(http.StatusConflict, "%s", err), false
	case is(err, context.Canceled):
		return New(http.StatusServiceUnavailable, "the request was given up"), false
	case is(err, executions.ErrPaused): // before ErrDraining, which it also is
		return New(http.StatusConflict, "%s", err).Kind("paused", "Autonomous work is paused"), false
	case is(err, executions.ErrDraining):
		return New(http.StatusServiceUnavailable, "this process shuts down; try again").Kind("draining", "Draining"), false
	case postgres.Locked(err):
		what, _ := postgres.Diagnose(err)
		return New(http.StatusServiceUnavailable, "%s; try again", what).Kind("locked", "Locked"), true
	case Away(err):
		what, _ := postgres.Diagnose(err) // the advice is for the operator, in the log
		return New(http.StatusServiceUnavailable, "%s; try again", cmp.Or(what, "the database does not answer")).
			Kind("database-away", "Database away"), true
	}
	return New(http.StatusInternalServerError, "something went wrong here; the log has the cause"), true
}

// ofType is Of for errors that carry values; nil for others.
func ofType(err error) (p *Problem, news bool) {
	if busy, ok := errors.AsType[*lanes.BusyError](err); ok {
		return New(http.StatusConflict, "%s", busy).Kind("lane-busy", "Lane busy").WithHolder(busy.Holder), false
	}
	if blocked, ok := errors.AsType[*lanes.BlockedError](err); ok {
		return New(http.StatusConflict, "%s; try again, or end that transaction", blocked.Reason).Kind("lane-in-use",
			"Lane in use"), false
	}
	if refused, ok := errors.AsType[*executions.RunError](err); ok {
		return ofRun(refused), false
	}
	if stale, ok := errors.AsType[*memory.ConflictError](err); ok {
		return ofConflict(stale), false
	}
	if stale, ok := errors.AsType[*postgres.StaleError](err); ok {
		return New(http.StatusPreconditionFailed, "%s", stale).Kind("changed-meanwhile", "Changed meanwhile"), false
	}
	if locked, ok := errors.AsType[*postgres.LockedError](err); ok {
		return New(http.StatusServiceUnavailable, "%s; try again, or end that transaction", locked).Kind("locked", "Locked"),
			true
	}
	return nil, false
}

// ofConflict returns the problem of a changed memory entry, with both values.
func ofConflict(c *memory.ConflictError) *Problem {
	p := New(http.StatusPreconditionFailed, "%s", c).Kind("changed-meanwhile", "Changed meanwhile")
	if c.Theirs != nil {
		p.Current = c.Theirs
	}
	if c.Yours != nil {
		p.Yours = c.Yours
	}
	return p
}

// ofRun returns the worker's problem for an error of a run lock.
func ofRun(err *executions.RunError) *Problem {
	p := New(http.StatusConflict, "%s", err).WithHolder(err.Holder).WithTrace(err.TraceID)
	switch {
	case is(err, executions.ErrMalformed):
		p.Status = http.StatusBadRequest
		return p.Kind("bad-body", "Bad body")
	case is(err, executions.ErrWaitingKey):
		return New(http.StatusNotFound, "%s", err)
	case is(err, executions.ErrHeld):
		return p.Kind("lock-held", "Lock held")
	case is(err, executions.ErrVoid):
		return p.Kind("lock-void", "Lock void")
	case is(err, executions.ErrOutputConflict):
		return p.Kind("step-recorded", "Step recorded otherwise")
	case is(err, executions.ErrNotReady):
		return p.Kind("run-waits", "Run waits")
	case is(err, executions.ErrEnded):
		return p.Kind("run-ended", "Run ended")
	case is(err, executions.ErrPaused):
		return p.Kind("paused", "Autonomous work is paused")
	}
	return p.Kind("not-outside", "Not for workers outside")
}

// is reports whether err is one of targets.
func is(err error, targets ...error) bool {
	for _, target := range targets {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// Away reports an unavailable database: unreachable, starting, stopping, full, read-only or too slow, also for a lock
// or a session.
func Away(err error) bool {
	if _, unreachable := errors.AsType[*pgconn.ConnectError](err); unreachable {
		return true
	}
	if _, broken := errors.AsType[net.Error](err); broken {
		return true
	}
	if strings.HasPrefix(postgres.Code(err), "08") { // a pooler whose server is away
		return true
	}
	// ErrConnClosed: a rollback on a broken connection
	return postgres.Locked(err) || is(err, context.DeadlineExceeded, io.ErrUnexpectedEOF, pgconn.ErrConnClosed) ||
		postgres.IsCode(err,
			"25006",          // the server is read-only
			"25P03", "25P04", // the transaction was idle, or ran, for too long
			"53000", "53100", "53200", "53300", // no transaction ids, disk space, memory or connections are left
			"57014",                            // statement_timeout, or a cancel
			"57P01", "57P02", "57P03", "57P05", // the server stops, has crashed, starts, or ended an idle session
		)
}
