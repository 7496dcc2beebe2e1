package chat_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
)

// A participant whose access is revoked hears no more: the stream ends while the answer is made, and cannot be attached
// to.
func TestARevokedParticipantHearsNoMore(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t, reply)
	listener := postgres.NewListener(postgres.Dialer(w.pool), slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- listener.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		<-done
	})
	p := w.process(t, func(c *chat.Chat) { c.Listener = listener })
	hall, _, err := threads.Open(t.Context(), w.pool, threads.Admin, threads.Thread{Name: "hall"})
	if err != nil {
		t.Fatal(err)
	}
	access, err := threads.Let(t.Context(), w.pool, hall.ID, threads.Key("site"), "hall", "admin")
	if err != nil {
		t.Fatal(err)
	}
	stream, err := p.client(inThread("hall")...).CreateChatCompletionStream(t.Context(), says("coffee"))
	if err != nil {
		t.Fatal(err)
	}
	receive(t, g.asked)
	send(t, g.pieces, "Coffee is")
	id := ""
	for text := ""; text == ""; {
		chunk, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		id, text = chunk.ID, chunk.Choices[0].Delta.Content
	}
	if err := threads.Revoke(t.Context(), w.pool, hall.ID, access); err != nil {
		t.Fatal(err)
	}
	_, err = streamed(t, stream)
	var failure *openai.APIError
	if !errors.As(err, &failure) || failure.Code != "thread_not_found" {
		t.Errorf("the stream ends with %v", err)
	}
	if got, body := p.get(t, "/v1/chat/completions/"+id); got.StatusCode != http.StatusNotFound {
		t.Errorf("attached again: %d %s", got.StatusCode, body)
	}
	close(g.pieces)
}

// Nor does a participant whose access is revoked get an answer by asking for it once more.
func TestARevokedParticipantGetsNoRepeatedAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Coffee is a plant."))
	p := w.process(t)
	hall, _, err := threads.Open(t.Context(), w.pool, threads.Admin, threads.Thread{Name: "hall"})
	if err != nil {
		t.Fatal(err)
	}
	access, err := threads.Let(t.Context(), w.pool, hall.ID, threads.Key("site"), "hall", "admin")
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"model":"agent","messages":[{"role":"user","content":"coffee"}]}`
	headers := append(inThread("hall"), "Idempotency-Key", "k1")
	if r, text := p.post(t, body, headers...); r.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", r.StatusCode, text)
	}
	if r, text := p.post(t, body, headers...); r.StatusCode != http.StatusOK || !strings.Contains(text, "a plant") {
		t.Errorf("repeated: %d %s", r.StatusCode, text)
	}
	if err := threads.Revoke(t.Context(), w.pool, hall.ID, access); err != nil {
		t.Fatal(err)
	}
	if r, text := p.post(t, body, headers...); r.StatusCode == http.StatusOK || strings.Contains(text, "a plant") {
		t.Errorf("after it was revoked: %d %s", r.StatusCode, text)
	}
}
