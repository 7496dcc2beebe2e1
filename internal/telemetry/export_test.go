package telemetry_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
	"github.com/lanekeeper/lanekeeper/internal/telemetry/otlptest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// exportTest is a database with rows in plain SQL, a receiver, and exporters between them.
type exportTest struct {
	t        *testing.T
	db       *pgxpool.Pool
	receiver *otlptest.Server
	metrics  *telemetry.Metrics // of its exporters
	log      *slog.Logger
}

func newExportTest(t *testing.T) *exportTest {
	t.Helper()
	return &exportTest{
		t, pgtest.DB(t), otlptest.New(t), telemetry.NewMetrics("test", nil), slog.New(slog.DiscardHandler),
	}
}

// export runs an exporter until the caller stops it, or the test ends.
func (s *exportTest) export(more ...string) (stop func()) {
	s.t.Helper()
	environ := map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": s.receiver.URL()}
	for _, pair := range more {
		name, value, _ := strings.Cut(pair, "=")
		environ[name] = value
	}
	settings, err := telemetry.Load(environ)
	require.NoError(s.t, err)
	e := telemetry.NewExporter(s.db, settings, "test", s.metrics, s.log)
	ctx, cancel := context.WithCancel(s.t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = e.Run(ctx) }()
	stop = func() { cancel(); <-done }
	s.t.Cleanup(stop)
	return stop
}

// exported runs an exporter until it has sent all ended spans.
func (s *exportTest) exported(more ...string) []otlptest.Span {
	s.t.Helper()
	now := s.exportedSpan(`select lanekeeper.agent_uuid7(clock_timestamp())::text`)
	stop := s.export(more...)
	pgtest.Until(s.t, s.db, true, `select exists (select from agent_span_export where sent_upto >= $1)`, now)
	stop()
	return s.receiver.Trace("")
}

func (s *exportTest) exportedSpan(sql string, args ...any) string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, sql, args...)
}

func (s *exportTest) exec(sql string, args ...any) {
	s.t.Helper()
	pgtest.Exec(s.t, s.db, sql, args...)
}

// start and end start and complete an execution in plain SQL, like an external worker.
func (s *exportTest) start(id trace.ID, parent any) string {
	s.t.Helper()
	return s.exportedSpan(`insert into agent_executions (trace_id, surface, flow, status, parent_id, awaited)
		values ($1, 'flow', 'external', 'pending', $2, true)
		returning id::text`, string(id), parent)
}

func (s *exportTest) end(id string) {
	s.t.Helper()
	s.exec(`update agent_executions set status = 'running' where id = $1`, id)
	s.exec(`update agent_executions set status = 'completed' where id = $1`, id)
}

func (s *exportTest) note(id trace.ID, execution any, skill string) string {
	s.t.Helper()
	return s.exportedSpan(`insert into agent_activity (trace_id, execution_id, skill_name, status, finished_at, duration_ms)
		values ($1, $2, $3, 'success', clock_timestamp(), 0) returning id::text`, string(id), execution, skill)
}

// names returns the spans' names, sorted.
func names(spans []otlptest.Span) []string {
	var all []string
	for _, one := range spans {
		all = append(all, one.Name)
	}
	slices.Sort(all)
	return all
}

// TestTraceHasOneRoot: the first execution is the root of every trace. Notes from outside and further executions are
// its descendants.
func TestTraceHasOneRoot(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	id, alone := trace.New(trace.Flow), trace.New(trace.Operate)
	root := s.start(id, nil)
	s.note(id, nil, "from outside")
	child := s.start(id, root)
	s.note(id, child, "inside")
	s.end(child)
	s.note(alone, nil, "first")
	s.note(alone, nil, "second")
	got := names(s.exported())
	assert.Truef(t, cmp.Equal(got,
		[]string{
			"execute_tool first", "execute_tool from outside", "execute_tool inside", "execute_tool second",
			"invoke_workflow external",
		}), "before the root has ended there are %q", got)
	other := s.start(id, nil)
	s.end(other)
	s.end(root)
	s.exported()
	spans := s.receiver.Trace(id.OTel())
	for _, wrong := range otlptest.Check(slices.DeleteFunc(slices.Clone(spans),
		func(one otlptest.Span) bool { return one.Attributes["agent.execution.id"] == other })) {
		t.Error(wrong)
	}
	for _, one := range spans {
		assert.Equal(t, (one.ID == trace.SpanID(root)), (one.Parent == ""), one.Name, one.Parent, trace.SpanID(root))
	}
	for _, wrong := range otlptest.Check(s.receiver.Trace(alone.OTel())[:1]) {
		t.Error(wrong)
	}
	if second := s.receiver.Trace(alone.OTel())[1]; second.Parent != s.receiver.Trace(alone.OTel())[0].ID {
		t.Errorf("in a trace without executions the second note has the parent %q", second.Parent)
	}
}

