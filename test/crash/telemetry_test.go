package crash_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/telemetry/otlptest"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// tracedYAML has a heartbeat with an objective: it looks, pays, and has a child flow do the rest.
const tracedYAML = bills.SkillsYAML + bills.ObjectiveYAML + `
kind: skill
name: settle
description: Have the rest settled.
handler: "flow:settlement"
---
kind: flow
name: settlement
actions:
  - {actionType: delay, parameters: {duration: 1s}}
  - {actionType: skill, parameters: {name: look}}
  - {actionType: end, parameters: {summary: settled}}
`

// newTracedTestEnv creates a test environment with a trace receiver. Its heartbeat has a model call, skills, a wait and
// a child.
func newTracedTestEnv(t *testing.T) (*testEnv, *otlptest.Server) {
	t.Helper()
	s := newIdleTestEnv(t, pgtest.URL(t), tracedYAML)
	s.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(req.Messages[0].Content, "You pursue one objective") {
			return bills.Model(req, modeltest.ToolCall("settle", `{}`))
		}
		return modeltest.Text("It went well.")
	})
	receiver := otlptest.New(t)
	s.extraEnviron = append(s.extraEnviron, "OTEL_EXPORTER_OTLP_ENDPOINT="+receiver.URL())
	return s, receiver
}

// otelTraceID returns the id of an execution's trace in tracing tools.
func (s *testEnv) otelTraceID(execution string) string {
	s.t.Helper()
	return trace.ID(pgtest.Value[string](s.t, s.db, `select trace_id from agent_executions where id = $1`,
		execution)).OTel()
}

// waitSpans waits until the receiver has all spans of a trace, as many as SQL counts, and returns them.
func (s *testEnv) waitSpans(from *otlptest.Server, execution string) []otlptest.Span {
	s.t.Helper()
	eventually(s.t, "all executions of the trace end", func() bool {
		return pgtest.Value[bool](s.t, s.db, `
			select count(*) filter (where completed_at is null) = 0 from agent_executions
			 where trace_id = (select trace_id from agent_executions where id = $1)`, execution)
	})
	want := pgtest.Value[int](s.t, s.db, `
		select (select count(*) from agent_activity where trace_id = x.trace_id and status <> 'running')
		     + (select count(*) from agent_executions where trace_id = x.trace_id and completed_at is not null)
		  from agent_executions x where x.id = $1`, execution)
	id := s.otelTraceID(execution)
	rows := func() int {
		return len(slices.DeleteFunc(from.Trace(id),
			func(one otlptest.Span) bool { return strings.HasPrefix(one.Name, "wait ") }))
	}
	eventually(s.t, fmt.Sprintf("%d spans of rows come", want), func() bool { return rows() >= want })
	assert.Equal(s.t, want, rows(), "spans of rows came, SQL has")
	return from.Trace(id)
}

// checkSpans compares each span with its row, and checks that the trace is well-formed.
func (s *testEnv) checkSpans(spans []otlptest.Span) {
	s.t.Helper()
	for _, wrong := range otlptest.Check(spans) {
		s.t.Error(wrong)
	}
	for _, one_ := range spans {
		if id, ok := one_.Attributes["agent.activity.id"].(string); ok {
			got := pgtest.Value[string](s.t, s.db, `
				select concat_ws(' ', trace_id, status, coalesce(token_usage ->> 'prompt_tokens', '-'), case kind
				  when 'model' then cost_usd::float8 end,
				       abs(extract(epoch from created_at) - $2::float8) < 0.001,
				         abs(extract(epoch from finished_at) - $3::float8) < 0.01)
				  from agent_activity where id = $1`, id, float64(one_.Start.UnixNano())/1e9, float64(one_.End.UnixNano())/1e9)
			tokens, cost := "-", ""
			if n, ok := one_.Attributes["gen_ai.usage.input_tokens"]; ok {
				tokens, cost = fmt.Sprint(n), fmt.Sprint(one_.Attributes["agent.llm.cost_usd"])+" "
			}
			want := fmt.Sprintf("%s %s %s %st t", one_.Attributes["agent.trace_ref"], one_.Attributes["agent.status"], tokens,
				cost)
			assert.Truef(s.t, got == want, "span %s says %q, its row %q", one_.Name, want, got)
		}
	}
}

