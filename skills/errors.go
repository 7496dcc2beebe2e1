package skills

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
)

// ErrNotFound reports a skill that does not exist.
var ErrNotFound = errors.New("skill not found")

// Classes of [CallError].
const (
	ClassTimeout     = "timeout"     // no answer within the skill's timeout
	ClassHTTPStatus  = "http_status" // the service answered, but not with success
	ClassNetwork     = "network"     // the service, or the database, could not be reached
	ClassSQL         = "sql"         // the database refused the query
	ClassTooLarge    = "too_large"   // more than a result may hold
	ClassRefused     = "refused"     // not done because a rule forbids it
	ClassUnavailable = "unavailable" // the server behind an mcp: skill cannot be reached
	ClassPanic       = "panic"
	ClassHandler     = "handler" // the handler says so, or cannot run

	// ClassConfiguration is a call that this process cannot make as it is configured: a setting is missing or cannot be
	// read. It is no failure of the skill, and self-heal does not count it.
	ClassConfiguration = "configuration"
)

// CallError is a failed call.
type CallError struct {
	Class   string
	Message string
}

func (e *CallError) Error() string { return e.Message }

// Misconfigured is the refusal of a call that this process has no setting for; the message names the setting.
func Misconfigured(format string, args ...any) *CallError {
	return failure(ClassConfiguration, format, args...)
}

func failure(class, format string, args ...any) *CallError {
	return &CallError{Class: class, Message: clip(fmt.Sprintf(format, args...))}
}

// ClassBusy is the class of a call that did nothing, because somebody else holds the lane that it needs. It is skipped, and no failure of
// the skill.
const ClassBusy = "lane_busy"

const maxMessage = 1000

// clip makes a message short and storable.
func clip(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage], "") + "…"
}

// classify gives err its class. outer is the caller's context and inner the call's own: when outer
// has ended, nothing is known about the skill and the error is outer's.
func classify(outer, inner context.Context, c Call, err error) error {
	if outer.Err() != nil {
		return fmt.Errorf("call %s: %w", c.Skill.Name, context.Cause(outer))
	}
	if inner.Err() != nil {
		return failure(ClassTimeout, "%s did not answer within %s", c.Skill.Name, c.Skill.Timeout())
	}
	if ce, ok := errors.AsType[*CallError](err); ok {
		return failure(ce.Class, "%s", err)
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return failure(ClassTimeout, "%s", err)
	}
	return failure(ClassHandler, "%s", err)
}
