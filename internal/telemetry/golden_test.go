package telemetry_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/telemetry/otlptest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// TestGoldenAttributes are the whole sets, by the conventions at the commit that genai.go names.
func TestGoldenAttributes(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	id := trace.New(trace.Heartbeat)
	run := s.one(`insert into agent_executions (trace_id, surface, flow, thread_id, status, started_at)
		values ($1, 'heartbeat', 'heartbeat', 'T1', 'running', now()) returning id::text`, string(id))
	s.exec(`insert into agent_activity (trace_id, execution_id, kind, surface, skill_name, purpose, status, model,
		token_usage, cost_usd, step, lane,
		input, output, finished_at) values ($1, $2, 'model', 'heartbeat', 'model_call', 'reflect', 'success', 'gpt-4o',
		'{"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}', 0.25, 'reflect/model', 'heartbeat',
		'{"messages": [{"role": "user", "content": "hello, my key is sk-abcdefghijklmnopqrstuvwxyz123456"}], "tools": []}',
		'{"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": "{\"a\":1}"}}]}', clock_timestamp())`, string(id), run)
	s.exec(`insert into agent_activity (trace_id, execution_id, kind, surface, skill_name, status, error_class,
		error_message, idempotency_key, input, finished_at)
		values ($1, $2, 'call', 'heartbeat', 'look', 'error', 'timeout', 'it took too long', 'k1', '{"a": 1}',
		  clock_timestamp())`, string(id), run)
	s.exec(`update agent_executions set status = 'failed', error_message = 'no use' where id = $1`, run)
	golden := map[string]map[string]any{
		"invoke_workflow heartbeat": {
			"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "heartbeat", "gen_ai.agent.name": "agent",
			"gen_ai.conversation.id": "T1", "agent.trace_ref": string(id), "agent.surface": "heartbeat",
			"agent.execution.id": run,
			"agent.flow":         "heartbeat", "agent.status": "failed", "agent.result_type": "failure", "agent.claim": int64(0),
			"agent.queued_ms": int64(0),
			"error.type":      "failure",
		},
		"chat gpt-4o": {
			"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.agent.name": "agent",
			"gen_ai.request.model": "gpt-4o", "gen_ai.response.model": "gpt-4o", "gen_ai.usage.input_tokens": int64(7),
			"gen_ai.usage.output_tokens": int64(3), "agent.llm.cost_usd": 0.25, "agent.trace_ref": string(id),
			"agent.surface":      "heartbeat",
			"agent.execution.id": run, "agent.activity.kind": "model", "agent.status": "success", "agent.step": "reflect/model",
			"agent.lane": "heartbeat", "agent.purpose": "reflect",
		},
		"execute_tool look": {
			"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look", "gen_ai.tool.type": "function",
			"gen_ai.agent.name": "agent", "agent.trace_ref": string(id), "agent.surface": "heartbeat", "agent.execution.id": run,
			"agent.activity.kind": "call", "agent.status": "error", "agent.idempotency_key": "k1", "error.type": "timeout",
		},
	}
	spans := s.exported()
	compare(t, spans, golden)
	kinds := map[string]string{}
	for _, one := range spans {
		kinds[one.Name] = one.Kind + " " + one.Message
	}
	want := map[string]string{
		"invoke_workflow heartbeat": "SPAN_KIND_INTERNAL no use", "chat gpt-4o": "SPAN_KIND_CLIENT ",
		"execute_tool look": "SPAN_KIND_INTERNAL it took too long",
	}
	assert.NoDiff(t, want, kinds)
	// With the opt-in the same again, and content, without secrets.
	s.exec(`update agent_span_export
		set sent_upto = lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '10 minutes')`)
	golden["chat gpt-4o"]["gen_ai.input.messages"] = `[{"parts":[{"content":"hello, my key is [redacted]","type":"text"}],"role":"user"}]`
	golden["chat gpt-4o"]["gen_ai.output.messages"] = `[{"parts":[{"arguments":{"a":1},"id":"c1","name":"look","type":"tool_call"}],"role":"assistant"}]`
	golden["execute_tool look"]["gen_ai.tool.call.arguments"] = `{"a":1}`
	again := s.exported("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true")
	require.Equal(t, 6, len(again))
	var fresh []otlptest.Span
	for _, one := range again {
		if one.Attributes["gen_ai.input.messages"] != nil || one.Attributes["gen_ai.tool.call.arguments"] != nil {
			fresh = append(fresh, one)
		}
	}
	compare(t, fresh, golden)
}

// compare compares all attributes but the row's id, which differs.
func compare(t *testing.T, spans []otlptest.Span, golden map[string]map[string]any) {
	t.Helper()
	assert.True(t, len(spans) > 0, "no spans")
	for _, one := range spans {
		delete(one.Attributes, "agent.activity.id")
		if text, ok := one.Attributes["gen_ai.tool.call.arguments"].(string); ok {
			one.Attributes["gen_ai.tool.call.arguments"] = strings.ReplaceAll(text, " ", "")
		}
		assert.Equal(t, "", cmp.Diff(golden[one.Name], one.Attributes), one.Name)
	}
}
