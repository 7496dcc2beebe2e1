package lanes

import (
	"context"
	"regexp"
	"strconv"

	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/trace"
)

// Owner is one claim of one run: the holder of a lane. The zero value owns nothing. ClaimOwner makes the owner of an
// execution. Acquire and AcquireWait make a new owner for each call.
type Owner struct {
	name  string
	claim bool // the owner is an execution; its end releases its lanes in SQL
}

var executionID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ClaimOwner returns the owner for one claim of an execution. For an invalid id or claim it returns the zero Owner,
// which every function rejects with ErrInvalid.
func ClaimOwner(execution string, claim int64) Owner {
	if claim <= 0 || !executionID.MatchString(execution) {
		return Owner{}
	}
	return Owner{name: execution + "#" + strconv.FormatInt(claim, 10), claim: true}
}

// String returns the owner as in agent_locks.locked_by.
func (o Owner) String() string { return o.name }

// runOwner returns a new unique owner for work outside executions. It starts with the trace ID of ctx for the live
// view, and ends with the ID of the process for the sweep.
func runOwner(ctx context.Context, process string) Owner {
	name := "run"
	if id, ok := trace.From(ctx); ok {
		name = string(id.TraceID)
	}
	name += "/" + ulid.Make().String()
	if process != "" {
		name += "@" + process
	}
	return Owner{name: name}
}
