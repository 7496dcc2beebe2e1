package telemetry

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	maxName    = 120      // bytes of a span's name; a model may invent a long tool name
	maxContent = 16 << 10 // of a content attribute, as in the activity log
	maxMessage = 4 << 10
	provider   = "openai" // the wire protocol; the actual provider is unknown
)

// span is a finished span, before conversion to OpenTelemetry.
type span struct {
	trace      trace.ID
	id, parent string // 16 hex digits; parent is empty at the root
	name       string
	kind       oteltrace.SpanKind
	start, end time.Time
	attributes []attribute.KeyValue
	links      []trace.Remote
	failed     bool
	message    string // error message if failed
}

// spans converts rows to spans. It skips rows with an invalid trace id. No span ends before it starts.
func (rows passRows) spans(withContent bool) []span {
	var spans []span
	executions := map[string]executionRow{}
	for _, r := range rows.executions {
		executions[r.ID] = r
		spans = append(spans, r.span())
	}
	for _, w := range rows.waits {
		spans = append(spans, w.span(executions[w.ExecutionID]))
	}
	for _, a := range rows.activities {
		spans = append(spans, a.span(withContent))
	}
	valid := spans[:0]
	for _, s := range spans {
		if !s.trace.Valid() {
			continue
		}
		if s.end.Before(s.start) {
			s.end = s.start
		}
		valid = append(valid, s)
	}
	return valid
}

// endBy moves the end of a span to the end of its parent at most: one statement ends a phase and the call in it
// microseconds apart. A span that starts after that keeps its end.
func (s *span) endBy(parentEnd time.Time) {
	if s.end.After(parentEnd) && !s.start.After(parentEnd) {
		s.end = parentEnd
	}
}

// span returns the span of an execution. Its parent is the parent execution of the same trace, else the root of the
// trace. Its links lead to the parent and the original of a fork in other traces, and to callers outside.
func (r executionRow) span() span {
	s := span{
		trace: trace.ID(r.TraceID), id: trace.SpanID(r.ID), start: r.CreatedAt, end: r.CompletedAt,
		kind:   oteltrace.SpanKindInternal,
		failed: r.Status == "failed" || r.Status == "timeout", message: redact.Text(r.ErrorMessage, maxMessage),
	}
	switch {
	case r.ParentID != nil && r.ParentTrace == r.TraceID:
		s.parent = trace.SpanID(*r.ParentID)
	case r.RootID != nil && *r.RootID != r.ID:
		s.parent = trace.SpanID(*r.RootID)
	}
	s.links = append(s.links, crossTraceLink(r.ParentID, r.ParentTrace, r.TraceID)...)
	s.links = append(s.links, crossTraceLink(r.ForkedFrom, r.ForkedTrace, r.TraceID)...)
	for _, header := range r.Links {
		if remote, ok := trace.ParseTraceparent(header); ok {
			s.links = append(s.links, remote)
		}
	}
	operation, target, nameKey := opWorkflow, r.Flow, genWorkflowName
	if r.isTurn() {
		operation, target, nameKey = opAgent, r.Agent, genAgentName
	}
	s.name = spanName(operation, target)
	s.attributes = nonEmpty(
		text(genOperation, operation), text(nameKey, target), text(genAgentName, r.Agent), text(genConversation, r.ThreadID),
		text(agentTraceRef, r.TraceID), text(agentSurface, r.Surface), text(agentExecution, r.ID), text(agentFlow, r.Flow),
		text(agentStatus, r.Status), text(agentResult, r.ResultType), attribute.Int64(agentClaim, r.Claim),
		attribute.Int64(agentQueued, max(0, r.StartedAt.Sub(r.CreatedAt).Milliseconds())),
	)
	if r.ParentID != nil && r.Detached {
		s.attributes = append(s.attributes, attribute.Bool(agentDetached, true))
	}
	if s.failed {
		s.attributes = append(s.attributes, text(errorType, r.ResultType))
		if r.FailedStep != "" {
			s.attributes = append(s.attributes, text(agentStep, r.FailedStep))
		}
	}
	return s
}

// isTurn reports whether an execution is a turn of one agent. A workflow may have turns of several agents.
func (r executionRow) isTurn() bool {
	return r.Flow == "operate" || r.Flow == "chat" || r.Flow == "delegate"
}

// crossTraceLink returns the link to an execution of another trace; none for an execution of the same trace.
func crossTraceLink(id *string, linked, own string) []trace.Remote {
	if id == nil || linked == "" || linked == own || !trace.ID(linked).Valid() {
		return nil
	}
	return []trace.Remote{{TraceID: trace.ID(linked).OTel(), SpanID: trace.SpanID(*id), Sampled: true}}
}

// span returns the span of a wait of an execution. Its parent is the phase of the wait, else the execution.
func (w waitRow) span(execution executionRow) span {
	s := span{
		trace: trace.ID(execution.TraceID),
		id:    trace.SpanID(w.ExecutionID, "wait", w.Step), parent: trace.SpanID(w.ExecutionID),
		name: spanName("wait", w.Kind), kind: oteltrace.SpanKindInternal, start: w.BeganAt, end: w.EndedAt,
		attributes: nonEmpty(
			text(agentTraceRef, execution.TraceID), text(agentSurface, execution.Surface),
			text(agentExecution, w.ExecutionID), text(agentWaitFor, w.Kind),
			text(agentStep, w.Step), attribute.Bool(agentTimedOut, w.TimedOut),
		),
	}
	if w.PhaseID != nil {
		s.parent = trace.SpanID(*w.PhaseID)
	}
	if s.start.After(s.end) {
		s.start = s.end
	}
	s.endBy(execution.CompletedAt)
	return s
}

