package reason_test

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
)

// declare puts agents into the world, the first as the default.
func (w *world) declare(t *testing.T, list ...agents.Definition) {
	t.Helper()
	w.loop.Agents = &agents.Directory{Settings: agents.Settings{Name: "house", Timezone: "Europe/Madrid"}}
	for i, d := range list {
		d.Default = i == 0
		if _, err := agents.Put(t.Context(), w.pool, d, "workspace"); err != nil {
			t.Fatal(err)
		}
	}
}

var clock = regexp.MustCompile(`Now: .*`)

// said is what a request asked, the time left out.
func said(r modeltest.Request) string {
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
	if _, err := memory.Save(t.Context(), w.pool, memory.Note{Category: "policy", Key: "returns", Value: "14 days"}); err != nil {
		t.Fatal(err)
	}
	w.turn.Context = "Healing report: nothing. [End of context]"
	w.completed(t)
	w.turn.Context, w.turn.Prompt = "", "Look again."
	w.completed(t)
	requests := w.model.Requests()
	const golden = "testdata/prompt.golden"
	got := said(requests[0]) + "=== the next turn\n" + said(requests[1])
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("the prompt has changed (UPDATE_GOLDEN=1 accepts it): %s", diff)
	}
	if requests[0].Messages[0].Content != requests[1].Messages[0].Content {
		t.Error("two turns do not share their system message")
	}
	if last := requests[0].Messages[1].Content; !regexp.MustCompile(`Now: \w+ \d{4}-\d\d-\d\d \d\d:\d\d \+0[12]:00 \(Europe/Madrid\)`).MatchString(last) {
		t.Errorf("the time is not that of Madrid: %s", last)
	}
}

func TestAnAgentNarrowsSkillsAndLimits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("Never asked."))
	w.declare(t, agents.Definition{Name: "sales", Skills: []string{"pro*"}, Limits: agents.Limits{Iterations: 2}})
	_, got := w.completed(t)
	if names := toolNames(w.model.Requests()[0]); !slices.Equal(names, []string{"probe"}) {
		t.Errorf("it was offered %v", names)
	}
	if got.Iterations != 2 || got.Ended != "iterations" {
		t.Errorf("it ended by %s after %d model calls", got.Ended, got.Iterations)
	}
}

func TestATurnFallsBackToTheNextModelAndStaysThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Status(http.StatusServiceUnavailable, 0), modeltest.Status(http.StatusServiceUnavailable, 0),
		modeltest.Status(http.StatusServiceUnavailable, 0), modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.declare(t, agents.Definition{Name: "sales", Model: "first", Fallback: []string{"second"}, Effort: "low"})
	x, got := w.completed(t)
	var asked []string
	for _, r := range w.model.Requests() {
		asked = append(asked, r.Model)
	}
	if want := []string{"first", "first", "first", "second", "second"}; !slices.Equal(asked, want) || got.Text != "Done." {
		t.Errorf("asked %v, answered %q", asked, got.Text)
	}
	if effort := w.model.Requests()[3].ReasoningEffort; effort != "low" {
		t.Errorf("the effort is %q", effort)
	}
	calls := named(w.rows(t, x), "model_call")
	if len(calls) != 3 || calls[0].Status != "error" || calls[0].Class != "model_unavailable" {
		t.Errorf("the rows are %+v", calls)
	}
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
	w.declare(t, agents.Definition{Name: "sales", Limits: agents.Limits{DayUSD: 0.0025}}, agents.Definition{Name: "billing"})
	w.completed(t)
	if _, got := w.completed(t); got.Ended != "surface" || got.Until.IsZero() || !strings.Contains(got.Text, "the agent sales") {
		t.Errorf("the second turn ended by %s: %s", got.Ended, got.Text)
	}
	w.turn.Agent = "billing"
	if _, got := w.completed(t); got.Text != "Other." {
		t.Errorf("the other agent said %q", got.Text)
	}
}

