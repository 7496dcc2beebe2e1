package chat_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/looptest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(4)
	pgtest.Main(leaks.Tests{M: browser.Tests{M: m}})
}

// world is a database, a scripted model and skills that count their calls.
type world struct {
	pool     *pgxpool.Pool
	model    *modeltest.Server
	builtins map[string]skills.Builtin
	calls    testkit.Counter
}

// newWorld has four skills: opening (external), weather (both, not idempotent), secrets (internal) and refund
// (external, needs approval).
func newWorld(t *testing.T, replies ...modeltest.Reply) *world {
	t.Helper()
	w := &world{pool: pgtest.DB(t), model: modeltest.New(t, replies...), builtins: map[string]skills.Builtin{}}
	w.put(t, skills.Definition{Name: "opening", Scope: skills.ScopeExternal, Idempotent: true})
	w.put(t, skills.Definition{Name: "weather", Scope: skills.ScopeBoth})
	w.put(t, skills.Definition{Name: "secrets", Scope: skills.ScopeInternal, Idempotent: true})
	w.put(t, skills.Definition{Name: "refund", Scope: skills.ScopeExternal, Trust: skills.TrustApprove})
	return w
}

// put declares a skill whose builtin of the same name counts its calls.
func (w *world) put(t *testing.T, d skills.Definition) {
	t.Helper()
	w.builtins[d.Name] = func(context.Context, skills.Call) (any, error) {
		w.calls.Add(d.Name)
		return "done by " + d.Name, nil
	}
	d.Handler, d.Description = "builtin:"+d.Name, "does "+d.Name
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
}

func (w *world) called(skill string) int { return w.calls.Of(skill) }

// process is one agent process that serves the chat.
type process struct {
	*world
	engine *executions.Engine
	chat   *chat.Chat
	url    string
	log    *testkit.Log
	actor  string // the principal of further requests; "" for none
}

// process starts a process. Each change may alter the chat before its registration.
func (w *world) process(t *testing.T, change ...func(*chat.Chat)) *process {
	t.Helper()
	p, keeper := w.silent(t, change...)
	testkit.Run(t, p.engine.Run, keeper.Run, p.chat.Run)
	return p
}

// silent starts a process that serves, but takes no work and renews no lease, like one about to die.
func (w *world) silent(t *testing.T, change ...func(*chat.Chat)) (*process, *lanes.Keeper) {
	t.Helper()
	log := &testkit.Log{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	keeper := lanes.NewKeeper(w.pool, lanes.Options{})
	e := enginetest.New(t, w.pool, func(o *executions.Options) {
		o.Keeper, o.Logger, o.StopTimeout, o.Workers = keeper, logger, 2*time.Second, 2
	})
	p := &process{world: w, engine: e, log: log}
	p.chat = &chat.Chat{
		Pool: w.pool, Engine: e, Loop: w.loop(t), Logger: logger, Rate: -1,
		Agents:  &agents.Directory{Settings: agents.Settings{Name: "nora"}},
		Visitor: func(r *http.Request) string { return strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ") },
	}
	for _, f := range change {
		f(p.chat)
	}
	require.NoError(t, p.chat.Register(e))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the process:\n%s", log)
		}
	})
	p.serve(t)
	return p, keeper
}

// replayAll replays all turns, and wants what they have recorded.
func (p *process) replayAll(t *testing.T) {
	t.Helper()
	for _, id := range pgtest.Value[[]string](t, p.pool, `select array_agg(id::text) from agent_executions where flow = 'chat'`) {
		got, err := p.engine.Replay(t.Context(), id)
		assert.Truef(t, err == nil && got.Equal, "the replay of %s: %+v, %v, %+v", id, got, err, got.Divergence)
	}
}

func (w *world) loop(t *testing.T) *reason.Loop {
	t.Helper()
	return looptest.New(t, w.pool, w.model, skills.Options{Builtins: w.builtins})
}

// serve listens. Each test has a server with the API's routes, and the key as the owner.
func (p *process) serve(t *testing.T) {
	t.Helper()
	mux := http.NewServeMux()
	mux.Handle("POST /v1/chat/completions", p.chat.CompletionsHandler())
	mux.Handle("GET /v1/chat/completions/{id}", p.chat.CompletionHandler())
	mux.Handle("POST /v1/responses", p.chat.ResponsesHandler())
	mux.Handle("GET /v1/conversations/{id}/items", p.chat.ConversationItemsHandler())
	mux.Handle("GET /v1/responses/{id}", p.chat.ResponseHandler())
	mux.Handle("POST /v1/responses/{id}/cancel", p.chat.CancelResponseHandler())
	mux.Handle("GET /v1/responses/{id}/input_items", p.chat.InputItemsHandler())
	mux.Handle("DELETE /v1/responses/{id}", p.chat.DeleteResponseHandler())
	mux.Handle("POST /v1/files", p.chat.FilesHandler())
	mux.Handle("GET /v1/files", p.chat.FileListHandler())
	mux.Handle("GET /v1/files/{id}", p.chat.FileHandler())
	mux.Handle("GET /v1/files/{id}/content", p.chat.FileContentHandler())
	mux.Handle("DELETE /v1/files/{id}", p.chat.DeleteFileHandler())
	mux.Handle("GET /v1/models", p.chat.ModelsHandler())
	mux.Handle("GET /v1/models/{id}", p.chat.ModelHandler())
	guarded := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if key, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); strings.HasPrefix(key, "site") ||
			slices.Contains([]string{"shop", "visitor"}, key) {
			if p.actor != "" {
				r = r.WithContext(activity.WithActor(r.Context(), activity.Actor{Name: p.actor}))
			}
			mux.ServeHTTP(w, r)
			return
		}
		assert.NoError(t, chatwire.WriteFailure(w, http.StatusUnauthorized, chatwire.Failure{
			Message: "Incorrect API key.", Type: "invalid_request_error", Code: "invalid_api_key",
		}))
	})
	p.url = testkit.Serve(t, guarded)
}

