// Package offline is a rule-based model for the first hour with the product. It needs no key and no network.
//
// It compares words and understands no language. It speaks the OpenAI protocol over HTTP. So the client, tool calls,
// budgets and traces run as with a real model.
//
// It applies the first rule that matches:
//
//  1. A known phrase in English or Spanish is an intent: a greeting, "help", "what did you do today",
//     "remember that …", "forget …", "propose an objective …", "delegate …". "Again" repeats the last message.
//     A question about an attached document gets its first lines.
//  2. "run NAME" calls that tool, with the JSON behind the name or with arguments from the message.
//  3. The model calls read-only tools that share words with the message or an open step, the closest first: up to four
//     in a reply and ten in a turn. If no tool matches, it calls skill_search.
//  4. Objective tools, if offered, report steps, plan steps and remember figures.
//  5. A text answer quotes the figures found and names each failed, denied or pending call.
//
// Guarantees: rule 3 calls no tool whose name or description says that it changes something. Webhooks, events,
// documents and quotations order nothing. The model does not repeat a call that the request shows, with the same
// arguments, so a turn ends. The server keeps no state: equal requests get equal bytes. Usage counts four bytes a
// token.
package offline

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// Model is the listed name of the offline model. Its default price is zero. The server accepts every name.
const Model = "offline"

const (
	shutdownTimeout = 2 * time.Second
	maxBody         = 16 << 20
	created         = 1_700_000_000 // the time of every answer
	owner           = "lanekeeper"
	bytesPerToken   = 4
)

// Start serves on a free loopback port until ctx ends or the caller calls stop. url is the base URL for a client. stop
// waits for the server's end. Repeated calls of stop are safe.
func Start(ctx context.Context) (url string, stop func(), err error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen on loopback: %w", err)
	}
	server := &http.Server{Handler: Handler(), ReadHeaderTimeout: 10 * time.Second}
	var serving sync.WaitGroup
	serving.Go(func() {
		_ = server.Serve(listener) // the next request reports a broken listener as an unreachable model
	})
	stop = func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		if server.Shutdown(last) != nil {
			_ = server.Close() // answers that outlast the timeout are cut off
		}
		serving.Wait()
	}
	context.AfterFunc(ctx, stop)
	return "http://" + listener.Addr().String() + "/v1", stop, nil
}

// Handler serves the protocol's routes under /v1. It keeps no state and is safe for concurrent use.
func Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", complete)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_ = chatwire.WriteModels(w, created, owner, chatwire.Model{ID: Model})
	})
	return mux
}

func complete(w http.ResponseWriter, r *http.Request) {
	var req openai.ChatCompletionRequest
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = json.Unmarshal(body, &req)
	}
	switch {
	case err != nil:
		writeRefusal(w, "decode request: "+err.Error())
	case len(req.Messages) == 0:
		writeRefusal(w, "the request has no messages")
	case req.Stream:
		usage := req.StreamOptions != nil && req.StreamOptions.IncludeUsage
		_ = chatwire.WriteStream(w, answerTo(req, body), usage) // the client closed the connection
	default:
		_ = chatwire.WriteJSON(w, answerTo(req, body)) // the client closed the connection
	}
}

// answerTo answers a request. The hash of its body yields the ids.
func answerTo(req openai.ChatCompletionRequest, body []byte) chatwire.Answer {
	next := plan(parse(req))
	id := fmt.Sprintf("%x", sha256.Sum256(body))
	answer := chatwire.Answer{
		ID: "chatcmpl-" + id[:24], Model: cmp.Or(req.Model, Model), Created: created,
		Text: next.text, Finish: openai.FinishReasonStop,
	}
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
		size -= len(answer.Text) - limit // the mark of the cut is not counted
		answer.Text, answer.Finish = textcut.Text(answer.Text, limit), openai.FinishReasonLength
	}
	prompt, completion := tokens(len(body)), tokens(size)
	answer.Usage = &openai.Usage{
		PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion,
	}
	return answer
}

func tokens(bytes int) int { return (bytes + bytesPerToken - 1) / bytesPerToken }

func writeRefusal(w http.ResponseWriter, reason string) {
	failure := chatwire.Failure{Message: reason, Type: "invalid_request_error"}
	_ = chatwire.WriteFailure(w, http.StatusBadRequest, failure) // the client closed the connection
}
