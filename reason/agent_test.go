package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// declare applies agents, the first as the default.
func (w *world) declare(t *testing.T, list ...agents.Definition) {
	t.Helper()
	w.loop.Agents = &agents.Directory{Settings: agents.Settings{Name: "house", Timezone: "Europe/Madrid"}}
	for i, d := range list {
		d.Default = i == 0
		_, err := agents.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
	}
}

var clock = regexp.MustCompile(`Now: .*`)

// lastContent returns the last message of a request, without the time.
func lastContent(r modeltest.Request) string {
	var b strings.Builder
	for _, tool := range r.Tools {
		b.WriteString("tool " + tool.Function.Name + "\n")
	}
	for _, m := range r.Messages {
		b.WriteString("--- " + m.Role + "\n" + clock.ReplaceAllString(m.Content, "Now: …") + "\n")
	}
	return b.String()
}

func TestAPromptIsComposedInAStableOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Done."), modeltest.Text("Done again."))
	w.declare(t, agents.Definition{
		Name: "sales", Instructions: "You are Nora of {{Tienda}} Sol.\n", Languages: []string{"es", "pt-BR"},
		Pinned: []string{"policy/returns", "policy/absent"},
	})
	_, err := memory.Save(t.Context(), w.pool, memory.Note{Category: "policy", Key: "returns", Value: "14 days"})
	require.NoError(t, err)
	w.turn.Context = "Healing report: nothing. [End of context]"
	w.completed(t)
	w.turn.Context, w.turn.Prompt = "", "Look again."
	w.completed(t)
	requests := w.model.Requests()
	const golden = "testdata/prompt.golden"
	got := lastContent(requests[0]) + "=== the next turn\n" + lastContent(requests[1])
	if os.Getenv("UPDATE_GOLDEN") != "" {
		require.NoError(t, os.WriteFile(golden, []byte(got), 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.NoDiff(t, string(want), got)
	assert.Equal(t, requests[1].Messages[0].Content, requests[0].Messages[0].Content)
	if last := requests[0].Messages[1].Content; !regexp.MustCompile(
		`Now: \w+ \d{4}-\d\d-\d\d \d\d:\d\d \+0[12]:00 \(Europe/Madrid\)`).MatchString(last) {
		t.Errorf("the time is not that of Madrid: %s", last)
	}
}

func TestAnAgentNarrowsSkillsAndLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("Never asked."))
	w.declare(t, agents.Definition{Name: "sales", Skills: []string{"pro*"}, Limits: agents.Limits{Iterations: 2}})
	_, got := w.completed(t)
	names := toolNames(w.model.Requests()[0])
	assert.Truef(t, slices.Equal(names, []string{"probe"}), "the model was offered %v", names)
	assert.Equal(t, 2, got.Iterations)
	assert.Equal(t, "iterations", got.Ended)
}

func TestATurnFallsBackToTheNextModelAndStaysThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Status(http.StatusServiceUnavailable, 0),
		modeltest.Status(http.StatusServiceUnavailable, 0),
		modeltest.Status(http.StatusServiceUnavailable, 0), modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.declare(t, agents.Definition{Name: "sales", Model: "first", Fallback: []string{"second"}, Effort: "low"})
	x, got := w.completed(t)
	var asked []string
	for _, r := range w.model.Requests() {
		asked = append(asked, r.Model)
	}
	want := []string{"first", "first", "first", "second", "second"}
	assert.Truef(t, slices.Equal(asked, want) && got.Text == "Done.", "asked %v, answered %q", asked, got.Text)
	assert.Equal(t, "low", w.model.Requests()[3].ReasoningEffort)
	calls := named(w.rows(t, x), "model_call")
	assert.Truef(t, len(calls) == 3 && calls[0].Status == "error" && calls[0].Class == "model_unavailable",
		"the rows are %+v", calls)
}

