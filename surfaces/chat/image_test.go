package chat_test

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3/option"
	gopenai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
)

// pixel returns a PNG as a data: URL. Each mark makes a different one.
func pixel(mark string) string {
	return "data:image/png;base64," + base64.StdEncoding.EncodeToString([]byte("\x89PNG\x0d\x0a\x1a\x0a"+mark))
}

const picture = "https://pictures.example.com/a.png"

// shows returns the body of a request with a text and images.
func shows(text string, urls ...string) string {
	parts := `{"type":"text","text":"` + text + `"}`
	for _, u := range urls {
		parts += `,{"type":"image_url","image_url":{"url":"` + u + `","detail":"low"}}`
	}
	return `{"model":"agent","messages":[{"role":"user","content":[` + parts + `]}]}`
}

func TestImagesReachModelAndStayInConversation(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("A dot."), modeltest.ToolCall("opening", `{}`), modeltest.Text("The same."),
		modeltest.Text("Both."))
	p := w.process(t)
	_, body := p.post(t, shows("What is it?", pixel("one"), picture), inThread("s")...)
	require.True(t, strings.Contains(body, "A dot."), body)
	p.answerTo(t, "s", "And now?")
	_, body = p.respond(t, "POST", "", `{"model":"agent","input":[{"role":"user","content":[`+
		`{"type":"input_text","text":"Compare."},{"type":"input_image","image_url":"`+pixel("two")+`"}]}]}`, inThread("s")...)
	require.True(t, strings.Contains(body, "Both."), body)
	for i, r := range w.model.Requests() {
		assert.Truef(t, strings.Contains(r.Body, `{"url":"`+pixel("one")+`","detail":"low"}`) &&
			strings.Contains(r.Body, picture), "request %d misses the images: %s", i, r.Body)
		assert.Equal(t, i == 3, strings.Contains(r.Body, pixel("two")), i)
	}
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*) from agent_message_images where data is not null`))
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `
		select (select count(*) from agent_activity where strpos(to_jsonb(agent_activity)::text, @data) > 0) +
		       (select count(*) from agent_checkpoints where strpos(to_jsonb(agent_checkpoints)::text, @data) > 0) +
		       (select count(*) from agent_executions where strpos(to_jsonb(agent_executions)::text, @data) > 0)`,
		postgres.Strict{"data": strings.TrimPrefix(pixel("one"), "data:image/png;base64,")}))
	pgtest.Exec(t, w.pool, `delete from agent_threads`)
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_message_images`))
}

func TestNewThreadTakesOverImagesOfItsHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Yes."))
	p := w.process(t)
	body := strings.Replace(shows("Look.", pixel("one")), `]}]}`,
		`]},{"role":"assistant","content":"A dot."},{"role":"user","content":"Sure?"}]}`, 1)
	_, got := p.post(t, body)
	require.True(t, strings.Contains(got, "Yes."), got)
	assert.Contains(t, w.model.Requests()[0].Body, pixel("one"))
}

func TestImageThatCannotBeTakenIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, func(c *chat.Chat) { c.MaxBody = 16 << 20 })
	large := base64.StdEncoding.EncodeToString(append([]byte("\x89PNG\x0d\x0a\x1a\x0a"), make([]byte, 5<<20)...))
	for name, c := range map[string]struct{ url, why string }{
		"plain http":   {"http://pictures.example.com/a.png", "https"},
		"a file":       {"file:///etc/passwd", "https"},
		"no host":      {"https:///a.png", "https"},
		"a password":   {"https://a:b@example.com/a.png", "https"},
		"a long URL":   {"https://example.com/" + strings.Repeat("a", 2048), "2048"},
		"no base64":    {"data:image/png;base64,###", "base64"},
		"no data":      {"data:image/png,abc", "form"},
		"another type": {strings.Replace(pixel("a"), "png", "gif", 1), "its data is image/png"},
		"a page": {
			"data:image/png;base64," + base64.StdEncoding.EncodeToString([]byte("<html>")), "png, jpeg, gif or webp",
		},
		"a drawing": {
			"data:image/svg+xml;base64," + base64.StdEncoding.EncodeToString([]byte("<svg/>")),
			"png, jpeg, gif or webp",
		},
		"a large image": {"data:image/png;base64," + large, "5242880"},
	} {
		r, body := p.post(t, shows("hi", c.url))
		f := failureOf(t, body)
		assert.Truef(t, r.StatusCode == http.StatusBadRequest && f.Code == "unsupported_content" &&
			*f.Param == "messages[0].content" && strings.Contains(f.Message, c.why), "%s: %d %.300s", name, r.StatusCode, body)
	}
	nine := strings.Split(strings.Repeat(picture+" ", 9), " ")[:9]
	if r, body := p.post(t, shows("hi", nine...)); r.StatusCode != http.StatusBadRequest ||
		!strings.Contains(body, "at most 8") {
		t.Errorf("nine images: %d %s", r.StatusCode, body)
	}
	_, body := p.respond(t, "POST", "",
		`{"model":"agent","input":[{"role":"user","content":[{"type":"input_image","file_id":"f"}]}]}`)
	f := failureOf(t, body)
	assert.True(t, f.Code == "unsupported_content" && *f.Param == "input[0].content", body)
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_threads`))
}

func TestAgentWhoseModelTakesTextAloneRefusesImages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, func(c *chat.Chat) {
		client, err := models.New(models.Config{BaseURL: w.model.URL(), Model: "deepseek-chat"})
		require.NoError(t, err)
		c.Loop.Model = client
	})
	r, body := p.post(t, shows("hi", pixel("a")))
	f := failureOf(t, body)
	assert.Truef(t, r.StatusCode == http.StatusBadRequest && f.Code == "image_not_supported", "%d %s", r.StatusCode, body)
	assert.True(t, len(w.model.Requests()) == 0, "the model was asked")
}

// A message of the history is stored with as many images as a new one may have.
func TestImagesOfHistoryAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, gopenai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("ok") })
	many := strings.Repeat(`{"type":"image_url","image_url":{"url":"https://example.com/a.png"}},`, threads.MaxImages+1)
	_, body := w.process(t).post(t, `{"model":"agent","messages":[{"role":"user","content":[`+many+
		`{"type":"text","text":"a"}]},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]}`, inThread("s")...)
	require.True(t, strings.Contains(body, "ok"), body)
	assert.Equal(t, threads.MaxImages, pgtest.Value[int](t, w.pool, `select count(*) from agent_message_images`))
}

func TestUnsupportedPartIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, body := w.process(t).post(t, `{"model":"agent","messages":[{"role":"user","content":[{"type":"input_audio"}]}]}`)
	assert.Contains(t, body, "not a part of type", "input_audio")
}

// A thread without room for an image file keeps no copy of it, and the model reads none of its content. The server
// refuses an image in the request itself.
func TestImagesOfThreadAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(int, gopenai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("ok") })
	p := w.process(t, func(c *chat.Chat) { c.MaxBody = 4 << 20 })
	p.answerTo(t, "s", "hi")
	pgtest.Exec(t, w.pool, `alter table agent_message_images alter column data set storage extended`) // compressed
	pgtest.Exec(t, w.pool, `
		with m as (
		  insert into agent_messages (thread_id, role, content, channel, trace_id, status)
		  select id, 'user', '', 'chat', '', 'withdrawn' from agent_threads returning id)
		insert into agent_message_images (message_id, place, media_type, data)
		select m.id, 1, 'image/png', convert_to(repeat('x', $1::int), 'UTF8') from m`, threads.MaxImageSize)
	pgtest.Exec(t, w.pool, `
		insert into agent_message_images (message_id, place, media_type, data)
		select message_id, n, media_type, data from agent_message_images, generate_series(2, $1::int) n`,
		documents.MaxThreadBytes/threads.MaxImageSize)
	stored := func() int64 {
		return pgtest.Value[int64](t, w.pool, `select sum(octet_length(data)) from agent_message_images`)
	}
	before, file := stored(), "\x89PNG\x0d\x0a\x1a\x0a"
	small := p.upload(t, "small.png", file, option.WithHeader("X-Thread-Id", "s"))
	large := p.upload(t, "large.png", file+strings.Repeat("x", 2<<20), option.WithHeader("X-Thread-Id", "s"))
	client := p.official("site", option.WithHeader("X-Thread-Id", "s"))
	for _, id := range []string{small, large} {
		_, err := client.Chat.Completions.New(t.Context(), withFile(id))
		require.NoError(t, err)
	}
	assert.Equal(t, before+int64(len(file)), stored())
	r, body := p.post(t, shows("hi", pixel(strings.Repeat("x", 1<<20))), inThread("s")...)
	f := failureOf(t, body)
	assert.Truef(t, r.StatusCode == http.StatusConflict && f.Code == "too_many_files", "%d %s", r.StatusCode, body)
	_, body = p.post(t, shows("hi", picture), inThread("s")...)
	assert.Contains(t, body, "ok")
}
