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

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	maxName    = 120      // of a span: a model may call a tool what it likes
	maxContent = 16 << 10 // of an attribute that has content, as in the log
	maxMessage = 4 << 10
	provider   = "openai" // the protocol that is spoken; who answers is not known
)

// span is a finished piece of work as it is sent.
type span struct {
	trace      trace.ID
	id, parent string // 16 hex digits; parent is empty at the root
	name       string
	kind       oteltrace.SpanKind
	start, end time.Time
	attributes []attribute.KeyValue
	links      []trace.Remote
	failed     bool
	message    string // why
}

// spans makes the spans of what was read. A row whose trace id is none of ours cannot be shown.
func (f found) spans(content bool) []span {
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
			valid = append(valid, s.within(s.end))
		}
	}
	return valid
}

// within lets a span end at a moment at the latest, and never before it began. What one statement ends, such as a
// phase and a call in it at a cancel, ends microseconds apart.
func (s span) within(latest time.Time) span {
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
	s.links = append(s.links, linked(r.ParentID, r.ParentTrace, r.TraceID)...)
	s.links = append(s.links, linked(r.ForkedFrom, r.ForkedTrace, r.TraceID)...)
	for _, header := range r.Links {
		if remote, ok := trace.ParseTraceparent(header); ok {
			s.links = append(s.links, remote)
		}
	}
	operation, target, named := opWorkflow, r.Flow, genWorkflowName
	if r.turn() {
		operation, target, named = opAgent, r.Agent, genAgentName
	}
	s.name = title(operation, target)
	s.attributes = set(
		text(genOperation, operation), text(named, target), text(genAgentName, r.Agent), text(genConversation, r.ThreadID),
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

// turn reports whether an execution is one agent's turn, as against a process that may have several.
func (r runRow) turn() bool {
	return r.Flow == "operate" || r.Flow == "chat" || r.Flow == "delegate"
}

// linked is the link to an execution of another trace.
func linked(id *string, its, ours string) []trace.Remote {
	if id == nil || its == "" || its == ours || !trace.ID(its).Valid() {
		return nil
	}
	return []trace.Remote{{TraceID: trace.ID(its).OTel(), SpanID: trace.SpanID(*id), Sampled: true}}
}

func (w waitRow) span(of runRow) span {
	s := span{
		trace: trace.ID(of.TraceID), id: trace.SpanID(w.ExecutionID, "wait", w.Step), parent: trace.SpanID(w.ExecutionID),
		name: title("wait", w.kind()), kind: oteltrace.SpanKindInternal, start: w.BeganAt, end: w.EndedAt,
		attributes: set(
			text(agentTraceRef, of.TraceID), text(agentSurface, of.Surface), text(agentExecution, w.ExecutionID),
			text(agentWaitFor, w.kind()), text(agentStep, w.Step), attribute.Bool(agentTimedOut, w.TimedOut),
		),
	}
	if w.PhaseID != nil {
		s.parent = trace.SpanID(*w.PhaseID)
	}
	if s.start.After(s.end) {
		s.start = s.end
	}
	return s.within(of.CompletedAt)
}

// kind is what was waited for, by the event that ended it.
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
		failed: a.Status == "error" || a.Status == "unknown", message: a.ErrorMessage,
	}
	for _, above := range []*string{a.ParentID, a.RunID, a.RootID} {
		if above != nil && *above != a.ID {
			s.parent = trace.SpanID(*above)
			break
		}
	}
	var about []attribute.KeyValue
	s.name, s.kind, about = a.describe()
	s.attributes = append(about, set(
		text(genConversation, a.ThreadID), text(agentTraceRef, a.TraceID), text(agentSurface, a.Surface),
		text(agentExecution, deref(a.ExecutionID)), text(agentActivity, a.ID), text(agentKind, a.Kind),
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
			s = s.within(*latest)
		}
	}
	return s
}

// describe is what the conventions say about a row of its kind.
func (a activityRow) describe() (name string, kind oteltrace.SpanKind, about []attribute.KeyValue) {
	switch a.Kind {
	case "model":
		about = set(
			text(genOperation, opChat), text(genProvider, provider), text(genAgentName, a.Agent), text(genRequestModel, a.Model),
			attribute.Int64(genInputTokens, number(a.PromptTokens)),
			attribute.Int64(genOutputTokens, number(a.CompletionTokens)),
			attribute.Float64(agentCost, a.CostUsd),
		)
		if a.Status == "success" {
			about = append(about, text(genAnswerModel, a.Model))
		}
		if unknown := number(a.UnknownTokens); unknown > 0 {
			about = append(about, attribute.Int64(agentUnknown, unknown))
		}
		if a.Estimated {
			about = append(about, attribute.Bool(agentEstimated, true))
		}
		return title(opChat, a.Model), oteltrace.SpanKindClient, about
	case "call":
		return title(opTool, a.SkillName), oteltrace.SpanKindInternal, set(
			text(genOperation, opTool), text(genToolName, a.SkillName), text(genToolType, "function"),
			text(genAgentName, a.Agent))
	}
	return title(a.Kind, a.SkillName), oteltrace.SpanKindInternal, set(text(genAgentName, a.Agent))
}

// content is what was said and given, for whoever asks for it. It was redacted when it was stored; what is done here
// again costs little, and holds when a row was written by somebody else.
func (a activityRow) content() []attribute.KeyValue {
	in, out := genToolArguments, genToolResult
	switch a.Kind {
	case "model":
		return set(text(genInputMessages, messages(a.Input, true)), text(genOutputMessages, messages(a.Output, false)))
	case "call":
		return set(text(in, kept(a.Input)), text(out, kept(a.Output)))
	}
	return nil
}

func kept(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" {
		return ""
	}
	return string(redact.JSON(raw, maxContent))
}

// title is the name of a span: few words, from short lists.
func title(operation, target string) string {
	name := strings.TrimSpace(operation + " " + strings.ToValidUTF8(target, "\uFFFD"))
	if len(name) > maxName {
		name = strings.ToValidUTF8(name[:maxName], "") + "…"
	}
	return name
}

// text is an attribute; set leaves empty ones out.
func text(key, value string) attribute.KeyValue {
	return attribute.String(key, strings.ToValidUTF8(value, "\uFFFD"))
}

// set keeps what says something, the first of each name.
func set(all ...attribute.KeyValue) []attribute.KeyValue {
	seen := map[attribute.Key]bool{}
	kept := make([]attribute.KeyValue, 0, len(all))
	for _, kv := range all {
		if kv.Value.Type() == attribute.STRING && kv.Value.AsString() == "" || seen[kv.Key] {
			continue
		}
		seen[kv.Key] = true
		kept = append(kept, kv)
	}
	return kept
}

func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0 // a row that somebody else wrote
	}
	return max(n, 0)
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// spanID and traceID are the bytes of hex digits that this package made, or checked.
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
