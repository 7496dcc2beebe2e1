package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// talk is the body of a test flow: a conversation in the thread "t".
type talk func(ctx context.Context, say func(string), hear func() string)

// stop unwinds a talk that waits.
type stop struct{ error }

// flow returns a durable function that runs a talk.
func (f talk) flow(ctx context.Context, _ json.RawMessage) (_ executions.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			s, ok := p.(stop)
			if !ok {
				panic(p)
			}
			err = s.error
		}
	}()
	f(ctx, func(words string) {
		if _, err := threads.Send(ctx, threads.Outgoing{ThreadID: "t", Content: words}); err != nil {
			panic(stop{err})
		}
	}, func() string {
		out, err := executions.Wait(ctx, "answer", executions.Response("t", 0))
		if err != nil {
			panic(stop{err})
		}
		var data struct{ Content string }
		if err := json.Unmarshal(out.Data, &data); err != nil {
			panic(stop{err})
		}
		return data.Content
	})
	return executions.Result{}, nil
}

// conversing starts a process with the flow "talk". The model gets no requests.
func conversing(t *testing.T, f talk, more ...func(*chat.Chat)) *process {
	t.Helper()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		t.Error("the model was asked")
		return modeltest.Text("no")
	})
	return w.process(t, append(more, func(c *chat.Chat) {
		require.NoError(t, c.Engine.Register("talk", f.flow))
	})...)
}

// talks starts the flow in a thread that the key site can use, and waits until the flow waits.
func (p *process) talks(t *testing.T) string {
	t.Helper()
	_, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"})
	require.NoError(t, err)
	x, _, err := p.engine.Start(t.Context(), p.pool, executions.Spec{Flow: "talk", Surface: trace.Flow, ThreadID: "t"})
	require.NoError(t, err)
	enginetest.Await(t, p.pool, x.ID, executions.Waiting)
	return x.ID
}

func TestMessageGoesToFlowThatWaitsForIt(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Who are you?")
		name := hear()
		say("Hello, " + name + ".")
		say("Where do you live?")
		say("So " + name + " lives in " + hear() + ".")
	})
	id := p.talks(t)
	assert.Equal(t, "Hello, Ada.\n\nWhere do you live?", p.answerTo(t, "t", "Ada"))
	london := says("London")
	london.User = "A\x00da"
	stream, err := p.client(inThread("t")...).CreateChatCompletionStream(t.Context(), london)
	require.NoError(t, err)
	got, err := streamed(t, stream)
	assert.Truef(t, err == nil && got == "So Ada lives in London.", "streamed: %q, %v", got, err)
	enginetest.Await(t, p.pool, id, executions.Completed)
	want := []string{"Who are you?", "Ada", "Hello, Ada.", "Where do you live?", "London", "So Ada lives in London."}
	assert.NoDiff(t, want, p.all(t, "t"))
	assert.Equal(t, 0, pgtest.Value[int](t, p.pool, `select count(*)::int from agent_executions where flow = 'chat'`))
}

func TestAFlowThatFailsIsNotSilent(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Who are you?")
		hear()
		panic(stop{errors.New("no route")})
	})
	id := p.talks(t)
	const failed = "Your message was received, but the process that was to answer it has failed."
	assert.Equal(t, failed, p.answerTo(t, "t", "Ada"))
	enginetest.Await(t, p.pool, id, executions.Failed)
	assert.NoDiff(t, []string{"Who are you?", "Ada", failed}, p.all(t, "t"))
}

// expectRequester checks that a principal sent the only event for which a flow waited.
func (p *process) expectRequester(t *testing.T, name string) {
	t.Helper()
	pgtest.Equal(t, p.pool, "principal "+name, `
		select string_agg(k.cause, ' ') from agent_checkpoints c
		  join agent_links k on k.effect = 'event ' || (c.output ->> 'event_id') and k.kind = 'asked'
		 where c.waited_for <> ''`)
}

// all returns the messages of a thread in order.
func (p *process) all(t *testing.T, thread string) []string {
	t.Helper()
	return pgtest.Value[[]string](t, p.pool, `select array_agg(content order by seq) from agent_messages
		where thread_id = $1`, thread)
}

