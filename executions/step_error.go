package executions

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StepError is the recorded error of a step. The first run and every replay return the same values, so a flow may
// branch on Class. It does not wrap the original error.
type StepError struct {
	Step    string `json:"-"`
	Class   string `json:"class"`
	Message string `json:"message"`
	// Until is the time after which a retry may succeed; zero if unknown.
	Until time.Time `json:"until,omitzero"`
}

// Error returns the message of the error that ended the step.
func (e *StepError) Error() string { return e.Message }

// ErrorClass returns a stable word for the kind of error.
func (e *StepError) ErrorClass() string { return e.Class }

// ClassUnknown is the class of a call with an unknown outcome.
const ClassUnknown = "unknown"

// asStepError converts an error to the form that is recorded.
func asStepError(key string, err error) *StepError {
	failure := &StepError{Step: key, Class: "error", Message: postgres.Text(err.Error())}
	var classified interface{ ErrorClass() string }
	if stepErr, ok := errors.AsType[*StepError](err); ok {
		failure.Until = stepErr.Until
	}
	switch {
	case errors.As(err, &classified):
		failure.Class = postgres.Text(classified.ErrorClass())
	case errors.Is(err, context.DeadlineExceeded):
		failure.Class = "timeout"
	}
	return failure
}

// recoverPanic calls the function of a step and returns a panic as an error.
func recoverPanic[T any](
	ctx context.Context, effect *Effect, fn func(context.Context, *Effect) (T, error),
) (value T, err error) {
	defer func() {
		if p := recover(); p != nil {
			if r, outside := runFrom(ctx); outside == nil {
				r.e.log.ErrorContext(ctx, "step panicked", "step", StepKey(ctx), "panic", fmt.Sprint(p), "stack",
					string(debug.Stack()))
			}
			err = &StepError{Class: "panic", Message: fmt.Sprintf("panic: %v", p)}
		}
	}()
	value, err = fn(ctx, effect)
	return value, probeError(err)
}

// probeError calls the methods of an error that the engine calls later without a recover. So a nil pointer of an error
// type panics here, where the panic is recovered.
func probeError(err error) error {
	if err != nil {
		_, _ = err.Error(), errors.Is(err, errProbe)
		var classified interface{ ErrorClass() string }
		if errors.As(err, &classified) {
			_ = classified.ErrorClass()
		}
	}
	return err
}

// errProbe matches no error, so errors.Is visits the whole chain.
var errProbe = errors.New("never")