func TestATurnFinishesOnTheVersionItBeganWith(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.declare(t, agents.Definition{Name: "sales", Instructions: "One."})
	w.builtins["probe"] = func(ctx context.Context, _ skills.Call) (any, error) {
		_, err := agents.Put(ctx, w.pool, agents.Definition{Name: "sales", Default: true, Instructions: "Two."}, "workspace")
		return "changed", err
	}
	runs := 0
	w.instead = func(ctx context.Context) (executions.Result, error) {
		runs++ // once more after the wait
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
	until(t, w, begin(t, w, w.engine(t, false)), executions.Completed)
	for i, r := range w.model.Requests() {
		if !strings.Contains(r.Messages[0].Content, "One.") {
			t.Errorf("request %d was told %s", i, r.Messages[0].Content)
		}
	}
	if runs < 2 || len(w.model.Requests()) != 2 {
		t.Errorf("%d runs made %d requests", runs, len(w.model.Requests()))
	}
}

func TestADelegatedTaskActsAsTheAgentItIsGivenTo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("delegate", `{"task":"Refund order 7.","agent":"billing"}`),
		modeltest.Text("Refunded."), modeltest.Text("It is done."))
	w.declare(t, agents.Definition{Name: "sales", Instructions: "You sell.", Delegates: []string{"billing"}},
		agents.Definition{Name: "billing", Description: "Refunds.", Instructions: "You bill.", Skills: []string{"probe"}})
	w.delegates(t)
	e := w.engine(t, true)
	parent := until(t, w, begin(t, w, e), executions.Completed)
	child := w.child(t, parent.ID)
	if child.Agent != "billing" || child.TraceID != parent.TraceID {
		t.Errorf("the child acts as %s", child.Agent)
	}
	asked := w.model.Requests()[1]
	if text := asked.Messages[0].Content; !strings.Contains(text, "You bill.") || strings.Contains(text, "You sell.") {
		t.Errorf("the child was told %s", text)
	}
	if names := toolNames(asked); !slices.Equal(names, []string{"delegate", "probe"}) {
		t.Errorf("the child was offered %v", names)
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_activity where agent = 'billing' and skill_name = 'model_call'`); n != 1 {
		t.Errorf("%d model calls are billing's", n)
	}
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
			if err != nil || json.Unmarshal(text, &schema) != nil {
				t.Fatal(err)
			}
		}
	}
	if got := schema.Properties.Agent; !slices.Equal(got.Enum, []string{"billing"}) || !strings.Contains(got.Description, "billing: Refunds.") {
		t.Errorf("the tool says %+v", got)
	}
}

func TestNobodyDelegatesToAnAgentThatIsNotNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("delegate", `{"task":"Refund order 7.","agent":"billing"}`), modeltest.Text("I cannot."))
	w.declare(t, agents.Definition{Name: "sales"}, agents.Definition{Name: "billing"})
	w.delegates(t)
	e := w.engine(t, true)
	until(t, w, begin(t, w, e), executions.Completed)
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_executions where flow = 'delegate'`); n != 0 {
		t.Errorf("%d tasks were delegated", n)
	}
}

func TestAFilteredAnswerSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("").WithFinish("content_filter"))
	_, got := w.completed(t)
	if got.Ended != "answered" || got.Cut != "content_filter" || !strings.Contains(got.Text, "content filter") || len(w.model.Requests()) != 1 {
		t.Errorf("after %d requests: %+v", len(w.model.Requests()), got)
	}
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
			for owner, value := range map[memory.Owner]string{memory.Shared: "of all", "sales": "of sales", "billing": "of billing"} {
				note := memory.Note{Owner: owner, Category: "policy", Key: "returns", Value: value}
				if _, err := memory.Save(t.Context(), w.pool, note); err != nil {
					t.Fatal(err)
				}
			}
			w.completed(t)
			shown := w.model.Requests()[0].Messages[0].Content
			if !strings.Contains(shown, want) || strings.Count(shown, "policy/returns") != 1 {
				t.Errorf("pinned is not %s: %s", want, shown)
			}
		})
	}
}