func TestMessageThatNobodyAnswersIsPassedOn(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(ctx context.Context, say func(string), _ func() string) {
		say("One moment.")
		if _, err := executions.Wait(ctx, "event", executions.Event("go", 0)); err != nil {
			panic(stop{err})
		}
	})
	id := p.talks(t)
	assert.Equal(t, "Your message was passed on.", p.answerTo(t, "t", "hello?"))
	assert.NoDiff(t, []string{"One moment.", "hello?"}, p.all(t, "t"))
	_, err := p.engine.Deliver(t.Context(), p.pool, "EVENT_COMPLETED", "go", nil, "")
	require.NoError(t, err)
	enginetest.Await(t, p.pool, id, executions.Completed)
	// After the flow has ended, the model answers again.
	p.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("here I am") })
	assert.Equal(t, "here I am", p.answerTo(t, "t", "anybody?"))
}

// A message between a flow's question and its wait is the answer to the question.
func TestMessageThatComesBeforeWaitIsNotLost(t *testing.T) {
	t.Parallel()
	asked, goOn := make(chan struct{}, 1), make(chan struct{})
	p := conversing(t, func(ctx context.Context, say func(string), hear func() string) {
		say("Who are you?")
		select {
		case asked <- struct{}{}:
		default:
		}
		select {
		case <-goOn:
		case <-ctx.Done():
		}
		say("Hello, " + hear() + ".")
	})
	_, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"})
	require.NoError(t, err)
	_, _, err = p.engine.Start(t.Context(), p.pool, executions.Spec{
		Flow: "talk", Surface: trace.Flow,
		ThreadID: "t",
	})
	require.NoError(t, err)
	testkit.Receive(t, asked)
	answers := make(chan string, 1)
	go func() { answers <- p.answerTo(t, "t", "Ada") }()
	pgtest.Eventually(t, func() bool { return slices.Contains(p.all(t, "t"), "Ada") }, "stored")
	close(goOn)
	assert.Equal(t, "Hello, Ada.", testkit.Receive(t, answers))
}

// A repeated message counts once. Its sender is recorded as a sender of the event, and cannot approve under four eyes.
func TestRelayedMessageCountsOnceAndCanBeAttachedTo(t *testing.T) {
	t.Parallel()
	p := conversing(t, func(_ context.Context, say func(string), hear func() string) {
		say("Who are you?")
		say("Hello, " + hear() + ".")
		say("Bye, " + hear() + ".")
	})
	p.actor = "ana"
	p.talks(t)
	headers := append(inThread("t"), "Idempotency-Key", "k1")
	body := `{"model":"nora","messages":[{"role":"user","content":"Ada"}]}`
	first, firstBody := p.post(t, body, headers...)
	again, againBody := p.post(t, body, headers...)
	assert.Truef(t, first.StatusCode == http.StatusOK && again.StatusCode == http.StatusOK && firstBody == againBody &&
		strings.Contains(firstBody, "Hello, Ada."), "first %d %s\nagain %d %s", first.StatusCode, firstBody, again.StatusCode,
		againBody)
	var got openai.ChatCompletionResponse
	require.NoError(t, json.Unmarshal([]byte(firstBody), &got))
	attached, attachedBody := p.get(t, "/v1/chat/completions/"+got.ID+"?stream=true")
	assert.Truef(t, attached.StatusCode == http.StatusOK && contentOf(t, attachedBody) == "Hello, Ada.",
		"attached: %d %s", attached.StatusCode, attachedBody)
	assert.NoDiff(t, []string{"Who are you?", "Ada", "Hello, Ada."}, p.all(t, "t"))
	p.expectRequester(t, "ana")
}

