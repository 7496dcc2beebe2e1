package chat_test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3/option"
	gopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// holding returns the body of a request with a file in it.
func holding(data, more string) string {
	return `{"model":"agent","messages":[{"role":"user","content":[{"type":"file","file":{"file_data":"` + data +
		`","filename":"../orders.csv"` + more + `}}]}]}`
}

func inBase64(content string) string { return base64.StdEncoding.EncodeToString([]byte(content)) }

// stored lists the documents of threads, with the uploader of each.
func (w *world) stored(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `
		select coalesce(string_agg(concat_ws(' ', name, content_type, owner_kind, owner, convert_from(content, 'UTF8')), '; '
		  order by id), '')
		  from agent_documents where thread_id is not null`)
}

// A file inside a message becomes a document, like an uploaded one.
func TestFileInsideRequestIsStoredWithItsMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Again one."), modeltest.Text("Two."))
	p := w.process(t)
	url := "data:text/plain;base64," + inBase64("id,total")
	for range 2 { // the second has the same content, so it is the same document, but it is no retry
		r, body := p.post(t, holding(url, ""), inThread("s")...)
		require.True(t, r.StatusCode == http.StatusOK, body)
	}
	if got, want := w.stored(t), "orders.csv text/csv key site id,total"; got != want {
		t.Errorf("stored: %s, want %s", got, want)
	}
	lines := w.transcript(t, "s")
	assert.Truef(t, strings.Contains(lines[0], `"orders.csv", text/csv, 8 B`) && strings.Contains(lines[0], "id,total"),
		"the model was shown %q", lines[0])
	id := p.upload(t, "note.txt", "by its id")
	_, body := p.respond(t, "POST", "", fmt.Sprintf(`{"model":"agent","input":[{"role":"user","content":[
		{"type":"input_file","file_id":%q},{"type":"input_file","filename":"a.txt","file_data":%q}]}]}`, id, inBase64("inside")), inThread("r")...)
	require.True(t, strings.Contains(body, "Two."), body)
	if lines := w.transcript(t, "r"); !strings.Contains(lines[0], "by its id") || !strings.Contains(lines[0], "inside") {
		t.Errorf("the model was shown %q", lines[0])
	}
	other := p.official("shop")
	_, err := other.Chat.Completions.New(t.Context(),
		withFile(pgtest.Value[string](t, w.pool, `select id::text from agent_documents where name = 'a.txt'`)))
	refusal(t, err, http.StatusNotFound, "file_not_found")
}

func TestRequestThatIsSentAgainStoresItsFileOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g, held := gated()
	w.model.Handle(func(int, gopenai.ChatCompletionRequest) modeltest.Reply { return held })
	p := w.process(t)
	body := holding(inBase64("once"), "")
	p.gaveUp(t, g, body, inThread("s")...)
	close(g.pieces)
	_, err := p.sendIn(t.Context(), body, append(inThread("s"), countHeader, "1")...)
	require.NoError(t, err)
	if got, want := w.stored(t), "orders.csv text/csv key site once"; got != want {
		t.Errorf("stored: %s, want %s", got, want)
	}
	assert.Equal(t, 2, len(w.transcript(t, "s")))
}

func TestFileInsideRequestThatCannotBeTakenIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, func(c *chat.Chat) { c.DocumentBytes = 10 })
	for name, c := range map[string]struct {
		data, more string
		status     int
		code       string
	}{
		"no base64":  {"data:text/plain;base64,###", "", http.StatusBadRequest, "invalid_file"},
		"plain data": {"data:text/plain,abc", "", http.StatusBadRequest, "invalid_file"},
		"no content": {"data:text/plain;base64,", "", http.StatusBadRequest, "invalid_file"},
		"too large":  {inBase64("eleven byte"), "", http.StatusRequestEntityTooLarge, "file_too_large"},
		"no file":    {"", "", http.StatusBadRequest, "unsupported_content"},
		"two files":  {inBase64("x"), `,"file_id":"x"`, http.StatusBadRequest, "unsupported_content"},
	} {
		r, body := p.post(t, holding(c.data, c.more))
		assert.Truef(t, r.StatusCode == c.status && failureOf(t, body).Code == c.code, "%s: %d %s", name, r.StatusCode, body)
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_threads`); n != 0 || w.stored(t) != "" {
		t.Errorf("%d threads, and the documents %s", n, w.stored(t))
	}
}

// MIME breaks the lines of base64. The breaks do not count towards the limit.
func TestFileInsideRequestMayHaveLineBreaks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Read."))
	p := w.process(t, func(c *chat.Chat) { c.DocumentBytes = 10 })
	encoded := inBase64("ten bytes!")
	_, body := p.post(t, holding("data:text/plain;base64,"+strings.Join(strings.Split(encoded, ""), `\r\n`), ""))
	require.True(t, strings.Contains(body, "Read."), body)
	assert.Contains(t, w.stored(t), "ten bytes!")
}

func TestImageFileIsShownToModelThatTakesImages(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("A dot."), modeltest.Text("A name."))
	p := w.process(t)
	_, body := p.post(t, holding(pixel("one"), ""), inThread("s")...)
	require.True(t, strings.Contains(body, "A dot."), body)
	large := p.upload(t, "large.png", "\x89PNG\r\n\x1a\n"+strings.Repeat("x", 5<<20))
	client := p.official("site", option.WithHeader("X-Thread-Id", "s"))
	_, err := client.Chat.Completions.New(t.Context(), withFile(large))
	require.NoError(t, err)
	for i, r := range w.model.Requests() { // the second has the same conversation, and its own image is too large
		// once as the type, once as the field
		if n := strings.Count(r.Body, `"image_url"`); n != 2 || !strings.Contains(r.Body, pixel("one")) {
			t.Errorf("request %d has %d mentions of images: %.2000s", i, n, r.Body)
		}
	}
	lines := w.transcript(t, "s")
	assert.Truef(t, strings.Contains(lines[0], "orders.csv\", image/png") && strings.Contains(lines[2], "5.2 MB"),
		"the thread: %q", lines)
}

func TestImageFileIsDataForModelThatTakesTextAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("A name."))
	p := w.process(t, func(c *chat.Chat) {
		client, err := models.New(models.Config{BaseURL: w.model.URL(), Model: "deepseek-chat"})
		require.NoError(t, err)
		c.Loop.Model = client
	})
	_, body := p.post(t, holding(pixel("one"), ""))
	require.True(t, strings.Contains(body, "A name."), body)
	sent := w.model.Requests()[0].Body
	assert.Truef(t, !strings.Contains(sent, "image_url") && strings.Contains(sent, "image/png, 11 B"),
		"the model was asked %s", sent)
}
