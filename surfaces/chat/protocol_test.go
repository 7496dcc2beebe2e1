package chat_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

func TestVisitorIsAnswered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("opening", `{}`), modeltest.Text("We open at nine.").WithUsage(100, 7, 0))
	p := w.process(t)
	got, err := p.client(inThread("t1")...).CreateChatCompletion(t.Context(), says("When do you open?"))
	require.NoError(t, err)
	choice := got.Choices[0]
	assert.Truef(t, choice.Message.Content == "We open at nine." && choice.FinishReason == "stop" &&
		choice.Message.Role == "assistant" && got.Object == "chat.completion" && got.Model == "nora" &&
		strings.HasPrefix(got.ID, "chatcmpl-"), "answer: %+v", got)
	assert.Truef(t, got.Usage.CompletionTokens >= 7 &&
		got.Usage.TotalTokens == got.Usage.PromptTokens+got.Usage.CompletionTokens, "usage: %+v", got.Usage)
	header := got.Header()
	assert.Truef(t, header.Get("X-Thread-Id") == "t1" && strings.HasPrefix(header.Get("X-Trace-Id"), "ch_") &&
		header.Get("X-Request-Id") == header.Get("X-Trace-Id"), "headers: %v", header)
	assert.NoDiff(t, []string{"user: When do you open?", "assistant: We open at nine."}, w.transcript(t, "t1"))
	rows := pgtest.Value[int](t, w.pool, `select count(*) from agent_activity where trace_id = $1
		and agent = 'visitor_chat'`, header.Get("X-Trace-Id"))
	if rows != 3 || w.called("opening") != 1 {
		t.Errorf("%d rows of activity and %d calls, want two model calls and one skill", rows, w.called("opening"))
	}
}

// The client gets the finish reason of an incomplete answer from the model's server.
func TestAnswerThatIsNotWholeSaysSo(t *testing.T) {
	t.Parallel()
	for _, why := range []openai.FinishReason{openai.FinishReasonLength, openai.FinishReasonContentFilter} {
		w := newWorld(t, modeltest.Text("We open at").WithFinish(why))
		p := w.process(t)
		_, body := p.post(t,
			`{"model":"agent","stream":true,"metadata":{"thread_id":"t1"},"messages":[{"role":"user","content":"When?"}]}`)
		assert.Truef(t, strings.Contains(body, `"finish_reason":"`+string(why)+`"`) &&
			!strings.Contains(body, `"finish_reason":"stop"`), "a stream that ended by %s says %s", why, body)
		w.model.Add(modeltest.Text("And close at").WithFinish(why))
		_, body = p.post(t, `{"model":"agent","metadata":{"thread_id":"t1"},"messages":[{"role":"user","content":"And?"}]}`)
		assert.Truef(t, strings.Contains(body, `"finish_reason":"`+string(why)+`"`),
			"an answer that ended by %s says %s", why, body)
	}
}

// An answer with NUL is streamed as it is stored, so no text is sent twice.
func TestAnswerWithNULIsSaidOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("We open\x00 at nine."), modeltest.Text("And close\x00 at five."))
	p := w.process(t)
	for i, want := range []string{"We open\uFFFD at nine.", "And close\uFFFD at five."} {
		_, body := p.post(t, fmt.Sprintf(`{"model":"agent","stream":%t,"metadata":{"thread_id":"t1"},
			"messages":[{"role":"user","content":"When?"}]}`, i == 0))
		assert.Truef(t, !strings.Contains(body, `\n\n`) && strings.Count(body, "\uFFFD") == 1,
			"the answer is said otherwise than once: %s", body)
		lines := w.transcript(t, "t1")
		assert.Equal(t, "assistant: "+want, lines[len(lines)-1], "kept", want)
	}
}

