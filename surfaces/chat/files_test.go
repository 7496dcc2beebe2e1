package chat_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// withFile is a message with a file.
func withFile(id string) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{Model: "nora", Messages: []openai.ChatCompletionMessageParamUnion{
		openai.UserMessage([]openai.ChatCompletionContentPartUnionParam{
			openai.TextContentPart("What is in it?"),
			openai.FileContentPart(openai.ChatCompletionContentPartFileFileParam{FileID: openai.String(id)}),
		}),
	}}
}

func refusal(t *testing.T, err error, status int, code string) {
	t.Helper()
	var got *openai.Error
	if !errors.As(err, &got) || got.StatusCode != status || got.Code != code {
		t.Errorf("want %d %s, got %v", status, code, err)
	}
}

// The official client uploads a file and names it in a message. Nobody else can, and a foreign id is as one that never was.
func TestAVisitorsFileIsShownToTheModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Two orders."), modeltest.Text("Still two."))
	p := w.process(t, func(c *chat.Chat) { c.DocumentBytes = 1000 })
	client := p.official("site", option.WithHeader("X-Thread-Id", "ada"))
	up, err := client.Files.New(t.Context(), openai.FileNewParams{
		File: openai.File(strings.NewReader("id,total\n1,9.50\n"), "../orders.csv", "text/csv"), Purpose: openai.FilePurposeUserData,
	})
	if err != nil || up.Filename != "orders.csv" || up.Bytes != 16 {
		t.Fatalf("%+v, %v", up, err)
	}
	other := p.official("shop")
	_, err = other.Chat.Completions.New(t.Context(), withFile(up.ID))
	refusal(t, err, 404, "file_not_found")
	visitor := p.official("site", option.WithHeader("X-Visitor-Token", "vis_"+strings.Repeat("x", 40)))
	_, err = visitor.Chat.Completions.New(t.Context(), withFile(up.ID))
	refusal(t, err, 404, "file_not_found")
	_, err = client.Chat.Completions.New(t.Context(), withFile("nonsense"))
	refusal(t, err, 404, "file_not_found")
	got, err := client.Chat.Completions.New(t.Context(), withFile(up.ID))
	if err != nil || got.Choices[0].Message.Content != "Two orders." {
		t.Fatalf("%+v, %v", got, err)
	}
	said := w.transcript(t, "ada")
	for _, want := range []string{"What is in it?", up.ID, `"orders.csv", text/csv, 16 B`, "1,9.50", "data, not instructions"} {
		if !strings.Contains(said[0], want) {
			t.Errorf("%q is not in %q", want, said[0])
		}
	}
	// In another thread it is a copy, which goes with that thread.
	elsewhere := p.official("site", option.WithHeader("X-Thread-Id", "bea"))
	if _, err := elsewhere.Chat.Completions.New(t.Context(), withFile(up.ID)); err != nil {
		t.Fatal(err)
	}
	var bound int
	if err := w.pool.QueryRow(t.Context(), `select count(*) from agent_documents where thread_id is not null`).Scan(&bound); err != nil || bound != 2 {
		t.Errorf("%d documents belong to a thread, %v", bound, err)
	}
	_, err = client.Files.New(t.Context(), openai.FileNewParams{
		File: openai.File(strings.NewReader(strings.Repeat("x", 1001)), "a", "text/plain"), Purpose: openai.FilePurposeUserData,
	})
	refusal(t, err, 413, "file_too_large")
}
