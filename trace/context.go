package trace

import "context"

// Span says where in a piece of work the code that holds the context is. It is a small value:
// change a copy and put that into a derived context.
type Span struct {
	TraceID     ID      // the work
	ExecutionID string  // the durable run that does it
	ActivityID  string  // the activity under which the next one is filed; empty at the top
	CauseID     string  // the model call whose answer asked for what is done next; empty for none
	ThreadID    string  // the conversation the run belongs to; empty for none
	Lane        string  // the lane the work holds, if it was begun for one
	Surface     Surface // where the work began
	Agent       string  // who acts
}

type spanKey struct{}

// With returns a context that carries span instead of what it carried before.
func With(ctx context.Context, span Span) context.Context {
	return context.WithValue(ctx, spanKey{}, span)
}

// As is ctx with another agent acting in it; ctx itself when agent is empty.
func As(ctx context.Context, agent string) context.Context {
	span, ok := From(ctx)
	if agent == "" || !ok {
		return ctx
	}
	span.Agent = agent
	return With(ctx, span)
}

// From returns the span that ctx carries, and whether it has a trace id. A span without one (a
// lane held by a job that no trace covers) is returned too.
func From(ctx context.Context) (Span, bool) {
	span, _ := ctx.Value(spanKey{}).(Span)
	return span, span.TraceID != ""
}

// IDFrom returns the trace id that ctx carries; empty when there is none.
func IDFrom(ctx context.Context) ID {
	span, _ := From(ctx)
	return span.TraceID
}

// WithActivity returns a context whose further activities are filed under the given one, which is what they are done
// for.
func WithActivity(ctx context.Context, activityID string) context.Context {
	span, _ := From(ctx)
	span.ActivityID, span.CauseID = activityID, ""
	return With(ctx, span)
}

// WithCause returns a context whose further activities were asked for by the answer of the given model call.
func WithCause(ctx context.Context, activityID string) context.Context {
	span, _ := From(ctx)
	span.CauseID = activityID
	return With(ctx, span)
}

// WithLane returns a context whose work is done in the given lane.
func WithLane(ctx context.Context, lane string) context.Context {
	span, _ := From(ctx)
	span.Lane = lane
	return With(ctx, span)
}
