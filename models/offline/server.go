package offline

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

const (
	maxBody  = 16 << 20
	epoch    = 1_700_000_000 // the least creation time that is claimed
	owner    = "lanekeeper"
	perToken = 4 // bytes
)

// Handler serves the protocol's routes under /v1. It keeps no state and is safe for concurrent use.
func Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", complete)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		sent(chatwire.WriteModels(w, epoch, owner, chatwire.Model{ID: Model}))
	})
	mux.HandleFunc("GET /v1/models/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") != Model {
			refuse(w, http.StatusNotFound, "model_not_found", "the only model here is "+Model)
			return
		}
		sent(chatwire.WriteModel(w, epoch, owner, chatwire.Model{ID: Model}))
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		refuse(w, http.StatusNotFound, "unknown_url", "no route for "+r.Method+" "+r.URL.Path)
	})
	return mux
}

func complete(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		refuse(w, http.StatusRequestEntityTooLarge, "", "the request is larger than 16 MiB")
		return
	}
	if err != nil {
		return // the client has gone
	}
	var req openai.ChatCompletionRequest
	if err := json.Unmarshal(body, &req); err != nil {
		refuse(w, http.StatusBadRequest, "", "decode request: "+err.Error())
		return
	}
	if len(req.Messages) == 0 {
		refuse(w, http.StatusBadRequest, "", "the request has no messages")
		return
	}
	answer := reply(req, sha256.Sum256(body))
	if !req.Stream {
		sent(chatwire.WriteJSON(w, answer))
		return
	}
	sent(chatwire.WriteStream(w, answer, req.StreamOptions != nil && req.StreamOptions.IncludeUsage))
}

// reply is the answer to a request whose body has the given hash.
func reply(req openai.ChatCompletionRequest, hash [sha256.Size]byte) chatwire.Answer {
	d := decide(understand(req))
	id := hex.EncodeToString(hash[:])
	answer := chatwire.Answer{
		ID: "chatcmpl-" + id[:24], Model: req.Model, Created: epoch + int64(binary.BigEndian.Uint16(hash[24:])),
		Text: d.text, Finish: openai.FinishReasonStop,
	}
	if answer.Model == "" {
		answer.Model = Model
	}
	for i, c := range d.calls {
		answer.Calls = append(answer.Calls, openai.ToolCall{
			ID: "call_" + id[24:46] + string(rune('a'+i)), Type: openai.ToolTypeFunction,
			Function: openai.FunctionCall{Name: c.name, Arguments: c.arguments},
		})
		answer.Finish = openai.FinishReasonToolCalls
	}
	limit(&answer, max(req.MaxTokens, req.MaxCompletionTokens)) //nolint:staticcheck // clients send the old name too
	answer.Usage = usage(req, answer)
	return answer
}

// limit cuts the text at max tokens; 0 is no limit.
func limit(a *chatwire.Answer, tokens int) {
	if r := []rune(a.Text); tokens > 0 && len(a.Text) > tokens*perToken {
		for len(string(r)) > tokens*perToken {
			r = r[:len(r)-1]
		}
		a.Text, a.Finish = string(r), openai.FinishReasonLength
	}
}

func usage(req openai.ChatCompletionRequest, a chatwire.Answer) *openai.Usage {
	prompt, completion := 0, len(a.Text)
	for _, m := range req.Messages {
		prompt += len(content(m)) + perToken*perToken
		for _, call := range m.ToolCalls {
			prompt += len(call.Function.Name) + len(call.Function.Arguments)
		}
	}
	for _, t := range req.Tools {
		if encoded, err := json.Marshal(t); err == nil { // it was decoded a moment ago
			prompt += len(encoded)
		}
	}
	for _, call := range a.Calls {
		completion += len(call.Function.Name) + len(call.Function.Arguments)
	}
	u := &openai.Usage{PromptTokens: tokens(prompt), CompletionTokens: tokens(completion)}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

func tokens(bytes int) int { return (bytes + perToken - 1) / perToken }

func refuse(w http.ResponseWriter, status int, code, message string) {
	sent(chatwire.WriteFailure(w, status, chatwire.Failure{Message: message, Type: "invalid_request_error", Code: code}))
}

// sent is where errors of sending end: the client has gone, and there is nobody else to tell.
func sent(error) {}