func TestASilentModelLeavesTimeForTheNext(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Hang(), modeltest.Text("Done."))
	w.loop.Budget = reason.Budget{Time: 6 * time.Second}
	w.declare(t, agents.Definition{Name: "sales", Model: "first", Fallback: []string{"second"}})
	x, got := w.completed(t)
	assert.Truef(t, got.Text == "Done." && len(w.model.Requests()) == 2, "after %d requests the answer is %q",
		len(w.model.Requests()), got.Text)
	message := named(w.rows(t, x), "model_call")[0].Message
	assert.Truef(t, regexp.MustCompile(`silent for [1-3]s`).MatchString(message), "the row says %q", message)
}

func TestARefusalOfTheRequestIsNoReasonToFallBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Status(http.StatusUnauthorized, 0))
	w.declare(t, agents.Definition{Name: "sales", Model: "first", Fallback: []string{"second"}})
	if x, _ := w.run(t); x.Status != executions.Failed || len(w.model.Requests()) != 1 {
		t.Errorf("the execution is %s after %d requests", x.Status, len(w.model.Requests()))
	}
}

func TestTheDayOfAnAgentEndsItsTurnsAndNoOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Done.").WithUsage(400, 4100, 0), modeltest.Text("Other."))
	w.declare(t, agents.Definition{Name: "sales", Limits: agents.Limits{DayUSD: 0.0025}},
		agents.Definition{Name: "billing"})
	w.completed(t)
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == "surface" && !got.Until.IsZero() && strings.Contains(got.Text, "the agent sales"),
		"the second turn ended by %s: %s", got.Ended, got.Text)
	w.turn.Agent = "billing"
	_, got = w.completed(t)
	assert.Equal(t, "Other.", got.Text, "the other agent said")
}

func TestATurnFinishesOnTheVersionItBeganWith(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.declare(t, agents.Definition{Name: "sales", Instructions: "One."})
	w.builtins["probe"] = func(ctx context.Context, _ skills.Call) (any, error) {
		_, err := agents.Put(ctx, w.pool, agents.Definition{Name: "sales", Default: true, Instructions: "Two."})
		return "changed", err
	}
	runs := 0
	w.instead = func(ctx context.Context) (executions.Result, error) {
		runs++ // repeated after the wait
		got, err := w.loop.Run(ctx, w.turn)
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: got.Text, Value: got}, nil
	}
	w.engine(t, true)
	enginetest.Await(t, w.pool, begin(t, w, w.engine(t, false)), executions.Completed)
	for i, r := range w.model.Requests() {
		assert.Truef(t, strings.Contains(r.Messages[0].Content, "One."), "request %d got %s", i, r.Messages[0].Content)
	}
	assert.Truef(t, runs >= 2 && len(w.model.Requests()) == 2, "%d runs made %d requests", runs, len(w.model.Requests()))
}

func TestADelegatedTaskActsAsTheAgentItIsGivenTo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("delegate", `{"task":"Refund order 7.","agent":"billing"}`),
		modeltest.Text("Refunded."), modeltest.Text("It is done."))
	w.declare(t, agents.Definition{Name: "sales", Instructions: "You sell.", Delegates: []string{"billing"}},
		agents.Definition{Name: "billing", Description: "Refunds.", Instructions: "You bill.", Skills: []string{"probe"}})
	w.delegates(t)
	e := w.engine(t, true)
	parent := enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed)
	child := w.child(t, parent.ID)
	assert.Equal(t, "billing", child.Agent)
	assert.Equal(t, parent.TraceID, child.TraceID)
	asked := w.model.Requests()[1]
	if text := asked.Messages[0].Content; !strings.Contains(text, "You bill.") || strings.Contains(text, "You sell.") {
		t.Errorf("the child got %s", text)
	}
	names := toolNames(asked)
	assert.Truef(t, slices.Equal(names, []string{"delegate", "probe"}), "the child was offered %v", names)
	assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_activity where agent = 'billing'
		and skill_name = 'model_call'`))
	var schema struct {
		Properties struct {
			Agent struct {
				Enum        []string
				Description string
			}
		}
	}
	for _, tool := range w.model.Requests()[0].Tools {
		if tool.Function.Name == "delegate" {
			text, err := json.Marshal(tool.Function.Parameters)
			require.True(t, err == nil && json.Unmarshal(text, &schema) == nil, err)
		}
	}
	got := schema.Properties.Agent
	assert.Truef(t, slices.Equal(got.Enum, []string{"billing"}) && strings.Contains(got.Description, "billing: Refunds."),
		"the tool says %+v", got)
}

func TestNobodyDelegatesToAnAgentThatIsNotNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("delegate", `{"task":"Refund order 7.","agent":"billing"}`),
		modeltest.Text("I cannot."))
	w.declare(t, agents.Definition{Name: "sales"}, agents.Definition{Name: "billing"})
	w.delegates(t)
	e := w.engine(t, true)
	enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed)
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_executions where flow = 'delegate'`))
}

func TestAFilteredAnswerSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("").WithFinish("content_filter"))
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == "answered" && got.Cut == "content_filter" &&
		strings.Contains(got.Text, "content filter") && len(w.model.Requests()) == 1, "after %d requests: %+v",
		len(w.model.Requests()), got)
}

func TestPinnedMemoryIsThatOfTheAgent(t *testing.T) {
	t.Parallel()
	for memoryOf, want := range map[string]string{
		agents.MemoryShared: `policy/returns: "of all"`, agents.MemoryOwn: `policy/returns: "of sales"`,
	} {
		t.Run(memoryOf+" memory", func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, modeltest.Text("Done."))
			w.declare(t, agents.Definition{Name: "sales", Memory: memoryOf, Pinned: []string{"policy/returns"}})
			for owner, value := range map[memory.Owner]string{
				memory.Shared: "of all", "sales": "of sales",
				"billing": "of billing",
			} {
				note := memory.Note{Owner: owner, Category: "policy", Key: "returns", Value: value}
				_, err := memory.Save(t.Context(), w.pool, note)
				require.NoError(t, err)
			}
			w.completed(t)
			shown := w.model.Requests()[0].Messages[0].Content
			assert.Truef(t, strings.Contains(shown, want) && strings.Count(shown, "policy/returns") == 1,
				"pinned is not %s: %s", want, shown)
		})
	}
}

// remembering returns a world with the builtins, and an entry k of two revisions.
func remembering(t *testing.T, replies ...modeltest.Reply) *world {
	t.Helper()
	w := newWorld(t)
	maps.Copy(w.builtins, builtins.New(w.pool, nil, nil))
	_, err := builtins.Put(t.Context(), w.pool)
	require.NoError(t, err)
	for _, value := range []string{"first", "second"} {
		w.keep(t, value)
	}
	w.plan(replies...)
	return w
}

// keep writes k like another writer.
func (w *world) keep(t *testing.T, value any) {
	t.Helper()
	_, err := memory.Save(t.Context(), w.pool, memory.Note{Key: "k", Value: value, TraceID: "op_1"})
	require.NoError(t, err)
}

// kept returns the value of k with its revision.
func (w *world) kept(t *testing.T) string {
	t.Helper()
	e, err := memory.Shared.Get(t.Context(), w.pool, "general", "k")
	require.NoError(t, err)
	return fmt.Sprintf("%s at %d", e.Value, e.Revision)
}

var (
	readK  = modeltest.ToolCall("recall", `{"query":"k"}`)
	writeK = modeltest.ToolCall("memory_write", `{"key":"k","value":"mine"}`)
	bye    = modeltest.Text("Done.")
)

// during calls happen while the model works on answer n.
func (w *world) during(n int, happen func(), replies ...modeltest.Reply) {
	done := false
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := answersIn(req)
		if answers == n && !done {
			done = true
			happen()
		}
		return replies[min(answers, len(replies)-1)]
	})
}

func TestATurnReplacesWhatItHasRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"read":             {readK, writeK, bye},
		"named wrongly":    {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":7}`), bye},
		"after a conflict": {writeK, writeK, bye},
		"own work": {readK, modeltest.ToolCall("memory_write", `{"key":"k","value":"draft"}`).AndCall("memory_write",
			`{"key":"k","value":"mine"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			w.completed(t)
			got := w.kept(t)
			assert.Truef(t, strings.HasPrefix(got, `"mine" at `), "it holds %s", got)
		})
	}
}

func TestATurnWritesThroughASkillThatDoesNotKnowRevisions(t *testing.T) {
	t.Parallel()
	w := remembering(t, readK, writeK, bye)
	w.put(t, skills.Definition{Name: "memory_write", Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"key": map[string]any{}, "value": map[string]any{}},
	}})
	w.completed(t)
	assert.Equal(t, `"mine" at 3`, w.kept(t))
}

func TestATurnDoesNotReplaceWhatItHasNotRead(t *testing.T) {
	t.Parallel()
	for name, replies := range map[string][]modeltest.Reply{
		"never read":        {writeK, bye},
		"guessed":           {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":2}`), bye},
		"whatever is there": {modeltest.ToolCall("memory_write", `{"key":"k","value":"mine","revision":-1}`), bye},
		"read in one breath": {modeltest.ToolCall("recall", `{"query":"k"}`).AndCall("memory_write",
			`{"key":"k","value":"mine"}`), bye},
		"forgotten": {modeltest.ToolCall("memory_forget", `{"key":"k"}`), bye},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, replies...)
			x, _ := w.completed(t)
			assert.Equal(t, `"second" at 2`, w.kept(t))
			rows := named(w.rows(t, x), "memory_write")
			rows = append(rows, named(w.rows(t, x), "memory_forget")...)
			assert.Truef(t, len(rows) == 1 && rows[0].Status == "skipped", "the row is %+v", rows)
		})
	}
}

func TestAConflictGivesTheModelBothValues(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	w.during(1, func() { w.keep(t, "theirs") }, readK, writeK, writeK, bye)
	w.completed(t)
	assert.Equal(t, `"mine" at 4`, w.kept(t))
	since := w.since(t, 2)
	last := since[len(since)-1].Content
	var both struct {
		Error, Yours string
		Theirs       memory.Entry
	}
	err := json.Unmarshal([]byte(last), &both)
	assert.Truef(t, err == nil && both.Error == "conflict" && both.Yours == "mine" &&
		string(both.Theirs.Value) == `"theirs"` && both.Theirs.Revision == 3, "the model gets %s", last)
}

func TestWhatATurnHasReadSurvivesItsProcess(t *testing.T) {
	t.Parallel()
	w := remembering(t)
	c := newCrash()
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		n := answersIn(req)
		if n == 1 && c.done.CompareAndSwap(false, true) { // the run has read, and stops before its write
			w.keep(t, "theirs")
			c.came <- pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
			return modeltest.Custom(func(http.ResponseWriter, *http.Request) {
				<-c.wake
				panic(http.ErrAbortHandler)
			})
		}
		return []modeltest.Reply{readK, writeK, bye}[min(n, 2)]
	})
	x := w.survive(t, c)
	require.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	assert.Equal(t, `"theirs" at 3`, w.kept(t))
}

