package app

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const eventStream = "text/event-stream"

func (a *App) endpoints() []api.Endpoint {
	var all []api.Endpoint
	for _, group := range [][]api.Endpoint{
		a.operateEndpoints(), a.chatEndpoints(), a.visitorEndpoints(), a.webhookEndpoints(), a.mcpEndpoints(),
		a.metricsEndpoints(), a.commandEndpoints(), a.channelEndpoints(),
	} {
		all = append(all, group...)
	}
	return all
}

// engineRoom builds the admin's web interface and its endpoints. Its actions call the API through routes.
func (a *App) engineRoom(routes func() http.Handler) (*engineroom.Room, []api.Endpoint, error) {
	key, err := hkdf.Key(sha256.New, []byte(a.Config.AdminToken.Reveal()), nil, "lanekeeper engine room 1", sha256.Size)
	if err != nil {
		return nil, nil, fmt.Errorf("make the Engine Room: %w", err)
	}
	room, err := engineroom.New(engineroom.Options{
		Pool: a.admin(), Read: a.Read, API: routes, Logger: a.Log, Agent: a.Config.Name, Key: key,
		OIDC:       a.Config.OIDC.Issuer != "",
		Limits:     Limits(a.Config.Limits),
		Unforkable: a.Engine.WhyUnforkable,
		Agents:     NewDirectory(a.Config), PriceOf: func(model string) string { return PriceOf(a.Config, model) },
	})
	if err != nil {
		return nil, nil, err
	}
	var all []api.Endpoint
	for _, r := range room.Routes() {
		e := api.Endpoint{
			Method: r.Method, Path: r.Path, About: "A page of the Engine Room.", Access: api.Admin, Page: true, Stream: r.Stream,
			Scope: r.Scope, Handler: r.Handler,
		}
		if r.Public {
			e.Access, e.Scope = api.Public, ""
		}
		if r.Stream {
			e.ContentType, e.Finite = eventStream, r.Method == "POST"
		}
		all = append(all, e)
	}
	return room, all, nil
}

// maxCommand bounds a command with its files, in bytes.
const maxCommand = 28 << 20

func (a *App) commandEndpoints() []api.Endpoint {
	if a.Commands == nil {
		return nil
	}
	return []api.Endpoint{{
		Method: "POST", Path: "/v1/commands", Access: api.Admin, Scope: principals.Authenticated, // each command has its own
		Body:        json.RawMessage{},
		ContentType: "application/x-ndjson", Stream: true, Finite: true, MaxBody: maxCommand, Handler: a.Commands,
		About: "Run a command of agent --server in this process: {args, environ, stdin, files, folder, width, out_terminal, " +
			"err_terminal}. The response is one JSON object a line: {version}, {out}, {err} and {file} in base64, {} to keep " +
			"the connection open, {exit} at the end. Closing the connection interrupts the command.",
	}}
}

func (a *App) operateEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/operate", Access: api.Admin, Scope: principals.Operate, Body: operate.Body{},
			Response: operate.Answer{}, Deferred: true,
			ContentType: eventStream,
			Stream:      true, Finite: true,
			Idempotent: true, Handler: a.Operate.Handler(),
			About: "Talk to the agent: events start, delta, tool, approval, done, error. With Accept: " +
				"application/json the response is one document. 409 while another admin holds the lane. Under an " +
				"Idempotency-Key a turn runs once: a repeated request gets the document again, or for a stream a 409 that " +
				"names the thread with the answer.",
		}, {
			Method: "GET", Path: "/v1/operate/watch", Access: api.Admin, Scope: principals.Operate, ContentType: eventStream,
			Stream:  true,
			Handler: a.Operate.WatchHandler(),
			About:   "Watch the current admin: events of their traces, live.",
		},
	}
}

const (
	visitorToken  = "X-Visitor-Token"
	threadName    = "X-Thread-Id"
	aboutVisitor  = "The secret of a visitor; new requests one, which the response has."
	aboutNewToken = "The secret of a new visitor."
	aboutThread   = "The visitor's name for the thread."
)

// The headers that identify a visitor and select a thread, in requests and responses.
var (
	visitorHeaders = map[string]string{visitorToken: aboutVisitor}
	messageHeaders = map[string]string{
		visitorToken: aboutVisitor, threadName: aboutThread,
		"X-Thread-Join": "A join token, which admits the visitor to its thread.",
	}
	answerHeaders = map[string]string{threadName: aboutThread, visitorToken: aboutNewToken}
	threadHeaders = map[string]string{threadName: aboutThread}
)

