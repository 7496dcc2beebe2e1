package skills

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const (
	maxResult   = 256 << 10
	maxDepth    = 100
	maxExponent = 300 // decimal; float64 overflows above 308
)

// encodeResult encodes value as JSON that PostgreSQL stores, within the limits of size and depth.
func encodeResult(value any) (json.RawMessage, error) {
	raw, err := exactjson.Encode(value)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	if len(raw) > maxResult {
		return nil, tooLarge(len(raw))
	}
	tree, err := exactjson.Decode(raw)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be read as JSON: %s", err)
	}
	tree, err = sanitize(tree, 0)
	if err != nil {
		return nil, err
	}
	result, err := exactjson.Encode(tree)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	if len(result) > maxResult {
		return nil, tooLarge(len(result))
	}
	return result, nil
}

func tooLarge(size int) error {
	return newCallError(ClassTooLarge, "the result has %d bytes, over the limit of %d: request less", size, maxResult)
}

// sanitize replaces NUL characters and numbers with large exponents, and bounds the depth.
func sanitize(value any, depth int) (any, error) {
	if depth > maxDepth {
		return nil, newCallError(ClassTooLarge, "the result is nested more than %d levels deep", maxDepth)
	}
	switch v := value.(type) {
	case string:
		return stripNUL(v), nil
	case json.Number:
		return portableNumber(v), nil
	case []any:
		for i := range v {
			item, err := sanitize(v[i], depth+1)
			if err != nil {
				return nil, err
			}
			v[i] = item
		}
		return v, nil
	case map[string]any:
		cleaned := make(map[string]any, len(v))
		for key := range v {
			item, err := sanitize(v[key], depth+1)
			if err != nil {
				return nil, err
			}
			cleaned[stripNUL(key)] = item
		}
		return cleaned, nil
	}
	return value, nil
}

func stripNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }

// portableNumber returns n, or its text if the exponent would overflow a float64.
func portableNumber(n json.Number) any {
	_, exponent, ok := strings.Cut(strings.ToLower(n.String()), "e")
	if !ok {
		return n
	}
	if e, err := strconv.Atoi(exponent); err != nil || e > maxExponent || e < -maxExponent {
		return n.String()
	}
	return n
}

// ErrNotFound reports an unknown skill.
var ErrNotFound = errors.New("skill not found")

// Classes of [CallError].
const (
	ClassTimeout     = "timeout"     // no answer within the skill's timeout
	ClassHTTPStatus  = "http_status" // the service answered with an error
	ClassNetwork     = "network"     // the service or the database is unreachable
	ClassSQL         = "sql"         // the database rejected the query
	ClassTooLarge    = "too_large"   // the result exceeds the limit
	ClassRefused     = "refused"     // a rule forbids the call
	ClassUnavailable = "unavailable" // the server of an mcp: skill is unreachable
	ClassPanic       = "panic"
	ClassHandler     = "handler" // the handler failed or cannot run

	// ClassConfiguration is the class of a call that this process cannot make, because a setting is missing or invalid.
	// Self-heal does not count the call as a failure of the skill.
	ClassConfiguration = "configuration"
)

// CallError is a failed call.
type CallError struct {
	Class   string
	Message string
}

func (e *CallError) Error() string { return e.Message }

// Misconfigured returns the error of a call whose setting is missing or invalid. The message must name the setting.
func Misconfigured(format string, args ...any) *CallError {
	return newCallError(ClassConfiguration, format, args...)
}

func newCallError(class, format string, args ...any) *CallError {
	return &CallError{Class: class, Message: textcut.Stored(fmt.Sprintf(format, args...), maxMessage)}
}

// ClassBusy is the class of a call that was skipped because another owner holds the lane. Such a call is no failure of
// the skill.
const ClassBusy = "lane_busy"

const maxMessage = 1000

// classify maps err to a CallError. outer is the caller's context, inner the call's context with its timeout. If outer
// has ended, classify returns the cause of outer, because the skill did not fail.
func classify(outer, inner context.Context, c Call, err error) error {
	if outer.Err() != nil {
		return fmt.Errorf("call %s: %w", c.Skill.Name, context.Cause(outer))
	}
	if inner.Err() != nil {
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