func spanNames(spans []otlptest.Span) map[string]int {
	counts := map[string]int{}
	for _, one := range spans {
		counts[one.Name]++
	}
	return counts
}

// TestHeartbeatIsCompleteTrace runs a heartbeat with model calls, skills, a wait and a child. The receiver gets it as
// one trace, under the id in SQL.
func TestHeartbeatIsCompleteTrace(t *testing.T) {
	t.Parallel()
	s, receiver := newTracedTestEnv(t)
	held := s.blockSkill("look", 1)
	a := s.startServer("")
	id := s.requestHeartbeat()
	held.waitBlocked()
	pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`) // the heartbeat has to wait
	held.release()
	eventually(t, "the heartbeat waits for the admin", func() bool { return s.status(id) == "waiting" })
	pgtest.Exec(s.t, s.db, `select release_agent_lock('operate', 'admin')`)
	s.waitStatus(id, "completed")
	spans := s.waitSpans(receiver, id)
	s.checkSpans(spans)
	s.compareMetrics(a)
	got := spanNames(spans)
	for name, want := range map[string]int{
		"invoke_workflow heartbeat": 1, "invoke_workflow settlement": 1, "execute_tool look": 2, "execute_tool pay": 1,
		"execute_tool settle": 1,
		"wait lane":           1, "wait delay": 1, "phase advance_plan": 1, "chat " + modeltest.Model: 5,
	} {
		assert.Equal(t, want, got[name], name, got)
	}
	for _, one := range spans {
		assert.Equal(t, "lanekeeper", one.Resource["service.name"], one.Resource)
		assert.Truef(t, one.Name != "invoke_workflow settlement" || one.Parent == trace.SpanID(id),
			"the child is filed under %s, want the heartbeat", one.Parent)
		for key := range one.Attributes {
			assert.Truef(t, !strings.Contains(key, "messages") && !strings.Contains(key, "arguments"),
				"content was sent, and nobody had asked for it: %s", key)
		}
	}
}

// TestSpansOfKilledProcessAreSent: the process that takes over sends the spans. Each span is sent once.
func TestSpansOfKilledProcessAreSent(t *testing.T) {
	t.Parallel()
	s, receiver := newTracedTestEnv(t)
	held := s.blockSkill("pay", 1)
	a := s.startServer("")
	id := s.requestHeartbeat()
	held.waitBlocked()
	eventually(t, "what had ended before is sent",
		func() bool { return spanNames(receiver.Trace(s.otelTraceID(id)))["execute_tool look"] == 1 })
	// A batch without a recorded response is sent again, with the same ids.
	eventually(t, "the process has noted that it was", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select sent_upto > (select id from agent_activity where skill_name = 'look')
			from agent_span_export`)
	})
	a.Kill()
	held.release()
	s.expireLeases()
	pgtest.Exec(s.t, s.db, `update agent_span_export set sender_until = '-infinity'`) // instead of waiting
	b := s.startServer("")
	s.waitStatus(id, "completed")
	spans := s.waitSpans(receiver, id)
	s.checkSpans(spans)
	for _, one := range spans {
		assert.Truef(t, one.Name != "execute_tool pay" || one.Attributes["agent.status"] == "unknown" &&
			one.Attributes["error.type"] == "interrupted" && one.Failed, "the call that was interrupted is shown as %v",
			one.Attributes)
	}
	assert.Equal(t, 1, spanNames(spans)["execute_tool pay"], spanNames(spans))
	s.checkMetrics(b, map[string]float64{`agent_runs_total{status="completed",surface="heartbeat"}`: 2})
}