func TestAnEntryThatWasCutIsReadWhenItWasReadOn(t *testing.T) {
	t.Parallel()
	on := modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16384}`)
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		want    string
	}{
		"cut":     {[]modeltest.Reply{readK, writeK, bye}, "3"},
		"read on": {[]modeltest.Reply{readK, on, writeK, bye}, "4"},
		"skipped": {[]modeltest.Reply{
			readK, modeltest.ToolCall("read_result", `{"result_id":"r1","offset":16500}`), writeK,
			bye,
		}, "3"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := remembering(t, test.replies...)
			w.keep(t, strings.Repeat("k and more ", 2000))
			w.completed(t)
			if got := w.kept(t); !strings.HasSuffix(got, " at "+test.want) {
				t.Errorf("the entry is at %s", got[len(got)-2:])
			}
		})
	}
}

// many adds 60 skills in scope; one of them sends invoices. It adds one skill out of scope, which sends invoices, too.
func (w *world) many(t *testing.T) *atomic.Int32 {
	t.Helper()
	for i := range 58 {
		w.put(t, skills.Definition{Name: fmt.Sprintf("aa_%02d", i)})
		w.builtins[fmt.Sprintf("aa_%02d", i)] = func(context.Context, skills.Call) (any, error) { return nil, nil }
	}
	sent := &atomic.Int32{}
	for name, scope := range map[string]string{
		"send_invoice":    skills.ScopeInternal,
		"visitorInvoices": skills.ScopeExternal,
	} {
		w.builtins[name] = func(context.Context, skills.Call) (any, error) {
			sent.Add(1)
			return "sent", nil
		}
		w.put(t, skills.Definition{Name: name, Scope: scope})
	}
	return sent
}

func TestOfVeryManySkillsTheOthersAreFoundBySearch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	sent := w.many(t)
	w.turn.Prompt = "Please probe it."
	w.plan(
		modeltest.ToolCall("send_invoice", `{}`),
		modeltest.ToolCall("skill_search", `{"query":"Invoices"}`),
		modeltest.ToolCall("send_invoice", `{}`).AndCall("visitorInvoices", `{}`), modeltest.Text("Sent."))
	x, got := w.completed(t)
	requests := w.model.Requests()
	offered := toolNames(requests[0])
	assert.Truef(t, len(offered) == 31 && slices.Contains(offered, "skill_search") && slices.Contains(offered, "probe") &&
		!slices.Contains(offered, "send_invoice"), "%d are offered: %q", len(offered), offered)
	assert.Contains(t, w.since(t, 1)[2].Content, "skill_search")
	text := w.since(t, 2)[1].Content
	assert.Truef(t, strings.Contains(text, "send_invoice") && !strings.Contains(text, "visitor"), "found %s", text)
	after := toolNames(requests[2])
	assert.Truef(t, len(after) == 32 && slices.Contains(after, "send_invoice"), "after the search %q are offered", after)
	assert.Truef(t, sent.Load() == 1 && slices.Equal(got.Calls, []string{"skill_search", "send_invoice"}),
		"%d invoices were sent, outcome %+v", sent.Load(), got)
	refused := named(w.rows(t, x), "visitorInvoices")
	assert.Truef(t, len(refused) == 1 && refused[0].Class == "unknown_tool", "rows are %+v", refused)
	rows := named(w.rows(t, x), "skill_search")
	assert.Truef(t, len(rows) == 1 && string(rows[0].Output) == `{"found": ["send_invoice"]}`, "rows are %+v", rows)
}

func TestFortySkillsAreAllOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	for i := range 38 { // and sizes and probe
		w.builtins[fmt.Sprintf("s%d", i)] = w.builtins["probe"]
		w.put(t, skills.Definition{Name: fmt.Sprintf("s%d", i)})
	}
	w.completed(t)
	offered := toolNames(w.model.Requests()[0])
	assert.Truef(t, len(offered) == 40 && !slices.Contains(offered, "skill_search"), "%d are offered", len(offered))
}

func TestASearchThatFindsNothingSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.many(t)
	w.plan(modeltest.ToolCall("skill_search", `{"query":"zzz"}`), modeltest.Text("ok"))
	w.completed(t)
	assert.Contains(t, w.since(t, 1)[1].Content, "Nothing was found")
}

func TestWhatWasFoundStaysCallableAfterACrash(t *testing.T) {
	t.Parallel()
	for at := 3; at <= 6; at++ { // the search, the next request, the call, the last request
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			sent := w.many(t)
			w.plan(modeltest.ToolCall("skill_search", `{"query":"invoice"}`), modeltest.ToolCall("send_invoice", `{}`),
				modeltest.Text("Sent."))
			c := newCrash()
			w.crashBefore(at, c)
			x := w.survive(t, c)
			if got := outcome(t, x); got.Text != "Sent." || !c.done.Load() {
				t.Errorf("execution is %s (%s), outcome %+v", x.Status, postgres.Deref(x.ErrorMessage), got)
			}
			n := len(w.transcripts(t))
			assert.Truef(t, n == 3 && sent.Load() == 1, "%d requests, %d invoices", n, sent.Load())
		})
	}
}

// tool returns its arguments.
func tool(name, schema string) reason.Tool {
	return reason.Tool{
		Name: name, Description: "does " + name, Parameters: json.RawMessage(schema),
		Do: func(_ context.Context, args json.RawMessage) (any, error) { return "got " + string(args), nil },
	}
}

// heard returns the tool results in the model's last request.
func heard(w *world) (results []string) {
	requests := w.model.Requests()
	for _, m := range requests[len(requests)-1].Messages {
		if m.Role == openai.ChatMessageRoleTool {
			results = append(results, m.Content)
		}
	}
	return results
}

// Two turns may offer different tools of one name. Each call must match the schema of its turn.
func TestToolsOfOneNameHaveTheirOwnSchemas(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"a", "b"} {
		w.model.Add(modeltest.ToolCall("put", `{"`+name+`":1}`), modeltest.Text("Done."))
		w.turn.Tools = []reason.Tool{tool("put", `{"type":"object","additionalProperties":false,"required":["`+name+
			`"],"properties":{"`+name+`":{"type":"integer"}}}`)}
		if _, got := w.completed(t); len(got.Calls) != 1 || got.Calls[0] != "put" {
			t.Errorf("the tool that takes %s was called %v: %v", name, got.Calls, heard(w))
		}
	}
}

