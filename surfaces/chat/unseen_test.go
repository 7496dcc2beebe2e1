package chat_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// announcing is a process that knows the flow "announce": it says its input in the thread "t" and ends.
func announcing(t *testing.T, change ...func(*chat.Chat)) *process {
	t.Helper()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("I am the model.") })
	p := w.process(t, append(change, func(c *chat.Chat) {
		if err := c.Engine.Register("announce", func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
			var words string
			if err := json.Unmarshal(raw, &words); err != nil {
				return executions.Result{}, err
			}
			_, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: words})
			return executions.Result{}, err
		}); err != nil {
			t.Fatal(err)
		}
	})...)
	if _, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"}); err != nil {
		t.Fatal(err)
	}
	return p
}

// announce lets a flow say words in the thread, without a message of the visitor.
func (p *process) announce(t *testing.T, words ...string) {
	t.Helper()
	for _, w := range words {
		x, _, err := p.engine.Start(t.Context(), p.pool, executions.Spec{Flow: "announce", Surface: trace.Flow, ThreadID: "t", Input: w})
		if err != nil {
			t.Fatal(err)
		}
		p.reaches(t, x.ID, executions.Completed)
	}
}

func TestTheNextAnswerBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Your order is approved.", "It leaves today.")
	seen := p.model.Requests()
	const want = "Your order is approved.\n\nIt leaves today.\n\nI am the model."
	body, headers := `{"model":"nora","messages":[{"role":"user","content":"any news?"}]}`, append(inThread("t"), "Idempotency-Key", "k")
	for range 2 { // the second is replayed
		_, got := p.post(t, body, headers...)
		var answer openai.ChatCompletionResponse
		if err := json.Unmarshal([]byte(got), &answer); err != nil || answer.Choices[0].Message.Content != want {
			t.Errorf("answer: %s, %v", got, err)
		}
	}
	all := p.model.Requests()
	if len(all) != len(seen)+1 {
		t.Fatalf("%d calls of the model", len(all)-len(seen))
	}
	var history []string
	for _, m := range all[len(all)-1].Messages[1:] {
		history = append(history, m.Content)
	}
	if h := strings.Join(history, "|"); strings.Count(h, "It leaves today.") != 1 {
		t.Errorf("the model was shown %q", h)
	}
	if got := p.answerTo(t, "t", "and now?"); got != "I am the model." {
		t.Errorf("the words came again: %q", got)
	}
	lines := []string{
		"hello", "I am the model.", "Your order is approved.", "It leaves today.", "any news?", "I am the model.", "and now?", "I am the model.",
	}
	if diff := cmp.Diff(lines, p.all(t, "t")); diff != "" {
		t.Errorf("the thread (-want +got):\n%s", diff)
	}
}

func TestAStreamBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	g, reply := gated()
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return reply })
	request := says("any news?")
	request.MaxCompletionTokens = 3 // bounds what the model says
	stream, err := p.client(inThread("t")...).CreateChatCompletionStream(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for got != "Approved." { // before the model has said a word
		chunk, err := stream.Recv()
		if err != nil {
			t.Fatalf("%v after %q", err, got)
		}
		got += chunk.Choices[0].Delta.Content
	}
	send(t, g.pieces, "Yes, it is.")
	close(g.pieces)
	if rest, err := streamed(t, stream); err != nil || rest != "\n\nYes, it is." {
		t.Errorf("then: %q, %v", rest, err)
	}
}

func TestTwoTurnsAtOnceShowAFlowsWordsOnce(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	answers := make(chan string, 2)
	for _, words := range []string{"one", "two"} {
		go func() { answers <- p.answerTo(t, "t", words) }()
	}
	if got := receive(t, answers) + "|" + receive(t, answers); strings.Count(got, "Approved.") != 1 {
		t.Errorf("the answers: %q", got)
	}
}

func TestAResponseBeginsWithWhatFlowsSaid(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/responses", strings.NewReader(`{"model":"nora","input":"any news?"}`))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer site")
	if _, body := do(t, r, inThread("t")); !strings.Contains(body, `Approved.\n\nI am the model.`) {
		t.Errorf("response: %s", body)
	}
}

func TestAFlowsWordsWaitForAnAnswerInWords(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text(`{"ok":true}`) })
	body := `{"model":"nora","messages":[{"role":"user","content":"as JSON"}],"response_format":{"type":"json_object"}}`
	_, got := p.post(t, body, inThread("t")...)
	var answer openai.ChatCompletionResponse
	if err := json.Unmarshal([]byte(got), &answer); err != nil || answer.Choices[0].Message.Content != `{"ok":true}` {
		t.Errorf("answer in a form: %s, %v", got, err)
	}
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	if got := p.answerTo(t, "t", "in words"); got != "Approved.\n\nYes." {
		t.Errorf("answer in words: %q", got)
	}
}

// A turn that failed has no answer; its words are the next one's.
func TestAFailedTurnLeavesAFlowsWordsToTheNext(t *testing.T) {
	t.Parallel()
	p := announcing(t)
	p.answerTo(t, "t", "hello")
	p.announce(t, "Approved.")
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Status(http.StatusBadRequest, 0)
	})
	if r, body := p.post(t, `{"model":"nora","messages":[{"role":"user","content":"any news?"}]}`, inThread("t")...); r.StatusCode == http.StatusOK {
		t.Fatalf("the turn did not fail: %s", body)
	}
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Yes.") })
	if got := p.answerTo(t, "t", "any news?"); got != "Approved.\n\nYes." {
		t.Errorf("answer: %q", got)
	}
}

func TestAnAnswerOfAFlowBeginsWithWhatWasSaidSinceTheModels(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Send me your name.")
		say("Hello, " + hear() + ".")
	})
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("I am the model.") })
	if _, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"}); err != nil {
		t.Fatal(err)
	}
	p.answerTo(t, "t", "hello")
	p.talks(t)
	if got := p.answerTo(t, "t", "Ada"); got != "Send me your name.\n\nHello, Ada." {
		t.Errorf("answer: %q", got)
	}
}
