package chat_test

import (
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
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