func TestStreamHasFormOfProtocol(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Let me look.").AndCall("opening", `{}`), modeltest.Text("We open at nine."))
	p := w.process(t)
	r, body := p.post(t,
		`{"model":"agent","stream":true,"stream_options":{"include_usage":true},"logit_bias":{},"made_up":1,
		"messages":[{"role":"user","content":[{"type":"text","text":"When do"},{"type":"text","text":"you open?"}]}]}`)
	assert.Truef(t, r.StatusCode == http.StatusOK && r.Header.Get("Content-Type") == "text/event-stream" &&
		r.Header.Get("X-Accel-Buffering") == "no", "status %d, headers %v", r.StatusCode, r.Header)
	type chunk struct {
		ID, Object, Model string
		Created           int64
		Choices           []struct {
			Delta        map[string]any
			FinishReason *string `json:"finish_reason"`
		}
		Usage *openai.Usage
	}
	var chunks []chunk
	var last string
	scanner := bufio.NewScanner(strings.NewReader(body))
	for scanner.Scan() {
		data, ok := strings.CutPrefix(scanner.Text(), "data: ")
		if !ok {
			assert.Equal(t, "", scanner.Text())
			continue
		}
		if last = data; data == "[DONE]" {
			continue
		}
		var c chunk
		require.NoError(t, json.Unmarshal([]byte(data), &c))
		assert.Truef(t, c.ID != "" && c.Object == "chat.completion.chunk" && c.Created != 0 && c.Model == "agent",
			"chunk without its head: %s", data)
		chunks = append(chunks, c)
	}
	require.Truef(t, last == "[DONE]" && len(chunks) >= 4, "the stream:\n%s", body)
	assert.NoDiff(t, map[string]any{"role": "assistant", "content": ""}, chunks[0].Choices[0].Delta)
	var text strings.Builder
	for _, c := range chunks[1 : len(chunks)-2] {
		_, role := c.Choices[0].Delta["role"]
		assert.Truef(t, !role && c.Choices[0].FinishReason == nil, "a middle chunk has a role or a finish reason: %+v", c)
		if piece, ok := c.Choices[0].Delta["content"].(string); ok {
			text.WriteString(piece)
		}
	}
	end := chunks[len(chunks)-2]
	assert.Truef(t, end.Choices[0].FinishReason != nil && *end.Choices[0].FinishReason == "stop" &&
		len(end.Choices[0].Delta) == 0, "the last but one: %+v", end)
	usage := chunks[len(chunks)-1]
	assert.Truef(t, len(usage.Choices) == 0 && usage.Usage != nil, "the last: %+v", usage)
	// The stored answer equals the streamed one.
	want := "Let me look.\n\nWe open at nine."
	thread := w.transcript(t, r.Header.Get("X-Thread-Id"))
	diff := cmp.Diff([]string{"user: When do\nyou open?", "assistant: " + want}, thread)
	assert.Truef(t, diff == "" && text.String() == want, "streamed %q; thread (-want +got):\n%s", text.String(), diff)
}

func TestModelsAreListed(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t)
	list, err := p.client().ListModels(t.Context())
	require.NoError(t, err)
	var ids []string
	for _, m := range list.Models {
		ids = append(ids, m.ID)
	}
	assert.NoDiff(t, []string{"nora", "agent"}, ids)
	m, err := p.client().GetModel(t.Context(), "agent")
	assert.Truef(t, err == nil && m.ID == "agent" && m.Object == "model", "model: %+v, %v", m, err)
	_, err = p.client().GetModel(t.Context(), "gpt-4o")
	var failure *openai.APIError
	assert.Truef(t, errors.As(err, &failure) && failure.HTTPStatusCode == http.StatusNotFound &&
		failure.Code == "model_not_found", "an unknown model: %v", err)
}

