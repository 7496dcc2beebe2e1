package chat_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	gopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// official returns OpenAI's own Go client.
func (p *process) official(key string, more ...option.RequestOption) openai.Client {
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL(p.url + "/v1"), option.WithAPIKey(key), option.WithMaxRetries(0),
	}, more...)...)
}

func ask(text string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:    "nora",
		Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
	}
}

func TestOfficialClientWorksUnchanged(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Hello, Ada."), modeltest.ToolCall("opening", `{}`),
		modeltest.Text("We open at nine o'clock."))
	p := w.process(t)
	client := p.official("site")
	got, err := client.Chat.Completions.New(t.Context(), ask("I am Ada."))
	require.NoError(t, err)
	if got.Choices[0].Message.Content != "Hello, Ada." || got.Choices[0].FinishReason != "stop" ||
		got.Usage.TotalTokens == 0 {
		t.Errorf("answer: %s", got.RawJSON())
	}
	params := ask("When do you open?")
	params.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	stream := client.Chat.Completions.NewStreaming(t.Context(), params)
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		if !all.AddChunk(stream.Current()) {
			t.Errorf("the chunk does not fit: %s", stream.Current().RawJSON())
		}
	}
	assert.Truef(t, stream.Err() == nil && all.Choices[0].Message.Content == "We open at nine o'clock." &&
		all.Choices[0].FinishReason == "stop" && all.Usage.TotalTokens != 0, "stream: %+v, %v", all.ChatCompletion,
		stream.Err())
	stored, err := client.Chat.Completions.Get(t.Context(), all.ID)
	assert.Truef(t, err == nil && stored.Choices[0].Message.Content == "We open at nine o'clock.",
		"stored: %+v, %v", stored, err)
	page, err := client.Models.List(t.Context())
	assert.Truef(t, err == nil && len(page.Data) == 2 && page.Data[0].ID == "nora", "models: %+v, %v", page, err)
}

const nodeScript = `
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.BASE, apiKey: "site", maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const out = {};
const whole = await client.chat.completions.create({ model: "nora", messages });
out.whole = whole.choices[0].message.content;
out.text = ""; out.usage = 0; out.keepalives = 0;
const stream = await client.chat.completions.create(
  { model: "agent", messages, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  const choice = chunk.choices[0];
  if (choice && !choice.delta.content && !choice.delta.role && !choice.finish_reason) out.keepalives++;
  out.text += choice?.delta?.content ?? "";
  out.usage = chunk.usage?.total_tokens ?? out.usage;
}
out.models = (await client.models.list()).data.map((m) => m.id);
const named = (e) => e.constructor.name + " " + e.code;
try {
  await client.chat.completions.create({ model: "gpt-4o", messages });
} catch (e) { out.missing = named(e); }
try {
  await client.withOptions({ apiKey: "stranger" }).models.list();
} catch (e) { out.key = named(e); }
try {
  await client.chat.completions.create({ model: "agent", messages: [] });
} catch (e) { out.bad = e.constructor.name + " " + (e.requestID ?? "").slice(0, 3); }
try {
  const fail = [{ role: "user", content: "fail" }];
  for await (const _ of await client.chat.completions.create({ model: "agent", messages: fail, stream: true })) {}
} catch (e) { out.middle = named(e); }
console.log(JSON.stringify(out));
`

// openaiForNode is the npm package of OpenAI's client.
const openaiForNode = "openai@6.49.0"

func TestTheNodeClientWorksUnchanged(t *testing.T) {
	t.Parallel()
	run := npmtest.Command(t, nodeScript, openaiForNode)
	w := newWorld(t)
	w.model.Handle(func(_ int, req gopenai.ChatCompletionRequest) modeltest.Reply {
		if req.Messages[len(req.Messages)-1].Content == "fail" {
			return modeltest.Refusal(400, "invalid_request_error", "no", "no", 0)
		}
		return modeltest.Text("Hello to you.").Slowly(60 * time.Millisecond)
	})
	p := w.process(t, func(c *chat.Chat) { c.KeepAlive = 20 * time.Millisecond })
	run.Env = append(run.Env, "BASE="+p.url+"/v1")
	out, err := run.Output()
	require.NoError(t, err, out)
	var got struct {
		Whole, Text, Missing, Key, Bad, Middle string
		Usage, Keepalives                      int
		Models                                 []string
	}
	require.NoError(t, json.Unmarshal(out, &got), out)
	assert.Truef(t, got.Whole == "Hello to you." && got.Text == "Hello to you." && got.Usage != 0 && got.Keepalives != 0 &&
		len(got.Models) == 2 && got.Missing == "NotFoundError model_not_found" &&
		got.Key == "AuthenticationError invalid_api_key" && got.Bad == "BadRequestError ch_" &&
		got.Middle == "APIError answer_failed", "the client saw %s", out)
}
