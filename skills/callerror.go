package skills

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// ErrNotFound reports an unknown skill.
var ErrNotFound = errors.New("skill not found")

// Classes of [CallError].
const (
	ClassTimeout     = "timeout"     // no answer within the skill's timeout
	ClassHTTPStatus  = "http_status" // the service answered with an error
	ClassNetwork     = "network"     // the service or the database is unreachable
	ClassNoAnswer    = "no_answer"   // the request was sent, and has no usable answer
	ClassSQL         = "sql"         // the database rejected the query
	ClassTooLarge    = "too_large"   // the result exceeds the limit
	ClassRefused     = "refused"     // a rule forbids the call
	ClassUnavailable = "unavailable" // the server of an mcp: skill is unreachable
	ClassPanic       = "panic"
	ClassHandler     = "handler"     // the handler failed or cannot run
	ClassFlowFailed  = "flow_failed" // the execution of a flow: skill failed
	// ClassFlowCancelled says that the execution of a flow: skill was cancelled. It is no failure of the skill.
	ClassFlowCancelled = "flow_cancelled"

	// ClassConfiguration is the class of a call that this process cannot make, because a setting is missing or invalid.
	// Self-heal does not count the call as a failure of the skill.
	ClassConfiguration = "configuration"

	// ClassBusy is the class of a call that was skipped because another owner holds the lane. Such a call is no failure
	// of the skill.
	ClassBusy = "lane_busy"
)

// UncertainClasses returns the classes of failed calls that may have taken effect.
func UncertainClasses() []string {
	return []string{ClassTimeout, ClassNoAnswer, ClassTooLarge, ClassPanic, ClassFlowFailed, ClassFlowCancelled}
}

// CallError is a failed call.
type CallError struct {
	Class   string
	Message string
}

func (e *CallError) Error() string { return e.Message }

// NewConfigError returns the error of a call whose setting is missing or invalid. The message must name the setting.
func NewConfigError(format string, args ...any) *CallError {
	return newCallError(ClassConfiguration, format, args...)
}

// maxMessage bounds the message of a CallError.
const maxMessage = 1000

func newCallError(class, format string, args ...any) *CallError {
	return &CallError{Class: class, Message: textcut.Stored(fmt.Sprintf(format, args...), maxMessage)}
}

// classify maps err to a CallError. callCtx is callerCtx with the call's timeout. If callerCtx has ended, classify
// returns its cause: the caller gave up, so the skill is not blamed.
func classify(callerCtx, callCtx context.Context, c Call, err error) error {
	if callerCtx.Err() != nil {
		return fmt.Errorf("call %s: %w", c.Skill.Name, context.Cause(callerCtx))
	}
	if callCtx.Err() != nil {
		return newCallError(ClassTimeout, "%s did not answer within %s", c.Skill.Name, c.Skill.Timeout())
	}
	if ce, ok := errors.AsType[*CallError](err); ok {
		return newCallError(ce.Class, "%s", err)
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return newCallError(ClassTimeout, "%s", err)
	}
	return newCallError(ClassHandler, "%s", err)
}
