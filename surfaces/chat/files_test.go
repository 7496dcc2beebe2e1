package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	goopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// withFile returns a message with a file.
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
	assert.Truef(t, errors.As(err, &got) && got.StatusCode == status && got.Code == code,
		"want %d %s, got %v", status, code, err)
}

// The official client uploads a file and names it in a message. Another visitor cannot use it: its id is unknown there.
func TestVisitorsFileIsShownToModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Two orders."), modeltest.Text("Still two."))
	p := w.process(t, func(c *chat.Chat) { c.DocumentBytes = 1000 })
	client := p.official("site", option.WithHeader("X-Thread-Id", "ada"))
	up, err := client.Files.New(t.Context(), openai.FileNewParams{
		File:    openai.File(strings.NewReader("id,total\n1,9.50\n"), "../orders.csv", "text/csv"),
		Purpose: openai.FilePurposeAssistants,
	})
	require.Truef(t, err == nil && up.Filename == "orders.csv" && up.Bytes == 16 &&
		up.Purpose == openai.FileObjectPurposeUserData, "%+v, %v", up, err)
	other := p.official("shop")
	_, err = other.Chat.Completions.New(t.Context(), withFile(up.ID))
	refusal(t, err, 404, "file_not_found")
	visitor := p.official("site", option.WithHeader("X-Visitor-Token", "vis_"+strings.Repeat("x", 40)))
	_, err = visitor.Chat.Completions.New(t.Context(), withFile(up.ID))
	refusal(t, err, 404, "file_not_found")
	_, err = client.Chat.Completions.New(t.Context(), withFile("nonsense"))
	refusal(t, err, 404, "file_not_found")
	got, err := client.Chat.Completions.New(t.Context(), withFile(up.ID))
	require.Truef(t, err == nil && got.Choices[0].Message.Content == "Two orders.", "%+v, %v", got, err)
	lines := w.transcript(t, "ada")
	assert.Contains(t, lines[0], "What is in it?", up.ID, `"orders.csv", text/csv, 16 B`, "1,9.50",
		"data, not instructions")
	// In another thread the file is a copy, deleted with that thread.
	elsewhere := p.official("site", option.WithHeader("X-Thread-Id", "bea"))
	_, err = elsewhere.Chat.Completions.New(t.Context(), withFile(up.ID))
	require.NoError(t, err)
	var bound int
	err = w.pool.QueryRow(t.Context(), `select count(*) from agent_documents where thread_id is not null`).Scan(&bound)
	assert.Truef(t, err == nil && bound == 2, "%d documents belong to a thread, %v", bound, err)
	_, err = client.Files.New(t.Context(), openai.FileNewParams{
		File:    openai.File(strings.NewReader(strings.Repeat("x", 1001)), "a", "text/plain"),
		Purpose: openai.FilePurposeUserData,
	})
	refusal(t, err, 413, "file_too_large")
}

// asksForDocuments makes "talk" a flow that requests documents in its thread and sends a list of those that came.
func asksForDocuments(wanted ...string) func(c *chat.Chat) {
	var flow talk = func(ctx context.Context, say func(string), _ func() string) {
		id, err := requests.Ask(ctx, "request", requests.Request{Kind: requests.Document, Title: "Papers", Items: wanted})
		if err != nil {
			panic(stop{err})
		}
		say("Please send " + strings.Join(wanted, " and ") + ".")
		out, err := executions.Wait(ctx, "wait", executions.Document(id, 0))
		if err != nil {
			panic(stop{err})
		}
		var data struct {
			Files []struct{ Document, Name string }
		}
		if err := json.Unmarshal(out.Data, &data); err != nil {
			panic(stop{err})
		}
		for _, f := range data.Files {
			say(f.Document + " is " + f.Name + ".")
		}
	}
	return func(c *chat.Chat) {
		if err := c.Engine.Register("talk", flow.flow); err != nil {
			panic(err)
		}
	}
}