func TestRelayEndsAfterAWhile(t *testing.T) {
	t.Parallel()
	done := make(chan struct{})
	p := conversing(t, func(ctx context.Context, say func(string), hear func() string) {
		say("Who are you?")
		say("Let me see, " + hear() + ".")
		select {
		case <-done:
		case <-ctx.Done():
		}
	}, func(c *chat.Chat) { c.RelayWait = 8 * time.Second })
	id := p.talks(t)
	assert.Equal(t, "Let me see, Ada.", p.answerTo(t, "t", "Ada"))
	enginetest.Await(t, p.pool, id, executions.Running)
	close(done)
	enginetest.Await(t, p.pool, id, executions.Completed)
}

func TestRelayWhoseMessagesAreDeletedEndsWithWhatItHasShown(t *testing.T) {
	t.Parallel()
	done := make(chan struct{})
	p := conversing(t, func(ctx context.Context, say func(string), hear func() string) {
		say("Who are you?")
		say("Hello, " + hear() + ".")
		select {
		case <-done:
		case <-ctx.Done():
		}
	})
	id := p.talks(t)
	stream, err := p.client(inThread("t")...).CreateChatCompletionStream(t.Context(), says("Ada"))
	require.NoError(t, err)
	defer stream.Close()
	var text string
	for !strings.Contains(text, "Hello, Ada.") {
		chunk, err := stream.Recv()
		require.NoError(t, err, "after", text)
		for _, c := range chunk.Choices {
			text += c.Delta.Content
		}
	}
	pgtest.Exec(t, p.pool, `delete from agent_messages where role = 'assistant'`)
	close(done)
	rest, err := streamed(t, stream)
	assert.Truef(t, err == nil && rest == "", "then comes %q, %v", rest, err)
	enginetest.Await(t, p.pool, id, executions.Completed)
}

// A child gets the message. The answer also has the messages that its parent flow sends after it.
func TestRelayFollowsFromChildToItsParent(t *testing.T) {
	t.Parallel()
	child := talk(func(_ context.Context, say func(string), hear func() string) {
		say("Your INE, please.")
		hear()
		say("Got it.")
	})
	p := conversing(t, func(ctx context.Context, say func(string), _ func() string) {
		say("We begin.")
		if _, err := executions.Trigger(ctx, "collect", executions.Child{Flow: "child", Wait: true}); err != nil {
			panic(stop{err})
		}
		say("Next step.")
	}, func(c *chat.Chat) {
		require.NoError(t, c.Engine.Register("child", child.flow))
	})
	id := p.talks(t)
	pgtest.Until(t, p.pool, 1, `select count(*)::int from agent_executions where flow = 'child' and status = 'waiting'`)
	assert.Equal(t, "Got it.\n\nNext step.", p.answerTo(t, "t", "here it is"))
	enginetest.Await(t, p.pool, id, executions.Completed)
}

// An absent external worker sends nothing. The visitor does not wait for it, and gets its messages with the next
// answer.
func TestVisitorDoesNotWaitForWorkerThatIsAway(t *testing.T) {
	t.Parallel()
	p := conversing(t, nil, func(c *chat.Chat) { c.RelayWait = time.Hour })
	_, _, err := threads.Ensure(t.Context(), p.pool, threads.Thread{ID: "t", Owner: "site"})
	require.NoError(t, err)
	x, _, err := p.engine.Start(t.Context(), p.pool, executions.Spec{
		Flow: "external:agent", Surface: trace.Flow,
		ThreadID: "t", OnLost: "hand_on",
	})
	require.NoError(t, err)
	says := func(words string) { // sends words and waits for the answer; then the next worker may lock the run
		t.Helper()
		got, err := p.engine.LockRun(t.Context(), x.ID, "worker", time.Minute)
		require.NoError(t, err)
		require.NoError(t, postgres.InTx(t.Context(), p.pool, func(tx pgx.Tx) error {
			claim, err := p.engine.LockClaim(t.Context(), x.ID, got.LockID)
			if err == nil {
				_, err = threads.SendTx(t.Context(), tx, threads.Outgoing{
					ThreadID: "t", Content: words,
					ExecutionID: x.ID, Claim: claim,
				})
			}
			return err
		}))
		_, _, err = p.engine.UnlockRun(t.Context(), x.ID, got.LockID,
			executions.UnlockParams{Status: executions.Waiting, For: "response"})
		require.NoError(t, err)
	}
	says("Who are you?")
	assert.Equal(t, "Your message was passed on.", p.answerTo(t, "t", "Ada"))
	says("Hello, Ada. Where do you live?")
	assert.Equal(t, "Hello, Ada. Where do you live?", p.answerTo(t, "t", "London"))
	// A run whose worker was lost has no worker either, once the loss is known.
	_, err = p.engine.LockRun(t.Context(), x.ID, "worker", time.Minute)
	require.NoError(t, err)
	pgtest.Exec(t, p.pool, `update agent_workers set expires_at = clock_timestamp() where execution_id = $1`, x.ID)
	assert.Equal(t, "Your message was passed on.", p.answerTo(t, "t", "hello?"))
}