func TestAToolWithoutParametersTakesNone(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("ping", ``), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("ping", ``)}
	if _, got := w.completed(t); len(got.Calls) != 1 {
		t.Errorf("called %v: %v", got.Calls, heard(w))
	}
	assert.Contains(t, w.model.Requests()[0].Body, `"name":"ping","description":"does ping","parameters":{`)
}

// Servers reject two tools of one name. If a skill and a tool share a name, the turn offers the tool only.
func TestASkillWithTheNameOfAToolIsNotOffered(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("probe", `{"type":"object"}`)}
	w.completed(t)
	offered, got := toolNames(w.model.Requests()[0]), heard(w)
	assert.Truef(t, slices.Equal(offered, []string{"probe", "sizes"}) && slices.Equal(got, []string{`"got {}"`}),
		"offered %q, answered %q", offered, got)
}

// A caller's bug is reported at once. The model is not blamed for it.
func TestATurnThatCannotBeTakenIsRefused(t *testing.T) {
	right := tool("t", `{"type":"object"}`)
	for want, spoil := range map[string]func(w *world){
		"needs Pool, Model and Skills": func(w *world) { w.loop.Model = nil },
		"is not a tool's":              func(w *world) { w.turn.Tools = []reason.Tool{tool("a b", `{}`)} },
		"two tools are named t":        func(w *world) { w.turn.Tools = []reason.Tool{right, right} },
		"the tool t has no Do":         func(w *world) { w.turn.Tools = []reason.Tool{{Name: "t"}} },
		"compile the parameters of t":  func(w *world) { w.turn.Tools = []reason.Tool{tool("t", `{"type":"objekt"}`)} },
		"parameters of t are no JSON":  func(w *world) { w.turn.Tools = []reason.Tool{tool("t", `{"type":`)} },
		"CostUSD":                      func(w *world) { w.loop.Budget.CostUSD = math.NaN() },
	} {
		w := newWorld(t)
		spoil(w)
		x, err := w.engine(t, false).RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: "flow"})
		assert.Truef(t, err == nil && x.Status == executions.Failed && strings.Contains(postgres.Deref(x.ErrorMessage), want),
			"%s: %s, %q, %v", want, x.Status, postgres.Deref(x.ErrorMessage), err)
	}
}

func TestALoopNeedsNoLogger(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("nothing", `{}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.loop.Logger = nil
	w.turn.OnTool = func(reason.ToolEvent) { panic("in a callback") }
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return "alive", nil }
	w.completed(t)
}