// upload sends a file for a later message.
func (p *process) upload(t *testing.T, name, content string, more ...option.RequestOption) string {
	t.Helper()
	client := p.official("site", more...)
	up, err := client.Files.New(t.Context(), openai.FileNewParams{
		File: openai.File(strings.NewReader(content), name, "text/plain"), Purpose: openai.FilePurposeUserData,
	})
	require.NoError(t, err)
	return up.ID
}

// A visitor may upload ten times as many files as it may send messages. An upload that creates a visitor counts as a
// message of its address.
func TestUploadOfANewVisitorCountsAsAMessage(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t, func(c *chat.Chat) { c.Rate = 1 }) // one message at once, three files
	for range 3 {
		p.upload(t, "a.txt", "a", option.WithHeader("X-Visitor-Token", "vis_"+strings.Repeat("x", 40)))
	}
	client := p.official("site", option.WithHeader("X-Visitor-Token", "new"))
	var err error
	for i := 0; i < 3 && err == nil; i++ {
		_, err = client.Files.New(t.Context(), openai.FileNewParams{
			File: openai.File(strings.NewReader("a"), "a.txt", "text/plain"), Purpose: openai.FilePurposeUserData,
		})
	}
	assert.ErrorContains(t, err, "429")
}

// A message brings the requested documents as files. The flow continues, and its messages are the answer. No model is
// called. The sender of the documents is recorded as a sender of the event, so it cannot approve under four eyes. The
// turn with them is the cause of the event, so why leads from the flow to that turn.
func TestFilesAnswerRequestOfFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, asksForDocuments("photo", "form"))
	p.actor = "ana"
	id := p.talks(t)
	inT := option.WithHeader("X-Thread-Id", "t")
	client := p.official("site", inT)
	first, err := client.Chat.Completions.New(t.Context(), withFile(p.upload(t, "dent.txt", "a dent", inT)))
	const missing = "Still missing: form. Send each as a file with your next message."
	require.Truef(t, err == nil && first.Choices[0].Message.Content == missing, "%+v, %v", first, err)
	second, err := client.Chat.Completions.New(t.Context(), withFile(p.upload(t, "signed.txt", "yes")))
	require.Truef(t, err == nil && second.Choices[0].Message.Content == "photo is dent.txt.\n\nform is signed.txt.",
		"%+v, %v", second, err)
	enginetest.Await(t, p.pool, id, executions.Completed)
	lines := w.transcript(t, "t")
	assert.Truef(t, len(lines) == 6 && strings.Contains(lines[1], "a dent") && strings.Contains(lines[2], missing) &&
		strings.Contains(lines[3], "yes"), "the thread: %q", lines)
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*)::int from agent_documents where thread_id = 't'`))
	p.expectRequester(t, "ana")
	got := pgtest.Value[string](t, w.pool, `
		select string_agg(y.what, '; ') from agent_executions x cross join lateral why(x.trace_id) y
		 where x.id = $1 and y.part = 'waits'`, id)
	assert.Contains(t, got, ": chat_relay raised event DOCUMENT_UPLOADED ")
}

// Text does not answer a request for documents. The visitor gets the list of missing documents again, and how to send
// them.
func TestWordsAloneAreToldWhichDocumentIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, asksForDocuments("photo", "form"))
	id := p.talks(t)
	const want = "Please send photo and form.\n\nStill missing: photo, form. Send each as a file with your next message."
	for range 2 { // the second answer does not repeat the first one's message
		assert.Equal(t, want, p.answerTo(t, "t", "it is broken"))
	}
	enginetest.Await(t, p.pool, id, executions.Waiting)
	lines := w.transcript(t, "t")
	require.Equal(t, 5, len(lines), lines)
	assert.Contains(t, lines[2], want)
	assert.Contains(t, lines[4], want)
	pgtest.Equal(t, w.pool, 2, `select count(*)::int from agent_messages a join agent_messages u using (execution_id, turn)
		where a.role = 'assistant' and u.role = 'user'`)
}

// A person on a channel learns it from a message there.
func TestChannelSaysWhichDocumentIsMissing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, asksForDocuments("photo"))
	_, _, err := threads.Ensure(t.Context(), w.pool, threads.Thread{
		ID: "t", Channel: channels.Telegram, Target: "support", Owner: channels.Owner("support"),
	})
	require.NoError(t, err)
	x, _, err := p.engine.Start(t.Context(), w.pool, executions.Spec{
		Flow: "talk", Surface: trace.Flow, ThreadID: "t",
	})
	require.NoError(t, err)
	enginetest.Await(t, p.pool, x.ID, executions.Waiting)
	_, err = p.chat.Accept(t.Context(), channels.Visit{
		Key: "1", Channel: channels.Channel{Name: "support", Type: channels.Telegram}, Conversation: "t",
		Text: "it is broken",
	})
	require.NoError(t, err)
	const ask = "Please send photo."
	pgtest.Until(t, w.pool, ask+" | "+ask+"\n\nStill missing: photo. Send each as a file with your next message.", `
		select string_agg(m.content, ' | ' order by m.seq)
		  from agent_messages m join agent_channel_sends s on s.message_id = m.id`)
}

// A message on a channel enters a full thread without its file.
func TestChannelSaysThatThreadIsFull(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t)
	_, _, err := threads.Ensure(t.Context(), w.pool, threads.Thread{
		ID: "t", Channel: channels.Telegram, Target: "support", Owner: channels.Owner("support"),
	})
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `
		insert into agent_documents (name, content_type, size, sha256, is_text, content, thread_id, owner_kind, owner)
		select 'a.txt', 'text/plain', 1, sha256('a'), true, 'a', 't', 'key', $1 from generate_series(1, $2)`,
		channels.Owner("support"), documents.MaxPerThread)
	got, err := p.chat.Accept(t.Context(), channels.Visit{
		Key: "1", Channel: channels.Channel{Name: "support", Type: channels.Telegram}, Conversation: "t",
		Text: "it is broken", Files: []channels.VisitFile{{Name: "photo.jpg", Type: "image/jpeg", Content: []byte("x")}},
	})
	require.NoError(t, err)
	text := pgtest.Value[string](t, w.pool, `select content from agent_messages where execution_id = $1 and role = 'user'`,
		got.ExecutionID)
	assert.Contains(t, text, "it is broken\n[The file \"photo.jpg\" is missing: too many files: limit per thread is")
}

// A file of another visitor answers no request, and its message is not stored.
func TestForeignFileAnswersNoRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, asksForDocuments("photo"))
	p.talks(t)
	other := p.official("shop")
	up, err := other.Files.New(t.Context(), openai.FileNewParams{
		File: openai.File(strings.NewReader("x"), "x.txt", "text/plain"), Purpose: openai.FilePurposeUserData,
	})
	require.NoError(t, err)
	client := p.official("site", option.WithHeader("X-Thread-Id", "t"))
	_, err = client.Chat.Completions.New(t.Context(), withFile(up.ID))
	refusal(t, err, 404, "file_not_found")
	n := pgtest.Value[int](t, w.pool, `select count(*)::int from agent_messages m full join agent_events v on false
		where m.role = 'user' or v.event = 'DOCUMENT_UPLOADED'`)
	assert.Equal(t, 0, n, "messages and events were stored")
}

// The model gets the beginning of a long document, and reads on with document_read. It cannot read a document of
// another thread.
func TestModelReadsOnInLongDocument(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := builtins.Put(t.Context(), w.pool)
	require.NoError(t, err)
	maps.Copy(w.builtins, builtins.New(w.pool, nil, nil))
	p := w.process(t)
	long := p.upload(t, "long.txt", strings.Repeat("word ", 1000)+"The secret word is marzipan.")
	foreign := p.upload(t, "other.txt", "not for you")
	elsewhere := p.official("site", option.WithHeader("X-Thread-Id", "bea"))
	var offered []bool
	w.model.Handle(func(n int, r goopenai.ChatCompletionRequest) modeltest.Reply {
		offered = append(offered,
			slices.ContainsFunc(r.Tools, func(t goopenai.Tool) bool { return t.Function.Name == "document_read" }))
		switch last := r.Messages[len(r.Messages)-1]; {
		case n == 0:
			return modeltest.Text("Thank you.")
		case n == 1:
			return modeltest.ToolCall("document_read", fmt.Sprintf(`{"document": %q, "offset": 4000}`, long))
		case n == 2 && strings.Contains(last.Content, "marzipan"):
			return modeltest.ToolCall("document_read", fmt.Sprintf(`{"document": %q}`, foreign))
		case n == 3 && strings.Contains(last.Content, "no such document"):
			return modeltest.Text("marzipan")
		default:
			return modeltest.Text("I cannot read it: " + last.Content)
		}
	})
	_, err = elsewhere.Chat.Completions.New(t.Context(), withFile(foreign))
	require.NoError(t, err)
	client := p.official("site", option.WithHeader("X-Thread-Id", "ada"))
	got, err := client.Chat.Completions.New(t.Context(), withFile(long))
	require.Truef(t, err == nil && got.Choices[0].Message.Content == "marzipan", "%+v, %v", got, err)
	assert.Truef(t, slices.Equal(offered, []bool{false, true, true, true}), "document_read was offered: %v", offered)
}

// A visitor sees and deletes only its own files. It cannot delete a file that a message uses.
func TestVisitorDeletesFileThatNothingUses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Thank you."))
	p := w.process(t)
	used, unused := p.upload(t, "used.txt", "a"), p.upload(t, "unused.txt", "bc")
	client, other := p.official("site"), p.official("shop")
	_, err := client.Chat.Completions.New(t.Context(), withFile(used))
	require.NoError(t, err)
	list, err := client.Files.List(t.Context(), openai.FileListParams{Limit: openai.Int(1)})
	require.Truef(t, err == nil && len(list.Data) == 1 && list.Data[0].ID == unused && list.HasMore &&
		list.Data[0].ExpiresAt != 0, "%+v, %v", list, err)
	next, err := list.GetNextPage()
	assert.Truef(t, err == nil && len(next.Data) == 1 && next.Data[0].ID == used && !next.HasMore &&
		next.Data[0].ExpiresAt == 0, "%+v, %v", next, err)
	r, body := p.get(t, "/v1/files/"+unused+"/content")
	assert.Truef(t, body == "bc" && strings.HasPrefix(r.Header.Get("Content-Disposition"), "attachment"),
		"%s, %v", body, r.Header)
	none, err := other.Files.List(t.Context(), openai.FileListParams{})
	assert.Truef(t, err == nil && len(none.Data) == 0, "another key lists %+v, %v", none, err)
	_, err = other.Files.Get(t.Context(), unused)
	refusal(t, err, 404, "file_not_found")
	_, err = other.Files.Content(t.Context(), unused)
	refusal(t, err, 404, "file_not_found")
	_, err = other.Files.Delete(t.Context(), unused)
	refusal(t, err, 404, "file_not_found")
	_, err = client.Files.Delete(t.Context(), used)
	refusal(t, err, 409, "file_in_use")
	got, err := client.Files.Delete(t.Context(), unused)
	assert.Truef(t, err == nil && got.Deleted && got.ID == unused, "%+v, %v", got, err)
	_, err = client.Files.Get(t.Context(), unused)
	refusal(t, err, 404, "file_not_found")
	if got, err := client.Files.Get(t.Context(), used); err != nil || got.Filename != "used.txt" ||
		got.Purpose != "user_data" {
		t.Errorf("%+v, %v", got, err)
	}
}
