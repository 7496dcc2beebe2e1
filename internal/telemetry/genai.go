package telemetry

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// The GenAI semantic conventions, which are under development: github.com/open-telemetry/semantic-conventions-genai
// at commit 06ec68e722c45a7218e23ea1bc1339fe4e21ecae (2026-10). This is the only place that names them; names of a
// later commit are changed here, and in the golden sets of the tests.
const (
	opWorkflow = "invoke_workflow"
	opAgent    = "invoke_agent"
	opChat     = "chat"
	opTool     = "execute_tool"

	genOperation    = "gen_ai.operation.name"
	genProvider     = "gen_ai.provider.name"
	genAgentName    = "gen_ai.agent.name"
	genWorkflowName = "gen_ai.workflow.name"
	genConversation = "gen_ai.conversation.id"
	genRequestModel = "gen_ai.request.model"
	genAnswerModel  = "gen_ai.response.model"
	genInputTokens  = "gen_ai.usage.input_tokens"
	genOutputTokens = "gen_ai.usage.output_tokens"
	genToolName     = "gen_ai.tool.name"
	genToolType     = "gen_ai.tool.type"

	// Content, which is sent only where captureContent says so.
	genInputMessages  = "gen_ai.input.messages"
	genOutputMessages = "gen_ai.output.messages"
	genToolArguments  = "gen_ai.tool.call.arguments"
	genToolResult     = "gen_ai.tool.call.result"

	captureContent = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

	// Of the general conventions.
	errorType = "error.type"
)

// What the conventions have no name for. The prefix is the product's own.
const (
	agentTraceRef   = "agent.trace_ref" // the id as people read it: hb_…
	agentSurface    = "agent.surface"
	agentExecution  = "agent.execution.id"
	agentFlow       = "agent.flow"
	agentStatus     = "agent.status"
	agentResult     = "agent.result_type"
	agentClaim      = "agent.claim"
	agentDetached   = "agent.detached"  // a child that nobody waits for, so it may outlive its parent
	agentQueued     = "agent.queued_ms" // between creation and begin
	agentActivity   = "agent.activity.id"
	agentKind       = "agent.activity.kind"
	agentStep       = "agent.step"
	agentLane       = "agent.lane"
	agentPurpose    = "agent.purpose"
	agentIdempotent = "agent.idempotency_key"
	agentCost       = "agent.llm.cost_usd"
	agentEstimated  = "agent.llm.usage_estimated"
	agentUnknown    = "agent.llm.unknown_tokens" // the part of the tokens that the provider did not report
	agentWaitFor    = "agent.wait.for"
	agentTimedOut   = "agent.wait.timed_out"
)

// said is a message as OpenAI's protocol has it and the log keeps it.
type said struct {
	Role       string `json:"role"`
	Content    any    `json:"content"`
	ToolCallID string `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// message is one as the GenAI conventions have it.
type message struct {
	Role  string           `json:"role"`
	Parts []map[string]any `json:"parts"`
}

// messages turns the messages of a model call's row into those of the conventions, as JSON. What the row had to cut
// is no list of messages any more, and is given as it is.
func messages(raw json.RawMessage, asked bool) string {
	if len(raw) == 0 || string(raw) == "null" || string(raw) == "{}" {
		return ""
	}
	var list []said
	var input struct {
		Messages []said `json:"messages"`
	}
	var answer said
	switch {
	case asked && json.Unmarshal(raw, &input) == nil && len(input.Messages) > 0:
		list = input.Messages
	case !asked && json.Unmarshal(raw, &answer) == nil && answer.Role != "":
		list = []said{answer}
	default:
		return redacted(raw)
	}
	converted := make([]message, len(list))
	for i, m := range list {
		converted[i] = message{Role: m.Role, Parts: m.parts()}
	}
	return string(redact.JSON(converted, maxContent))
}

func (m said) parts() []map[string]any {
	parts := []map[string]any{}
	switch {
	case m.Role == "tool":
		parts = append(parts, map[string]any{"type": "tool_call_response", "id": m.ToolCallID, "response": m.Content})
	case m.Content != nil && m.Content != "":
		parts = append(parts, map[string]any{"type": "text", "content": m.Content})
	}
	for _, c := range m.ToolCalls {
		var arguments any = c.Function.Arguments
		if json.Valid([]byte(c.Function.Arguments)) {
			arguments = json.RawMessage(c.Function.Arguments)
		}
		parts = append(parts, map[string]any{
			"type": "tool_call", "id": c.ID, "name": c.Function.Name,
			"arguments": arguments,
		})
	}
	return parts
}