func TestParameterThatCannotBeHonouredIsRefusedByName(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t)
	for value, param := range map[string]string{
		`"tools":[{"type":"function","function":{"name":"f","parameters":{}}}]`: "tools",
		`"functions":[{"name":"f"}]`:                                "functions",
		`"tool_choice":"required"`:                                  "tool_choice",
		`"tool_choice":{"type":"function","function":{"name":"f"}}`: "tool_choice",
		`"function_call":{"name":"f"}`:                              "function_call",
		`"logprobs":true`:                                           "logprobs",
		`"top_logprobs":3`:                                          "top_logprobs",
		`"n":2`:                                                     "n",
		`"audio":{"voice":"alloy","format":"mp3"}`:                  "audio",
		`"modalities":["text","audio"]`:                             "modalities",
		`"stop":"END"`:                                              "stop",
		`"stop":["a","b"]`:                                          "stop",
		`"logit_bias":{"50256":-100}`:                               "logit_bias",
		`"web_search_options":{}`:                                   "web_search_options",
		`"moderation":{"model":"omni-moderation-latest"}`:           "moderation",
		`"response_format":{"type":"grammar"}`:                      "response_format",
		`"response_format":7`:                                       "response_format",
	} {
		r, body := p.post(t, `{"model":"agent",`+value+`,"messages":[{"role":"user","content":"hi"}]}`)
		got := failureOf(t, body)
		assert.Truef(t, r.StatusCode == http.StatusBadRequest && got.Param != nil && *got.Param == param &&
			got.Code == "unsupported_value" && got.Type == "invalid_request_error" && len(got.Message) >= len(param)+15,
			"%s: %d %s", value, r.StatusCode, body)
	}
	assert.Equal(t, 0, pgtest.Value[int](t, p.pool, `select count(*) from agent_threads`))
}

func TestParametersThatChangeNothingAreAccepted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	for _, value := range []string{
		`"temperature":0.7,"top_p":1,"seed":7,"frequency_penalty":0,"presence_penalty":0,"reasoning_effort":"low"`,
		`"tools":[],"tool_choice":"auto","functions":[],"function_call":"auto"`,
		`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"none"`,
		`"functions":[{"name":"f"}],"function_call":"none"`,
		`"response_format":{"type":"text"},"modalities":[ "text" ],"logprobs":false,"top_logprobs":0,"n":1`,
		`"stop":null,"audio":null,"logit_bias":{},"tools":null,"response_format":null,"stop":[]`,
		`"store":false,"service_tier":"auto","parallel_tool_calls":true,"prompt_cache_key":"k","safety_identifier":"s"`,
		`"verbosity":"low","prediction":{"type":"content","content":"x"},"prompt_cache_retention":"24h"`,
	} {
		w.model.Add(modeltest.Text("Hello."))
		r, body := p.post(t, `{"model":"agent",`+value+`,"messages":[{"role":"user","content":"hi"}]}`)
		assert.Equal(t, http.StatusOK, r.StatusCode, value, body)
	}
	for _, req := range w.model.Requests() {
		assert.Truef(t, req.Temperature == 0 && req.Seed == nil && len(req.Stop) == 0,
			"a client's setting reached the model: %+v", req)
	}
}