// TestTraceReceiverOutage: a receiver that is down delays no work, and gets everything later. A one-shot command sends
// before it exits.
func TestTraceReceiverOutage(t *testing.T) {
	t.Parallel()
	s, receiver := newTracedTestEnv(t)
	receiver.Fail(func(int) int { return 503 })
	require.Equal(t, 0, s.startAgent("", "heartbeat").Exit())
	id := s.heartbeat()
	if n := len(receiver.Trace("")); n != 0 || len(receiver.Requests()) == 0 {
		t.Fatalf("a receiver that is down accepted %d spans in %d requests", n, len(receiver.Requests()))
	}
	receiver.Fail(nil)
	// no process serves
	pgtest.Exec(s.t, s.db, `delete from agent_executions where flow = 'settlement' and status = 'pending'`)
	require.Equal(t, 0, s.startAgent("", "heartbeat").Exit())
	want := pgtest.Value[int](s.t, s.db, `
		select (select count(*) from agent_activity where trace_id <> 'op_0') + (select count(*) from agent_executions
		  where completed_at is not null)`)
	assert.Equal(t, want, len(receiver.Trace("")), "spans came until the process had ended, SQL has")
	s.checkSpans(receiver.Trace(s.otelTraceID(id)))
}

// checkMetrics compares counters of a process with the wanted values.
func (s *testEnv) checkMetrics(a *agent, want map[string]float64) {
	s.t.Helper()
	got := s.metrics(a)
	for series, n := range want {
		assert.Equal(s.t, n, got[series], series)
	}
}

// metrics scrapes a process. A series is written as name{labels in order}.
func (s *testEnv) metrics(a *agent) map[string]float64 {
	s.t.Helper()
	answer, err := http.Get("http://" + a.address() + "/metrics")
	require.NoError(s.t, err)
	defer answer.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(answer.Body)
	require.Truef(s.t, err == nil && answer.StatusCode == http.StatusOK, "%s: %v", answer.Status, err)
	got := map[string]float64{}
	for name, family := range families {
		for _, m := range family.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			slices.Sort(labels)
			series := name
			if len(labels) > 0 {
				series += "{" + strings.Join(labels, ",") + "}"
			}
			got[series] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return got
}

// compareMetrics compares all counters of runs, model calls and skills with SQL, in both directions. No other process
// has run.
func (s *testEnv) compareMetrics(a *agent) {
	s.t.Helper()
	want := map[string]float64{}
	rows, err := s.db.Query(s.ctx(), `
		select format('agent_runs_total{status=%s,surface=%s}', to_json(status), to_json(surface)), count(*)::float8
		  from agent_executions where completed_at is not null group by status, surface
		union all
		select format('agent_skill_invocations_total{skill=%s,status=%s}', to_json(skill_name), to_json(status)), count(*)
		  from agent_activity where kind = 'call' group by skill_name, status
		union all
		select format('agent_llm_requests_total{model=%s,status=%s}', to_json(model), to_json(status)), count(*)
		  from agent_activity where kind = 'model' group by model, status
		union all
		select format('agent_llm_tokens_total{model=%s,type="input"}', to_json(model)),
		  sum((token_usage ->> 'prompt_tokens')::int)
		  from agent_activity where kind = 'model' group by model
		union all
		select format('agent_llm_tokens_total{model=%s,type="output"}', to_json(model)),
		  sum((token_usage ->> 'completion_tokens')::int)
		  from agent_activity where kind = 'model' group by model`)
	require.NoError(s.t, err)
	var series string
	var n float64
	_, err = pgx.ForEachRow(rows, []any{&series, &n}, func() error { want[series] = n; return nil })
	require.NoError(s.t, err)
	got := map[string]float64{}
	for series, n := range s.metrics(a) {
		for _, name := range []string{
			"agent_runs_total", "agent_skill_invocations_total", "agent_llm_requests_total",
			"agent_llm_tokens_total",
		} {
			if strings.HasPrefix(series, name+"{") {
				got[series] = n
			}
		}
	}
	diff := cmp.Diff(want, got)
	assert.Truef(s.t, diff == "", "the metrics tell another story than SQL (-SQL +metrics):\n%s", diff)
	for _, m := range []string{"action completed", "execution completed"} {
		logged := strings.Count(a.Err.String(), `msg="`+m+`"`)
		inSQL := pgtest.Value[int](s.t, s.db, `select count(*) from agent_executions where completed_at is not null`)
		if m == "action completed" {
			inSQL = pgtest.Value[int](s.t, s.db, `select count(*) from agent_activity where kind <> 'note'`)
		}
		assert.Truef(s.t, logged == inSQL, "the log says %q %d times, SQL has %d", m, logged, inSQL)
	}
}
