package reason_test

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// blank is an empty answer.
func blank() modeltest.Reply {
	return modeltest.Raw(http.StatusOK, "application/json",
		`{"choices":[{"index":0,"message":{"role":"assistant","content":" \n"},"finish_reason":"stop"}]}`)
}

// stalled checks that a turn ended as stalled, with its activity and its log line.
func (w *world) stalled(t *testing.T, x executions.Execution, got reason.Outcome, why string) {
	t.Helper()
	assert.Truef(t, x.Status == executions.Completed && got.Ended == reason.Stalled && strings.Contains(got.Text, why) &&
		x.ResultSummary == got.Text, "execution is %s, outcome %+v", x.Status, got)
	rows := named(w.rows(t, x), "reasoning")
	assert.Truef(t, len(rows) == 1 && rows[0].Status == "error" && rows[0].Class == "stall" &&
		strings.Contains(rows[0].Message, got.Text), "rows are %+v", rows)
	assert.Equal(t, 1, len(w.log.Records(t, "reasoning stalled")))
}

func TestEmptyAnswerIsAskedForOnceMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), blank(), modeltest.Text("All is well."))
	_, got := w.completed(t)
	assert.Equal(t, "All is well.", got.Text, got)
	assert.Equal(t, reason.Answered, got.Ended, got)
	if got := w.since(t, 2); got[len(got)-1].Role != "system" || !strings.Contains(got[len(got)-1].Content, "empty") {
		t.Errorf("the model got %+v", got)
	}
}

func TestTwoEmptyAnswersEndTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), blank(), blank())
	x, got := w.completed(t)
	w.stalled(t, x, got, "the model gave no text; calls made: probe.")
}

func TestCallMakesEmptyAnswerGood(t *testing.T) {
	t.Parallel()
	w := newWorld(t, blank(), modeltest.ToolCall("probe", `{}`), blank(), modeltest.Text("ok"))
	_, got := w.completed(t)
	assert.Truef(t, got.Text == "ok", "outcome is %+v", got)
}

func TestRefusalInWordsIsAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Raw(http.StatusOK, "application/json",
		`{"choices":[{"index":0,"message":{"role":"assistant","content":null,"refusal":"I will not."},"finish_reason":"stop"}]}`))
	_, got := w.completed(t)
	assert.Truef(t, got.Text == "I will not." && got.Ended == reason.Answered, "outcome is %+v", got)
}

func TestSameCallOverAndOverEndsTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var calls atomic.Int32
	w.builtins["sizes"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return "the same", nil
	}
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.ToolCall("sizes", `{"limit":`+strings.Repeat(" ", n)+`1.0}`) // same arguments, other spacing
	})
	x, got := w.completed(t)
	w.stalled(t, x, got, "made the same call again and again; calls made: sizes, sizes")
	assert.Truef(t, calls.Load() == 5 && len(w.model.Requests()) == 5,
		"%d calls in %d iterations", calls.Load(), len(w.model.Requests()))
	for n := 1; n < 5; n++ {
		last := w.since(t, n)
		warned := strings.Contains(last[len(last)-1].Content, "with the same arguments 3 times in a row")
		assert.Equal(t, n == 3, warned, n, last)
	}
}

func TestSameCallOverAndOverInOneReplyIsNotMadeForever(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var calls atomic.Int32
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return "alive", nil
	}
	reply := modeltest.ToolCall("probe", `{}`)
	for range 30 {
		reply = reply.AndCall("probe", `{}`)
	}
	w.plan(reply)
	x, got := w.completed(t)
	w.stalled(t, x, got, "again and again")
	assert.Equal(t, 5, calls.Load())
}

func TestLongAnswerBesideCallDoesNotFillContext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.loop.Budget = reason.Budget{Context: 2000}
	w.plan(modeltest.Text(strings.Repeat("blah ", 2500)).AndCall("probe", `{}`), modeltest.Text("ok"))
	_, got := w.completed(t)
	require.Equal(t, "ok", got.Text, "the turn ended", got.Ended)
	r := w.model.Requests()[1]
	n := promptTokens(t, r)
	assert.Truef(t, n <= 2000, "%d tokens", n)
	whole(t, 1, r.Messages)
}