func TestWhatIsRefused(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t, func(c *chat.Chat) { c.MaxBody, c.MaxMessage = 4096, 100 })
	user := `"messages":[{"role":"user","content":"hi"}]`
	for name, c := range map[string]struct {
		body, thread string
		status       int
		code, param  string
	}{
		"no JSON":       {`{`, "", 400, "invalid_json", ""},
		"no object":     {`[]`, "", 400, "invalid_type", ""},
		"wrong type":    {`{"model":"agent","messages":"hi"}`, "", 400, "invalid_type", "messages"},
		"no model":      {`{` + user + `}`, "", 400, "missing_model", "model"},
		"unknown model": {`{"model":"gpt-4o",` + user + `}`, "", 404, "model_not_found", "model"},
		"no messages":   {`{"model":"agent","messages":[]}`, "", 400, "missing_messages", "messages"},
		"two answers":   {`{"model":"agent","n":2,` + user + `}`, "", 400, "unsupported_value", "n"},
		"nothing new": {
			`{"model":"agent","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}`, "", 400,
			"invalid_value", "messages",
		},
		"only instructions": {
			`{"model":"agent","messages":[{"role":"system","content":"a"}]}`, "", 400,
			"invalid_value", "messages",
		},
		"empty": {
			`{"model":"agent","messages":[{"role":"user","content":" "}]}`, "", 400, "empty_message",
			"messages[0].content",
		},
		"number of thread": {
			`{"model":"agent","metadata":{"thread_id":7},"messages":[{"role":"user","content":"hi"}]}`, "",
			400, "invalid_type", "metadata.thread_id",
		},
		"text for metadata": {
			`{"model":"agent","metadata":"thread_id=t1","messages":[{"role":"user","content":"hi"}]}`, "",
			400, "invalid_type", "metadata",
		},
		"only NUL": {
			`{"model":"agent","messages":[{"role":"user","content":"\u0000 \u0000"}]}`, "", 400,
			"empty_message", "messages[0].content",
		},
		"null": {
			`{"model":"agent","messages":[{"role":"user","content":null}]}`, "", 400, "empty_message",
			"messages[0].content",
		},
		"an image": {
			`{"model":"agent","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, "",
			400, "unsupported_content", "messages[0].content",
		},
		"a long message": {
			`{"model":"agent","messages":[{"role":"user","content":"` + strings.Repeat("x", 101) + `"}]}`,
			"", 400, "string_above_max_length", "messages[0].content",
		},
		"a large body": {
			`{"model":"agent",` + user + `,"pad":"` + strings.Repeat("x", 5000) + `"}`, "", 413,
			"request_too_large", "",
		},
		"a strange role": {
			`{"model":"agent","messages":[{"role":"root","content":"a"}]}`, "", 400,
			"invalid_value", "messages[0].role",
		},
		"a long user behind its key's name": {
			`{"model":"agent","user":"` + strings.Repeat("x", 196) + `",` + user + `}`, "", 400,
			"invalid_value", "user",
		},
		"a long user": {
			`{"model":"agent","user":"` + strings.Repeat("x", 201) + `",` + user + `}`, "", 400,
			"invalid_value", "user",
		},
		"a long thread id": {
			`{"model":"agent",` + user + `}`, strings.Repeat("x", 201), 400,
			"invalid_thread_id", "thread_id",
		},
		"no room to answer": {`{"model":"agent","max_tokens":0,` + user + `}`, "", 400, "invalid_value", "max_tokens"},
		"a number for user": {`{"model":"agent","user":7,` + user + `}`, "", 400, "invalid_type", "user"},
		"a text for content": {
			`{"model":"agent","messages":[{"role":"user","content":7}]}`, "", 400, "invalid_type",
			"messages[0].content",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, body := p.post(t, c.body, inThread(c.thread)...)
			got := failureOf(t, body)
			param := ""
			if got.Param != nil {
				param = *got.Param
			}
			assert.Truef(t, r.StatusCode == c.status && got.Code == c.code && param == c.param && got.Message != "",
				"answer %d %s, want %d, code %s, param %q", r.StatusCode, body, c.status, c.code, c.param)
			assert.True(t, r.Header.Get("X-Request-Id") != "", "the answer has no x-request-id")
		})
	}
	assert.Equal(t, 0, pgtest.Value[int](t, p.pool, `select count(*) from agent_threads`))
}

func TestSilentStreamIsKeptAlive(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	p := newWorld(t, reply).process(t, func(c *chat.Chat) { c.KeepAlive = 30 * time.Millisecond })
	stream, err := p.client().CreateChatCompletionStream(t.Context(), says("hello"))
	require.NoError(t, err)
	defer stream.Close()
	for range 4 { // the role, then keep-alives
		chunk, err := stream.Recv()
		require.Truef(t, err == nil && len(chunk.Choices) == 1 && chunk.Choices[0].Delta.Content == "",
			"chunk %+v, %v", chunk, err)
	}
	send(t, g.pieces, "Hi.")
	close(g.pieces)
	text, err := streamed(t, stream)
	assert.Truef(t, text == "Hi." && err == nil, "text %q, %v", text, err)
}

func TestModelsFailureIsTold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Refusal(400, "invalid_request_error", "bad", "the key sk-very-secret is wrong", 0)
	})
	p := w.process(t)
	_, err := p.client(inThread("f")...).CreateChatCompletion(t.Context(), says("hello"))
	var failure *openai.APIError
	assert.Truef(t, errors.As(err, &failure) && failure.HTTPStatusCode == http.StatusBadGateway &&
		!strings.Contains(failure.Message, "sk-"), "whole: %v", err)
	stream, err := p.client(inThread("f")...).CreateChatCompletionStream(t.Context(), says("hello"))
	require.NoError(t, err)
	_, err = streamed(t, stream)
	assert.Truef(t, errors.As(err, &failure) && failure.Code == "answer_failed", "in the middle of a stream: %v", err)
	r, _ := p.post(t, `{"model":"agent","messages":[{"role":"user","content":"a"}]}`)
	assert.Equal(t, "false", r.Header.Get("X-Should-Retry"))
}

func TestBrokenAnswerBeginsAgainInSight(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.CutStream("We open at"), modeltest.Text("Nine o'clock."))
	p := w.process(t)
	stream, err := p.client(inThread("c")...).CreateChatCompletionStream(t.Context(), says("When?"))
	require.NoError(t, err)
	text, err := streamed(t, stream)
	assert.Truef(t, err == nil && strings.HasSuffix(text, "Nine o'clock."), "text %q, %v", text, err)
	assert.NoDiff(t, []string{"user: When?", "assistant: " + text}, w.transcript(t, "c"))
	// The client has seen none of the broken answer, so it is discarded.
	w.model.Add(modeltest.CutStream("We close at"), modeltest.Text("Six o'clock."))
	assert.Equal(t, "Six o'clock.", p.answerTo(t, "c", "And close?"))
}

func TestMaxTokensBoundsAnswer(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("many words ", 50)
	w := newWorld(t, modeltest.Text(long), modeltest.Text(long))
	p := w.process(t)
	req := says("Tell me.")
	req.MaxCompletionTokens = 10
	req.MaxTokens = 0 //nolint:staticcheck // many clients send the older name
	got, err := p.client(inThread("m")...).CreateChatCompletion(t.Context(), req)
	require.NoError(t, err)
	if c := got.Choices[0]; len(c.Message.Content) > 40 || c.FinishReason != "length" || c.Message.Content == "" {
		t.Errorf("answer of %d bytes, finish %s", len(c.Message.Content), c.FinishReason)
	}
	stream, err := p.client(inThread("m")...).CreateChatCompletionStream(t.Context(), req)
	require.NoError(t, err)
	text, err := streamed(t, stream)
	assert.Truef(t, err == nil && len(text) <= 40 && text == long[:len(text)], "streamed %q, %v", text, err)
	w.model.Add(modeltest.Text(long))
	req.MaxCompletionTokens = math.MaxInt
	got, err = p.client(inThread("m")...).CreateChatCompletion(t.Context(), req)
	require.NoError(t, err)
	assert.Equal(t, long, got.Choices[0].Message.Content)
}

// The context of a request can end while its client waits: at a deadline, or in a shutdown.
func TestRequestWhoseContextEndsIsAnError(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t)
	expired, release := context.WithTimeout(t.Context(), 0)
	defer release()
	stopped, stop := context.WithCancelCause(t.Context())
	stop(executions.ErrDraining)
	for code, ctx := range map[string]context.Context{"database_away": expired, "service_unavailable": stopped} {
		w := httptest.NewRecorder()
		p.chat.ModelsHandler().ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/v1/models", nil))
		require.Equal(t, http.StatusServiceUnavailable, w.Code, code)
		assert.Equal(t, code, failureOf(t, w.Body.String()).Code)
		assert.Equal(t, "2", w.Header().Get("Retry-After"), code)
	}
}