// client returns the stock Go client with the key site.
func (p *process) client(headers ...string) *openai.Client { return p.clientOf("site", headers...) }

func (p *process) clientOf(key string, headers ...string) *openai.Client {
	cfg := openai.DefaultConfig(key)
	cfg.BaseURL = p.url + "/v1"
	cfg.HTTPClient = &http.Client{Transport: withHeaders(headers)}
	return openai.NewClientWithConfig(cfg)
}

// withHeaders adds pairs of names and values to each request.
type withHeaders []string

func (h withHeaders) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	for i := 0; i+1 < len(h); i += 2 {
		r.Header.Set(h[i], h[i+1])
	}
	return http.DefaultTransport.RoundTrip(r)
}

// says returns a request with one message.
func says(text string) openai.ChatCompletionRequest {
	return openai.ChatCompletionRequest{
		Model:    "nora",
		Messages: []openai.ChatCompletionMessage{{Role: "user", Content: text}},
	}
}

// inThread returns the header that names a thread.
func inThread(id string) []string { return []string{"X-Thread-Id", id} }

// insist sends a message in a thread. On a busy machine the thread may stay locked for longer than a message waits.
// Then nothing is stored, and insist sends the message again.
func (p *process) insist(ctx context.Context, thread, text string) (openai.ChatCompletionResponse, error) {
	for {
		got, err := p.client(inThread(thread)...).CreateChatCompletion(ctx, says(text))
		if failure, is := errors.AsType[*openai.APIError](err); !is || failure.Code != "thread_locked" {
			return got, err
		}
	}
}

// answerTo sends a message and returns the text of its answer.
func (p *process) answerTo(t *testing.T, thread, text string) string {
	t.Helper()
	got, err := p.insist(t.Context(), thread, text)
	require.NoError(t, err)
	return got.Choices[0].Message.Content
}

// streamed reads a stream to its end.
func streamed(t *testing.T, s *openai.ChatCompletionStream) (text string, err error) {
	t.Helper()
	defer s.Close()
	for {
		chunk, err := s.Recv()
		if err != nil {
			if err == io.EOF { //nolint:errorlint // as the client documents it
				err = nil
			}
			return text, err
		}
		for _, c := range chunk.Choices {
			text += c.Delta.Content
		}
	}
}

// post sends a raw request.
func (p *process) post(t *testing.T, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url+"/v1/chat/completions",
		strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer site")
	return do(t, r, headers)
}

func (p *process) get(t *testing.T, path string, headers ...string) (*http.Response, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.url+path, nil)
	require.NoError(t, err)
	r.Header.Set("Authorization", "Bearer site")
	return do(t, r, headers)
}

func do(t *testing.T, r *http.Request, headers []string) (*http.Response, string) {
	t.Helper()
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response, string(body)
}

// failureOf reads an error body.
func failureOf(t *testing.T, body string) chatwire.Failure {
	t.Helper()
	var got struct {
		Error chatwire.Failure `json:"error"`
	}
	require.NoError(t, json.Unmarshal([]byte(body), &got), "in", body)
	return got.Error
}

// idOf returns the id of the thread that the key site calls by a name.
func (w *world) idOf(t *testing.T, name string) string {
	t.Helper()
	id, _, err := threads.Resolve(t.Context(), w.pool, threads.Key("site"), name)
	require.NoError(t, err)
	return id
}

// transcript returns the messages of a thread in the order of reading.
func (w *world) transcript(t *testing.T, thread string) (lines []string) {
	t.Helper()
	_, messages, _, err := threads.Window(t.Context(), w.pool, w.idOf(t, thread), 0, 1_000_000)
	require.NoError(t, err)
	for _, m := range messages {
		line := m.Role + ": " + m.Content
		if m.Interrupted {
			line += " [interrupted]"
		}
		lines = append(lines, line)
	}
	return lines
}

// gate is a model's answer that the test sends in pieces.
type gate struct {
	pieces chan string
	asked  chan openai.ChatCompletionRequest
}

// gated returns a reply that the test controls: it streams each sent piece at once, and ends when the channel closes.
func gated() (*gate, modeltest.Reply) {
	g := &gate{pieces: make(chan string), asked: make(chan openai.ChatCompletionRequest, 8)}
	return g, modeltest.Custom(func(w http.ResponseWriter, r *http.Request) {
		g.asked <- openai.ChatCompletionRequest{}
		s := chatwire.Open(w, "chatcmpl-gated", "m", 1)
		s.Role()
		for {
			select {
			case piece, more := <-g.pieces:
				if !more {
					s.Finish(openai.FinishReasonStop)
					s.Done()
					return
				}
				s.Text(piece)
			case <-r.Context().Done():
				return
			}
		}
	})
}

func send[T any](t *testing.T, to chan<- T, v T) {
	t.Helper()
	select {
	case to <- v:
	case <-time.After(pgtest.Timeout):
		t.Fatal("no reader takes the test's piece")
	}
}

// contentOf returns the text of a stream's body.
func contentOf(t *testing.T, body string) (text string) {
	t.Helper()
	for line := range strings.Lines(body) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var chunk openai.ChatCompletionStreamResponse
		require.NoError(t, json.Unmarshal([]byte(data), &chunk))
		for _, c := range chunk.Choices {
			text += c.Delta.Content
		}
	}
	return text
}
