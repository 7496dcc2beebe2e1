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
	maxName    = 120      // of a span: a model may invent any tool name
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

// spans converts rows to spans. It skips rows with an invalid trace id.
func (f passRows) spans(content bool) []span {
	var all []span
	owner := map[string]runRow{}
	for _, r := range f.runs {
		owner[r.ID] = r
		all = append(all, r.span())
	}
	for _, w := range f.waits {
		all = append(all, w.span(owner[w.ExecutionID]))
	}
	for _, a := range f.activities {
		all = append(all, a.span(content))
	}
	valid := all[:0]
	for _, s := range all {
		if s.trace.Valid() {
			valid = append(valid, s.clampEnd(s.end))
		}
	}
	return valid
}

// clampEnd moves the end of a span to latest at most, and to its start at least. One statement ends a phase and the
// call in it microseconds apart.
func (s span) clampEnd(latest time.Time) span {
	if s.end.After(latest) && !s.start.After(latest) {
		s.end = latest
	}
	if s.end.Before(s.start) {
		s.end = s.start
	}
	return s
}

func (r runRow) span() span {
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
	s.attributes = set(
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
func (r runRow) isTurn() bool {
	return r.Flow == "operate" || r.Flow == "chat" || r.Flow == "delegate"
}

// crossTraceLink returns the link to an execution of another trace; none for an execution of the same trace.
func crossTraceLink(id *string, linked, own string) []trace.Remote {
	if id == nil || linked == "" || linked == own || !trace.ID(linked).Valid() {
		return nil
	}
	return []trace.Remote{{TraceID: trace.ID(linked).OTel(), SpanID: trace.SpanID(*id), Sampled: true}}
}

func (w waitRow) span(run runRow) span {
	s := span{
		trace: trace.ID(run.TraceID), id: trace.SpanID(w.ExecutionID, "wait", w.Step), parent: trace.SpanID(w.ExecutionID),
		name: spanName("wait", w.kind()), kind: oteltrace.SpanKindInternal, start: w.BeganAt, end: w.EndedAt,
		attributes: set(
			text(agentTraceRef, run.TraceID), text(agentSurface, run.Surface), text(agentExecution, w.ExecutionID),
			text(agentWaitFor, w.kind()), text(agentStep, w.Step), attribute.Bool(agentTimedOut, w.TimedOut),
		),
	}
	if w.PhaseID != nil {
		s.parent = trace.SpanID(*w.PhaseID)
	}
	if s.start.After(s.end) {
		s.start = s.end
	}
	return s.clampEnd(run.CompletedAt)
}

// kind maps the event that ended a wait to the kind of the wait.
func (w waitRow) kind() string {
	switch w.Event {
	case "MESSAGE_RECEIVED":
		return "response"
	case "AGENT_COMPLETED":
		return "agent"
	case "DOCUMENT_UPLOADED":
		return "document"
	case "SIGNATURE_COMPLETED":
		return "signature"
	case "TEST_COMPLETED":
		return "test"
	case "SCHEDULE_REACHED":
		return "delay"
	case "APPROVAL_DECIDED":
		return "approval"
	case "LANE_FREED":
		return "lane"
	}
	return "event"
}

func (a activityRow) span(content bool) span {
	s := span{
		trace: trace.ID(a.TraceID), id: trace.SpanID(a.ID), start: a.CreatedAt, end: a.FinishedAt,
		kind:   oteltrace.SpanKindInternal,
		failed: a.Status == "error" || a.Status == "unknown", message: redact.Text(a.ErrorMessage, maxMessage),
	}
	for _, ancestor := range []*string{a.ParentID, a.RunID, a.RootID} {
		if ancestor != nil && *ancestor != a.ID {
			s.parent = trace.SpanID(*ancestor)
			break
		}
	}
	var specific []attribute.KeyValue
	s.name, s.kind, specific = a.describe()
	s.attributes = append(specific, set(
		text(genConversation, a.ThreadID), text(agentTraceRef, a.TraceID), text(agentSurface, a.Surface),
		text(agentExecution, postgres.Deref(a.ExecutionID)), text(agentActivity, a.ID), text(agentKind, a.Kind),
		text(agentStatus, a.Status),
		text(agentStep, a.Step), text(agentLane, a.Lane), text(agentPurpose, a.Purpose),
		text(agentIdempotent, a.IdempotencyKey),
	)...)
	if s.failed {
		s.attributes = append(s.attributes, text(errorType, cmp.Or(a.ErrorClass, "_OTHER")))
	}
	if content {
		s.attributes = append(s.attributes, a.content()...)
	}
	for _, latest := range []*time.Time{a.ParentEnded, a.RunEnded} {
		if latest != nil {
			s = s.clampEnd(*latest)
		}
	}
	return s
}

// describe returns the name, the kind and the attributes that the GenAI conventions define for a row's kind.
func (a activityRow) describe() (name string, kind oteltrace.SpanKind, specific []attribute.KeyValue) {
	switch a.Kind {
	case "model":
		specific = set(
			text(genOperation, opChat), text(genProvider, provider), text(genAgentName, a.Agent), text(genRequestModel, a.Model),
			attribute.Int64(genInputTokens, number(a.PromptTokens)),
			attribute.Int64(genOutputTokens, number(a.CompletionTokens)),
			attribute.Float64(agentCost, a.CostUsd),
		)
		if a.Status == "success" {
			specific = append(specific, text(genAnswerModel, a.Model))
		}
		if unknown := number(a.UnknownTokens); unknown > 0 {
			specific = append(specific, attribute.Int64(agentUnknown, unknown))
		}
		if a.Estimated {
			specific = append(specific, attribute.Bool(agentEstimated, true))
		}
		return spanName(opChat, a.Model), oteltrace.SpanKindClient, specific
	case "call":
		return spanName(opTool, a.SkillName), oteltrace.SpanKindInternal, set(
			text(genOperation, opTool), text(genToolName, a.SkillName), text(genToolType, "function"),
			text(genAgentName, a.Agent))
	}
	return spanName(a.Kind, a.SkillName), oteltrace.SpanKindInternal, set(text(genAgentName, a.Agent))
}

// content returns the messages, arguments and results of a row. This program redacted them before it stored them. A
// second redaction covers rows of other programs.
func (a activityRow) content() []attribute.KeyValue {
	switch a.Kind {
	case "model":
		return set(text(genInputMessages, inputMessages(a.Input)), text(genOutputMessages, outputMessages(a.Output)))
	case "call":
		return set(text(genToolArguments, redacted(a.Input)), text(genToolResult, redacted(a.Output)))
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

// spanName joins an operation and its target, truncated. Names have low cardinality, as the conventions require.
func spanName(operation, target string) string {
	return textcut.Text(strings.TrimSpace(operation+" "+strings.ToValidUTF8(target, "\uFFFD")), maxName)
}

// text returns a string attribute. [set] drops empty attributes.
func text(key, value string) attribute.KeyValue {
	return attribute.String(key, strings.ToValidUTF8(value, "\uFFFD"))
}

// set returns the attributes without empty strings and repeated keys. The first attribute of a key wins.
func set(all ...attribute.KeyValue) []attribute.KeyValue {
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

func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0 // a row of another program
	}
	return max(n, 0)
}

// spanID and traceID decode hex digits that are known to be valid.
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