func (a *App) chatEndpoints() []api.Endpoint {
	limit := int64(a.Config.Chat.MaxBytes)
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/chat/completions", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{},
			Stream:   true, Finite: true, OpenAIErrors: true, MaxBody: limit, Handler: a.Chat.CompletionsHandler(),
			Headers: messageHeaders, ResponseHeaders: answerHeaders,
			About: "OpenAI's chat completions, streamed or not. X-Thread-Id, metadata.thread_id or user select the thread; " +
				"the response names it in X-Thread-Id.",
		}, {
			Method: "GET", Path: "/v1/chat/completions/{id}", Access: api.Visitor, Response: json.RawMessage{}, Stream: true,
			Finite: true, OpenAIErrors: true, Deferred: true,
			Query: map[string]string{
				"stream": "true attaches to it", "include_usage": "Whether a stream has the usage, as in stream_options",
				"include_activity": "Whether a stream has the activity, as in stream_options",
			},
			Handler: a.Chat.CompletionHandler(),
			Headers: visitorHeaders, ResponseHeaders: threadHeaders,
			About: "A finished or running completion, for a client that lost its connection; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{}, Stream: true, Finite: true, OpenAIErrors: true, MaxBody: limit,
			Handler: a.Chat.ResponsesHandler(), Headers: messageHeaders, ResponseHeaders: answerHeaders,
			About: "OpenAI's Responses, streamed or not, on the same threads. The thread is conversation, " +
				"else that of previous_response_id, else X-Thread-Id, else new. background: true returns at once.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}", Access: api.Visitor, Response: json.RawMessage{},
			Query:  map[string]string{"stream": "true attaches to it"},
			Stream: true, Finite: true, OpenAIErrors: true, Handler: a.Chat.ResponseHandler(),
			Headers: visitorHeaders, ResponseHeaders: threadHeaders,
			About: "The current state of a response; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses/{id}/cancel", Access: api.Visitor, Body: json.RawMessage{},
			Response: json.RawMessage{}, OpenAIErrors: true, Handler: a.Chat.CancelResponseHandler(),
			Headers: visitorHeaders, ResponseHeaders: threadHeaders,
			About: "Cancel a running response. Its text so far stays in the thread.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}/input_items", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true, Handler: a.Chat.InputItemsHandler(),
			Headers: visitorHeaders, ResponseHeaders: threadHeaders, About: "The input messages of a response.",
		}, {
			Method: "DELETE", Path: "/v1/responses/{id}", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true, Handler: a.Chat.DeleteResponseHandler(),
			About: "Always rejected: a response is a message of its thread.",
		}, {
			Method: "GET", Path: "/v1/conversations/{id}/items", Access: api.Visitor, Response: json.RawMessage{},
			OpenAIErrors: true,
			Handler:      a.Chat.ConversationItemsHandler(), Headers: visitorHeaders,
			About: "OpenAI's list of the items of a conversation. Unfinished answers have the status in_progress.",
			Query: map[string]string{
				"after": "The id of the item that the page follows", "limit": "Page size, at most 100", "order": "desc, or asc",
			},
		},
	}
}

// visitorEndpoints are the chat page, the files of visitors, and the models.
func (a *App) visitorEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/files", Access: api.Visitor, Body: api.FileForm{}, Response: json.RawMessage{},
			OpenAIErrors: true, MaxBody: int64(a.Config.DocumentMaxBytes) + documents.FormOverhead,
			Handler: a.Chat.FilesHandler(), ResponseHeaders: map[string]string{visitorToken: aboutNewToken},
			Headers: map[string]string{
				visitorToken: aboutVisitor, threadName: "The visitor's name for a thread that gets the file if it exists.",
			},
			About: "OpenAI's file upload. A message refers to the file by id. An unused file of a visitor with a token is " +
				"deleted after an hour, that of a key after a day.",
		}, {
			Method: "GET", Path: "/v1/files", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.Chat.FileListHandler(),
			Headers: visitorHeaders, About: "The caller's files.",
			Query: map[string]string{
				"after": "The id that the page follows", "limit": "Page size, at most 10000", "order": "desc, or asc",
				"purpose": "user_data",
			},
		}, {
			Method: "GET", Path: "/v1/files/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.Chat.FileHandler(),
			Headers: visitorHeaders, About: "A file of the caller.",
		}, {
			Method: "GET", Path: "/v1/files/{id}/content", Access: api.Visitor, ContentType: "application/octet-stream",
			OpenAIErrors: true,
			Handler:      a.Chat.FileContentHandler(),
			Headers:      visitorHeaders, About: "The content of a file, always as an attachment.",
		}, {
			Method: "DELETE", Path: "/v1/files/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.Chat.DeleteFileHandler(),
			Headers: visitorHeaders, About: "Delete a file. 409 if a message or flow uses it.",
		}, {
			Method: "GET", Path: "/v1/models", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.Chat.ModelsHandler(), About: "OpenAI's list of models: the agent.",
		}, {
			Method: "GET", Path: "/v1/models/{id}", Access: api.Visitor, Response: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.Chat.ModelHandler(), About: "One of the models.",
		}, {
			Method: "GET", Path: "/chat", Access: api.Public, ContentType: "text/html", Handler: a.Chat.PageHandler(),
			About: "A chat page. It asks for the chat key.",
		}, {
			Method: "GET", Path: "/chat/{file}", Access: api.Public, ContentType: "text/plain", Handler: a.Chat.PageHandler(),
			About: "Assets of the chat page.",
		},
	}
}

