// Package offline is a rule-based model for the first hour with the product. It needs no key and no network.
//
// It compares words and understands no language. It speaks the OpenAI protocol over HTTP, so the client, tool
// calls, budgets and traces run as they do with a real model.
//
// It applies the first rule that matches:
//
//  1. A known phrase in English or Spanish is an intent: a greeting, "help", "what did you do today",
//     "remember that …", "forget …", "propose an objective …", "delegate …". "Again" repeats the last message.
//     A question about an attached document gets its first lines.
//  2. "run NAME" calls that tool, with the JSON behind the name or with arguments from the message.
//  3. Read-only tools that share words with the message or with an open step are called, the closest first:
//     up to four in a reply and ten in a turn. If no tool matches, skill_search is called.
//  4. Objective tools report steps, plan steps and remember figures, where they are offered.
//  5. A text answer quotes the figures found and names each failed, denied or pending call.
//
// Guarantees: a tool that changes something is called only on an order by name. Webhooks, events, documents
// and quotations order nothing. No call repeats with the same arguments, so every conversation ends. The server
// keeps no state: equal requests get equal bytes. Usage counts four bytes a token.
package offline

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Model is the listed name of the offline model. Its default price is zero. The server accepts every name.
const Model = "offline"

const (
	shutdownTimeout = 2 * time.Second
	maxBody         = 16 << 20
	epoch           = 1_700_000_000 // earliest creation time in an answer
	owner           = "lanekeeper"
	bytesPerToken   = 4
)

// Start serves on a free loopback port until ctx ends or stop is called. url is the base URL for a client.
// stop waits for the server's end. It may be called repeatedly.
func Start(ctx context.Context) (url string, stop func(), err error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen on loopback: %w", err)
	}
	server := &http.Server{Handler: Handler(), ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		_ = server.Serve(listener) // the next request reports a broken listener as an unreachable model
	}()
	stop = sync.OnceFunc(func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if server.Shutdown(last) != nil {
			_ = server.Close() // answers that outlast the timeout are cut off
		}
		<-stopped
	})
	context.AfterFunc(ctx, stop)
	return "http://" + listener.Addr().String() + "/v1", stop, nil
}

// Handler serves the protocol's routes under /v1. It keeps no state and is safe for concurrent use.
func Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", complete)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		ignore(chatwire.WriteModels(w, epoch, owner, chatwire.Model{ID: Model}))
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
		return // the client closed the connection
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
	answer := answerTo(req, body)
	if req.Stream {
		ignore(chatwire.WriteStream(w, answer, req.StreamOptions != nil && req.StreamOptions.IncludeUsage))
		return
	}
	ignore(chatwire.WriteJSON(w, answer))
}

// answerTo answers a request. The hash of its body yields the id and the creation time.
func answerTo(req openai.ChatCompletionRequest, body []byte) chatwire.Answer {
	next := plan(parse(req))
	hash := sha256.Sum256(body)
	id := hex.EncodeToString(hash[:])
	answer := chatwire.Answer{
		ID: "chatcmpl-" + id[:24], Model: req.Model, Created: epoch + int64(binary.BigEndian.Uint16(hash[24:])),
		Text: next.text, Finish: openai.FinishReasonStop,
	}
	answer.Model = cmp.Or(answer.Model, Model)
	size := len(next.text)
	for i, c := range next.calls {
		size += len(c.name) + len(c.arguments)
		answer.Calls = append(answer.Calls, openai.ToolCall{
			ID: "call_" + id[24:46] + string(rune('a'+i)), Type: openai.ToolTypeFunction,
			Function: openai.FunctionCall{Name: c.name, Arguments: c.arguments},
		})
		answer.Finish = openai.FinishReasonToolCalls
	}
	limit := max(req.MaxTokens, req.MaxCompletionTokens) * bytesPerToken //nolint:staticcheck // clients send the old name too
	if limit > 0 && len(answer.Text) > limit {
		answer.Text, answer.Finish = truncate(answer.Text, limit), openai.FinishReasonLength
	}
	answer.Usage = &openai.Usage{
		PromptTokens: tokens(len(body)), CompletionTokens: tokens(size), TotalTokens: tokens(len(body)) + tokens(size),
	}
	return answer
}

func tokens(bytes int) int { return (bytes + bytesPerToken - 1) / bytesPerToken }

func refuse(w http.ResponseWriter, status int, code, message string) {
	ignore(chatwire.WriteFailure(w, status, chatwire.Failure{Message: message, Type: "invalid_request_error", Code: code}))
}

// ignore drops an error of sending: the client closed the connection.
func ignore(error) {}
