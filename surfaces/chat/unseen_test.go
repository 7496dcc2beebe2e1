package chat_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// announcing starts a process with the flow "announce". The flow sends its input in the thread "t" and ends.
func announcing(t *testing.T, change ...func(*chat.Chat)) *process {
	t.Helper()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("I am the model.") })
	p := w.process(t, append(change, func(c *chat.Chat) {
		err := c.Engine.Register("announce", func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
			var words string
			if err := json.Unmarshal(raw, &words); err != nil {
				return executions.Result{}, err
			}
			_, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: words})
			return executions.Result{}, err
		})
		require.NoError(t, err)
	})...)
	_, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"})
	require.NoError(t, err)
	return p
}

// announce has a flow send messages in the thread, without a message of the visitor.
func (p *process) announce(t *testing.T, words ...string) {
	t.Helper()
	for _, w := range words {
		x, _, err := p.engine.Start(t.Context(), p.pool, executions.Spec{
			Flow: "announce", Surface: trace.Flow,
			ThreadID: "t", Input: w,
		})
		require.NoError(t, err)
		enginetest.Await(t, p.pool, x.ID, executions.Completed)
	}
}

func TestNextAnswerBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Your order is approved.", "It leaves today.")
	seen := p.model.Requests()
	const want = "Your order is approved.\n\nIt leaves today.\n\nI am the model."
	body, headers := `{"model":"nora","messages":[{"role":"user","content":"any news?"}]}`,
		append(inThread("t"), "Idempotency-Key", "k")
	for range 2 { // the second is replayed
		_, got := p.post(t, body, headers...)
		var answer openai.ChatCompletionResponse
		err := json.Unmarshal([]byte(got), &answer)
		assert.Truef(t, err == nil && answer.Choices[0].Message.Content == want, "answer: %s, %v", got, err)
	}
	all := p.model.Requests()
	require.Equal(t, len(seen)+1, len(all), len(all)-len(seen))
	var history []string
	for _, m := range all[len(all)-1].Messages[1:] {
		history = append(history, m.Content)
	}
	h := strings.Join(history, "|")
	assert.Equal(t, 1, strings.Count(h, "It leaves today."), "the model was shown", h)
	assert.Equal(t, "I am the model.", p.answerTo(t, "t", "and now?"))
	lines := []string{
		"hello", "I am the model.", "Your order is approved.", "It leaves today.", "any news?", "I am the model.",
		"and now?", "I am the model.",
	}
	assert.NoDiff(t, lines, p.all(t, "t"))
}

func TestStreamBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	g, reply := gated()
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return reply })
	request := says("any news?")
	request.MaxCompletionTokens = 3 // bounds the model's text
	stream, err := p.client(inThread("t")...).CreateChatCompletionStream(t.Context(), request)
	require.NoError(t, err)
	got := ""
	for got != "Approved." { // before the model's first word
		chunk, err := stream.Recv()
		require.NoError(t, err, "after", got)
		got += chunk.Choices[0].Delta.Content
	}
	send(t, g.pieces, "Yes, it is.")
	close(g.pieces)
	rest, err := streamed(t, stream)
	assert.Truef(t, err == nil && rest == "\n\nYes, it is.", "then: %q, %v", rest, err)
}

func TestTwoTurnsAtOnceShowFlowsWordsOnce(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	answers := make(chan string, 2)
	for _, words := range []string{"one", "two"} {
		go func() { answers <- p.answerTo(t, "t", words) }()
	}
	got := testkit.Receive(t, answers) + "|" + testkit.Receive(t, answers)
	assert.Equal(t, 1, strings.Count(got, "Approved."), "the answers", got)
}

func TestResponseBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/responses",
		strings.NewReader(`{"model":"nora","input":"any news?"}`))
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer site")
	_, body := do(t, r, inThread("t"))
	assert.Truef(t, strings.Contains(body, `Approved.\n\nI am the model.`), "response: %s", body)
}

func TestFlowsWordsWaitForAnswerInWords(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text(`{"ok":true}`) })
	body := `{"model":"nora","messages":[{"role":"user","content":"as JSON"}],"response_format":{"type":"json_object"}}`
	_, got := p.post(t, body, inThread("t")...)
	var answer openai.ChatCompletionResponse
	err := json.Unmarshal([]byte(got), &answer)
	assert.Truef(t, err == nil && answer.Choices[0].Message.Content == `{"ok":true}`, "answer in a form: %s, %v", got, err)
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	assert.Equal(t, "Approved.\n\nYes.", p.answerTo(t, "t", "in words"))
}

// A failed turn has no answer. The next answer has the flow's messages.
func TestFailedTurnLeavesFlowsWordsToNext(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Status(http.StatusBadRequest, 0)
	})
	r, body := p.post(t, `{"model":"nora","messages":[{"role":"user","content":"any news?"}]}`, inThread("t")...)
	require.Truef(t, r.StatusCode != http.StatusOK, "the turn did not fail: %s", body)
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	assert.Equal(t, "Approved.\n\nYes.", p.answerTo(t, "t", "any news?"))
}

func TestAnswerOfFlowBeginsWithWhatWasSaidSinceModels(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Send me your name.")
		say("Hello, " + hear() + ".")
	})
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("I am the model.") })
	_, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"})
	require.NoError(t, err)
	p.answerTo(t, "t", "hello")
	p.talks(t)
	assert.Equal(t, "Send me your name.\n\nHello, Ada.", p.answerTo(t, "t", "Ada"))
}