func (a *App) webhookEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/webhooks/{endpoint}", Access: api.Public, Body: json.RawMessage{},
			Response: webhook.Response{}, Status: 202,
			AlreadyDone: true, MaxBody: webhooks.MaxBodyBytes, Expect: a.Webhook.Expect, Busy: a.Webhook.Busy,
			Handler: a.Webhook.Receive(), Errors: []int{
				http.StatusBadRequest, http.StatusUnauthorized, http.StatusNotFound, http.StatusInternalServerError,
				http.StatusServiceUnavailable,
			},
			About: "Receive a webhook: verify, store and acknowledge it with its trace. A repeated delivery returns 200 with " +
				"the first trace.",
		}, {
			Method: "GET", Path: "/webhooks/{endpoint}", Access: api.Public, ContentType: "text/plain",
			Handler: a.Webhook.Challenge(), Errors: []int{
				http.StatusBadRequest, http.StatusForbidden, http.StatusNotFound, http.StatusInternalServerError,
				http.StatusServiceUnavailable,
			},
			About: "Answer Meta's challenge: echo hub.challenge to a caller with the endpoint's verify token.",
			Query: map[string]string{
				"hub.mode": "subscribe", "hub.verify_token": "The endpoint's verify token", "hub.challenge": "The text to echo",
			},
		}, {
			Method: "POST", Path: "/v1/webhooks/deliveries/{id}/replay", Access: api.Admin, Scope: principals.Operate,
			Body: webhook.ReplayRequest{}, OptionalBody: true,
			Response: webhook.Replayed{},
			Status:   202, Idempotent: true, Handler: a.Webhook.ReplayDelivery(),
			About: "Process a delivery again, under a new trace.",
		},
	}
}

func (a *App) channelEndpoints() []api.Endpoint {
	return []api.Endpoint{{
		Method: "POST", Path: "/channels/{name}", Access: api.Public, Body: json.RawMessage{}, Response: json.RawMessage{},
		MaxBody: 4 << 20, Handler: a.Channels,
		About: "Messages that a provider sends to a channel. The provider's secret or signature authenticates them.",
	}}
}

func (a *App) mcpEndpoints() []api.Endpoint {
	handler := withProblems(a.MCPServer.Handler(), a.Log)
	var all []api.Endpoint
	for _, method := range []string{"POST", "GET", "DELETE"} {
		all = append(all, api.Endpoint{
			Method: method, Path: "/mcp", Access: api.Admin, Scope: principals.Operate, Stream: true, Finite: method == "POST",
			Handler: handler,
			About:   "Offered skills over the Model Context Protocol (streamable HTTP).",
		})
	}
	return all
}

// withProblems makes problems of the plain texts with which the library of the protocol refuses requests.
func withProblems(next http.Handler, log *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(&problemWriter{ResponseWriter: w, r: r, log: log}, r)
	})
}

type problemWriter struct {
	http.ResponseWriter
	r       *http.Request
	log     *slog.Logger
	refusal int // the status of an error whose text comes next; 0 for none
}

func (w *problemWriter) WriteHeader(status int) {
	if status >= http.StatusBadRequest && strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
		w.refusal = status
		return
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *problemWriter) Write(b []byte) (int, error) {
	if w.refusal == 0 {
		return w.ResponseWriter.Write(b)
	}
	problem.Write(w.ResponseWriter, w.r, problem.New(w.refusal, "%s", bytes.TrimSpace(b)), "", w.log)
	return len(b), nil
}

// Unwrap supports http.ResponseController.
func (w *problemWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// metricsEndpoints serves Prometheus without a token. It exposes counts and names, never content.
func (a *App) metricsEndpoints() []api.Endpoint {
	return []api.Endpoint{{
		Method: "GET", Path: "/metrics", Access: api.Public, ContentType: "text/plain",
		About:   "Counters of this process and gauges of the database, for Prometheus. Works without the database.",
		Handler: a.metrics.Handler(),
	}}
}