// TestLateCommitIsSent: a row has an id from before the last pass, but its transaction was still running then.
func TestLateCommitIsSent(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	id := trace.New(trace.Operate)
	tx, err := s.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `insert into agent_activity (trace_id, skill_name, finished_at)
		values ($1, 'late', clock_timestamp())`, string(id))
	s.note(id, nil, "soon")
	s.export()
	passes := func() bool { // an exporter that does not wait for the transaction would have sent by now
		return s.exportedSpan(`select (clock_timestamp() - updated_at < interval '1 second' and sender <> '')::text
			from agent_span_export`) == "true"
	}
	pgtest.Eventually(t, passes, "the exporter looks")
	pgtest.Eventually(t, func() bool {
		return s.exportedSpan(`select (clock_timestamp() > $1::timestamptz + interval '2 seconds')::text`,
			s.exportedSpan(`select max(created_at)::text from agent_activity`)) == "true"
	}, "two passes go by")
	if got := s.receiver.Trace(""); len(got) != 0 {
		t.Errorf("%q were sent while an older transaction was running", names(got))
	}
	require.NoError(t, tx.Commit(t.Context()))
	pgtest.Eventually(t, func() bool { return len(s.receiver.Trace("")) == 2 }, "both are sent")
}

// TestOpenActivitiesAreSentWhenTheyEnd, by the process with the right to send.
func TestOpenActivitiesAreSentWhenTheyEnd(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	id := trace.New(trace.Flow)
	open := s.exportedSpan(`insert into agent_activity (trace_id, skill_name, status) values ($1, 'slow', 'running')
		returning id::text`, string(id))
	s.note(id, nil, "quick")
	got := names(s.exported())
	require.Truef(t, cmp.Equal(got, []string{"execute_tool quick"}), "sent %q", got)
	assert.Equal(t, "{"+open+"}", s.exportedSpan(`select pending::text from agent_span_export`))
	s.exec(`update agent_activity set status = 'error', error_class = 'timeout', error_message = 'too slow',
		finished_at = clock_timestamp() where id = $1`, open)
	got = names(s.exported())
	require.Truef(t, cmp.Equal(got, []string{"execute_tool quick", "execute_tool slow"}), "sent %q", got)
	assert.Equal(t, "{}", s.exportedSpan(`select pending::text from agent_span_export`))
}

// TestSpanOfCallerIsLink: the caller's span is a link, and the trace keeps its own id.
func TestSpanOfCallerIsLink(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	id := trace.New(trace.Flow)
	run := s.start(id, nil)
	s.exec(`insert into agent_trace_links (trace_id, traceparent)
		values ($1, '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01'), ($1, 'rubbish')`, string(id))
	s.end(run)
	spans := s.exported()
	assert.Truef(t, len(spans) == 1 && spans[0].TraceID == id.OTel() &&
		cmp.Equal(spans[0].Links, []string{"4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"}), "sent %+v", spans)
}

// TestSampling keeps traces whole: the decision follows from the id.
func TestSampling(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	kept := 0
	for range 40 {
		id := trace.New(trace.Flow)
		s.note(id, nil, "first")
		s.note(id, nil, "second")
	}
	spans := s.exported("OTEL_TRACES_SAMPLER=parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG=0.5")
	count := map[string]int{}
	for _, one := range spans {
		count[one.TraceID]++
	}
	for id, n := range count {
		if kept++; n != 2 {
			t.Errorf("of trace %s %d spans were kept", id, n)
		}
	}
	assert.Truef(t, kept != 0 && kept != 40, "%d of 40 traces were kept at a ratio of a half", kept)
}

