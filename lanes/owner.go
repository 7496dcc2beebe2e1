package lanes

import (
	"context"
	"regexp"
	"strconv"

	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/trace"
)

// Owner is one claim of one run: who holds a lane. The zero value owns nothing. Owners are made by
// ClaimOwner for executions and by Acquire and AcquireWait for everything else, where each call
// is an owner of its own.
type Owner struct {
	name  string
	claim bool // of an execution: its lanes end with it, in SQL
}

var executionID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ClaimOwner is the owner of the lanes of an execution under one of its claims. With anything but
// an execution's id and a claim number above 0 it is the zero Owner, which every function
// refuses with ErrInvalid.
func ClaimOwner(execution string, claim int64) Owner {
	if claim <= 0 || !executionID.MatchString(execution) {
		return Owner{}
	}
	return Owner{name: execution + "#" + strconv.FormatInt(claim, 10), claim: true}
}

// String is the owner as it stands in agent_locks.locked_by.
func (o Owner) String() string { return o.name }

// runOwner is a new owner for work outside executions, never the same twice. A trace in
// ctx becomes its beginning, so that the live view can name it, and a process its end, so that the sweep finds it.
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