// span returns the span of an activity. Its parent is the parent activity of the same trace, else the execution, else
// the root of the trace.
func (a activityRow) span(withContent bool) span {
	s := span{
		trace: trace.ID(a.TraceID), id: trace.SpanID(a.ID), start: a.CreatedAt, end: a.FinishedAt,
		kind:   oteltrace.SpanKindInternal,
		failed: a.Status == "error" || a.Status == "unknown", message: redact.Text(a.ErrorMessage, maxMessage),
	}
	for _, ancestor := range []*string{a.ParentID, a.OwnerID, a.RootID} {
		if ancestor != nil && *ancestor != a.ID {
			s.parent = trace.SpanID(*ancestor)
			break
		}
	}
	var specific []attribute.KeyValue
	s.name, s.kind, specific = a.describe()
	s.attributes = append(specific, nonEmpty(
		text(genConversation, a.ThreadID), text(agentTraceRef, a.TraceID), text(agentSurface, a.Surface),
		text(agentExecution, postgres.Deref(a.ExecutionID)), text(agentActivity, a.ID), text(agentKind, a.Kind),
		text(agentStatus, a.Status),
		text(agentStep, a.Step), text(agentLane, a.Lane), text(agentPurpose, a.Purpose),
		text(agentIdempotent, a.IdempotencyKey),
	)...)
	if s.failed {
		s.attributes = append(s.attributes, text(errorType, cmp.Or(a.ErrorClass, "_OTHER")))
	}
	if withContent {
		s.attributes = append(s.attributes, a.content()...)
	}
	for _, parentEnd := range []*time.Time{a.ParentEnded, a.OwnerEnded} {
		if parentEnd != nil {
			s.endBy(*parentEnd)
		}
	}
	return s
}

// describe returns the name, the kind and the attributes that only spans of the activity's kind have.
func (a activityRow) describe() (name string, kind oteltrace.SpanKind, specific []attribute.KeyValue) {
	switch a.Kind {
	case "model":
		specific = nonEmpty(
			text(genOperation, opChat), text(genProvider, provider), text(genAgentName, a.Agent), text(genRequestModel, a.Model),
			attribute.Int64(genInputTokens, parseCount(a.PromptTokens)),
			attribute.Int64(genOutputTokens, parseCount(a.CompletionTokens)),
			attribute.Float64(agentCost, a.CostUsd),
		)
		if a.Status == "success" {
			specific = append(specific, text(genResponseModel, a.Model))
		}
		if unknown := parseCount(a.UnknownTokens); unknown > 0 {
			specific = append(specific, attribute.Int64(agentUnknown, unknown))
		}
		if a.Estimated {
			specific = append(specific, attribute.Bool(agentEstimated, true))
		}
		return spanName(opChat, a.Model), oteltrace.SpanKindClient, specific
	case "call":
		return spanName(opTool, a.SkillName), oteltrace.SpanKindInternal, nonEmpty(
			text(genOperation, opTool), text(genToolName, a.SkillName), text(genToolType, "function"),
			text(genAgentName, a.Agent))
	}
	return spanName(a.Kind, a.SkillName), oteltrace.SpanKindInternal, nonEmpty(text(genAgentName, a.Agent))
}

// content returns the messages, arguments and results of a row. This program redacted them before it stored them. A
// second redaction covers rows of other programs.
func (a activityRow) content() []attribute.KeyValue {
	switch a.Kind {
	case "model":
		return nonEmpty(text(genInputMessages, inputMessages(a.Input)), text(genOutputMessages, outputMessages(a.Output)))
	case "call":
		return nonEmpty(text(genToolArguments, redacted(a.Input)), text(genToolResult, redacted(a.Output)))
	}
	return nil
}

// redacted returns raw, redacted and bounded, or "" for null.
func redacted(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	return string(redact.JSON(raw, maxContent))
}

// spanName joins an operation and its target, truncated. The targets are names of flows, agents, models, skills and
// kinds, so the names have low cardinality, as the conventions require. A tool name that a model invented is an
// exception.
func spanName(operation, target string) string {
	return textcut.Text(strings.TrimSpace(operation+" "+strings.ToValidUTF8(target, "\uFFFD")), maxName)
}

// text returns a string attribute. [nonEmpty] drops empty attributes.
func text(key, value string) attribute.KeyValue {
	return attribute.String(key, strings.ToValidUTF8(value, "\uFFFD"))
}

// nonEmpty returns the attributes without empty strings and repeated keys. The first attribute of a key wins.
func nonEmpty(all ...attribute.KeyValue) []attribute.KeyValue {
	seen := map[attribute.Key]bool{}
	result := make([]attribute.KeyValue, 0, len(all))
	for _, kv := range all {
		if kv.Value.Type() == attribute.STRING && kv.Value.AsString() == "" || seen[kv.Key] {
			continue
		}
		seen[kv.Key] = true
		result = append(result, kv)
	}
	return result
}

// parseCount reads a count of tokens.
func parseCount(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0 // a row of another program
	}
	return max(n, 0)
}

// spanID and traceID decode hex digits, which trace.SpanID and trace.ID.OTel return.
func spanID(digits string) (id oteltrace.SpanID) {
	raw, _ := hex.DecodeString(digits)
	copy(id[:], raw)
	return id
}

func traceID(digits string) (id oteltrace.TraceID) {
	raw, _ := hex.DecodeString(digits)
	copy(id[:], raw)
	return id
}
