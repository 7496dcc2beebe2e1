package telemetry

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// The GenAI semantic conventions, which are under development: github.com/open-telemetry/semantic-conventions-genai
// at commit 06ec68e722c45a7218e23ea1bc1339fe4e21ecae (2026-10). Only this file and the golden sets of the tests name
// them.
const (
	opWorkflow = "invoke_workflow"
	opAgent    = "invoke_agent"
	opChat     = "chat"
	opTool     = "execute_tool"

	genOperation     = "gen_ai.operation.name"
	genProvider      = "gen_ai.provider.name"
	genAgentName     = "gen_ai.agent.name"
	genWorkflowName  = "gen_ai.workflow.name"
	genConversation  = "gen_ai.conversation.id"
	genRequestModel  = "gen_ai.request.model"
	genResponseModel = "gen_ai.response.model"
	genInputTokens   = "gen_ai.usage.input_tokens"
	genOutputTokens  = "gen_ai.usage.output_tokens"
	genToolName      = "gen_ai.tool.name"
	genToolType      = "gen_ai.tool.type"

	// Content is sent only if this environment variable allows it.
	captureContent = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"

	genInputMessages  = "gen_ai.input.messages"
	genOutputMessages = "gen_ai.output.messages"
	genToolArguments  = "gen_ai.tool.call.arguments"
	genToolResult     = "gen_ai.tool.call.result"

	// From the general conventions.
	errorType = "error.type"
)

// Attributes of this product, for which the conventions have none.
const (
	agentTraceRef   = "agent.trace_ref" // the trace id with its prefix: hb_…
	agentSurface    = "agent.surface"
	agentExecution  = "agent.execution.id"
	agentFlow       = "agent.flow"
	agentStatus     = "agent.status"
	agentResult     = "agent.result_type"
	agentClaim      = "agent.claim"
	agentDetached   = "agent.detached"  // a child without a waiting parent
	agentQueued     = "agent.queued_ms" // from creation to start
	agentActivity   = "agent.activity.id"
	agentKind       = "agent.activity.kind"
	agentStep       = "agent.step"
	agentLane       = "agent.lane"
	agentPurpose    = "agent.purpose"
	agentIdempotent = "agent.idempotency_key"
	agentCost       = "agent.llm.cost_usd"
	agentEstimated  = "agent.llm.usage_estimated"
	agentUnknown    = "agent.llm.unknown_tokens" // tokens that the provider did not report
	agentWaitFor    = "agent.wait.for"
	agentTimedOut   = "agent.wait.timed_out"
)

// chatMessage is a message in the form of OpenAI's chat completions, as the log stores it.
type chatMessage struct {
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

// genMessage is a message in the form of the GenAI conventions.
type genMessage struct {
	Role  string           `json:"role"`
	Parts []map[string]any `json:"parts"`
}

// inputMessages converts the messages that a model call sent. Input that the log truncated stays as it is.
func inputMessages(raw json.RawMessage) string {
	var input struct {
		Messages []chatMessage `json:"messages"`
	}
	if json.Unmarshal(raw, &input) != nil || len(input.Messages) == 0 {
		return unconverted(raw)
	}
	return convert(input.Messages)
}

// outputMessages converts the message that a model call returned. Truncated output stays as it is.
func outputMessages(raw json.RawMessage) string {
	var answer chatMessage
	if json.Unmarshal(raw, &answer) != nil || answer.Role == "" {
		return unconverted(raw)
	}
	return convert([]chatMessage{answer})
}

func unconverted(raw json.RawMessage) string {
	if len(raw) == 0 || string(raw) == "null" || string(raw) == "{}" {
		return ""
	}
	return redacted(raw)
}

func convert(list []chatMessage) string {
	converted := make([]genMessage, len(list))
	for i, m := range list {
		converted[i] = genMessage{Role: m.Role, Parts: m.parts()}
	}
	return string(redact.JSON(converted, maxContent))
}

func (m chatMessage) parts() []map[string]any {
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
			"type": "tool_call", "id": c.ID, "name": c.Function.Name, "arguments": arguments,
		})
	}
	return parts
}