// TestSlowlyWrittenEndIsSent: the event gets its id when the exporter can see the transaction. Here the server writes
// the last step slowly during a pass of the exporter. The completion waits for no lock: lock waits are bounded, and the
// writer retries.
func TestSlowlyWrittenEndIsSent(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	run := s.exportedSpan(`
		with w as (insert into agent_workers (name, expires_at) values ('slow', clock_timestamp() + interval '1 hour')
		  returning id)
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim) select $1, 'flow', 'slow',
		  'running', w.id, 1 from w
		returning id::text`, string(trace.New(trace.Flow)))
	pgtest.Exec(t, s.db, `
		create function write_slowly() returns trigger language plpgsql as $$
		begin
		  while not pg_try_advisory_xact_lock(1, 2) loop
		    perform pg_sleep(0.01);
		  end loop;
		  return new;
		end $$;
		create trigger write_slowly before insert on agent_checkpoints for each row execute function write_slowly()`)
	tx, err := s.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `select pg_advisory_xact_lock(1, 2)`)
	ended := make(chan error, 1)
	go func() {
		_, err := s.db.Exec(context.WithoutCancel(t.Context()), `
			select from lanekeeper.complete_agent_executions(array[$1::uuid], '{1}',
			  '[{"status": "completed", "step": "step", "output": 1}]')`, run)
		ended <- err
	}()
	pgtest.Eventually(t, func() bool {
		return s.exportedSpan(`select exists (select from pg_stat_activity where datname = current_database()
			and wait_event = 'PgSleep')::text`) == "true"
	}, "the end is being written")
	stop := s.export()
	s.note(trace.New(trace.Flow), nil, "later")
	pgtest.Eventually(t, func() bool { return len(s.receiver.Trace("")) == 1 }, "the exporter has passed")
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-ended)
	stop()
	got := names(s.receiver.Trace(""))
	assert.Truef(t, cmp.Equal(got, []string{"execute_tool later", "invoke_workflow slow"}), "sent %q", got)
}

// TestOneExporterSends: one of two exporters has the right to send, and the other takes over.
func TestOneExporterSends(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	first := s.export()
	pgtest.Eventually(t, func() bool { return s.exportedSpan(`select sender from agent_span_export`) != "" },
		"the first has the right")
	holder := s.exportedSpan(`select sender from agent_span_export`)
	second := s.export()
	s.note(trace.New(trace.Flow), nil, "one")
	pgtest.Eventually(t, func() bool { return len(s.receiver.Trace("")) == 1 }, "it is sent")
	assert.Equal(t, holder, s.exportedSpan(`select sender from agent_span_export`))
	first()
	pgtest.Eventually(t, func() bool { return s.exportedSpan(`select sender from agent_span_export`) != "" },
		"the second has the right")
	s.note(trace.New(trace.Flow), nil, "two")
	second()
	got := names(s.receiver.Trace(""))
	assert.Truef(t, cmp.Equal(got, []string{"execute_tool one", "execute_tool two"}), "sent %q", got)
}

// TestSenderKeepsItsRightDuringARequest: another process would send the spans again, and both would lose it in turn.
func TestSenderKeepsItsRightDuringARequest(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	s.export("OTEL_EXPORTER_OTLP_TIMEOUT=600000")
	pgtest.Until(t, s.db, true,
		`select sender_until > clock_timestamp() + interval '10 minutes' from agent_span_export`)
}

// TestLastPassSendsEndedSpans, also within the millisecond of the exporter's stop.
func TestLastPassSendsEndedSpans(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	for n := range 25 {
		stop := s.export()
		pgtest.Eventually(t, func() bool { return s.exportedSpan(`select sender from agent_span_export`) != "" },
			"it has the right")
		s.note(trace.New(trace.Flow), nil, "one")
		stop()
		require.Equal(t, n+1, len(s.receiver.Trace("")))
	}
}

// TestRejectedBatchIsDropped: the receiver would reject it for ever, and it would block all later batches.
func TestRejectedBatchIsDropped(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	s.note(trace.New(trace.Flow), nil, "bad")
	s.receiver.Fail(func(n int) int { return map[bool]int{true: 400, false: 0}[n == 0] })
	s.exported()
	s.note(trace.New(trace.Flow), nil, "good")
	got := names(s.exported())
	assert.Truef(t, cmp.Equal(got, []string{"execute_tool good"}), "sent %q", got)
}

// TestExportFailures: the count is of the receiver's failures. A database that is away is none.
func TestExportFailures(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	var log testkit.Log
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	s.note(trace.New(trace.Flow), nil, "one")
	s.receiver.Fail(func(n int) int { return map[bool]int{true: 503, false: 0}[n == 0] })
	stop := s.export()
	pgtest.Eventually(t, func() bool { return strings.Contains(log.String(), "traces are sent again") }, "it sends again")
	stop()
	s.db.Close()
	stop = s.export()
	pgtest.Eventually(t, func() bool { return strings.Count(log.String(), "traces not sent") == 2 }, "it reads nothing")
	stop()
	assert.Contains(t, scrape(t, s.metrics), "\nagent_telemetry_export_failures_total 1\n")
}

// TestGoldenAttributes compares complete sets of attributes, by the conventions of the commit in genai.go.
func TestGoldenAttributes(t *testing.T) {
	t.Parallel()
	s := newExportTest(t)
	id := trace.New(trace.Heartbeat)
	run := s.exportedSpan(`insert into agent_executions (trace_id, surface, flow, thread_id, status, started_at)
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
	// With the opt-in, spans also have content, without secrets.
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
