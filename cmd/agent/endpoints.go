package main

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// eventStream is the content type of server-sent events.
const eventStream = "text/event-stream"

// endpoints are the routes of the surfaces.
func (a *app) endpoints() []api.Endpoint {
	var all []api.Endpoint
	for _, some := range [][]api.Endpoint{a.operateEndpoints(), a.chatEndpoints(), a.webhookEndpoints(), a.mcpEndpoints(), a.metricsEndpoints()} {
		all = append(all, some...)
	}
	return all
}

// engineRoom is the admin's view in a browser, and its routes. It pulls its levers through routes.
func (a *app) engineRoom(routes func() http.Handler) (*engineroom.Room, []api.Endpoint, error) {
	key, err := hkdf.Key(sha256.New, []byte(a.config.AdminToken.Reveal()), nil, "lanekeeper engine room 1", sha256.Size)
	if err != nil {
		return nil, nil, fmt.Errorf("make the Engine Room: %w", err)
	}
	room, err := engineroom.New(engineroom.Options{
		Pool: a.adminPool(), Read: a.read, API: routes, Logger: a.log, Agent: a.config.Name, Key: key, Limits: limits(a.config.Limits),
		Agents: directory(a.config),
	})
	if err != nil {
		return nil, nil, err
	}
	var all []api.Endpoint
	for _, r := range room.Routes() {
		e := api.Endpoint{
			Method: r.Method, Path: r.Path, About: "A page of the Engine Room.", Access: api.Admin, Page: true, Stream: r.Stream,
			Handler: r.Handler,
		}
		if r.Public {
			e.Access = api.Public
		}
		if r.Stream {
			e.ContentType, e.Ends = eventStream, r.Method == "POST"
		}
		all = append(all, e)
	}
	return room, all, nil
}

func (a *app) operateEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/operate", Access: api.Admin, Body: operate.Body{}, ContentType: eventStream, Stream: true, Ends: true,
			Idempotent: true, Handler: a.operate.Handler(),
			About: "Talk with the agent: events start, delta, tool, approval, done, error. With Accept: application/json the answer is " +
				"one document. 409 when another admin is at work.",
		}, {
			Method: "GET", Path: "/v1/operate/watch", Access: api.Admin, ContentType: eventStream, Stream: true,
			Handler: a.operate.WatchHandler(),
			About:   "Watch the admin who is at work: what is done under their traces, as it is done.",
		},
	}
}

func (a *app) chatEndpoints() []api.Endpoint {
	limit := int64(a.config.Chat.MaxBytes)
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/chat/completions", Access: api.Visitor, Body: json.RawMessage{}, Answer: json.RawMessage{},
			Stream: true, Ends: true, OpenAIErrors: true, MaxBody: limit, Handler: a.chat.CompletionsHandler(),
			About: "OpenAI's chat completions, streamed or not. The conversation is the thread that X-Thread-Id, metadata.thread_id or user " +
				"name; the answer names it in X-Thread-Id. X-Visitor-Token is a visitor's own secret (new asks for one), X-Thread-Join a join token.",
		}, {
			Method: "GET", Path: "/v1/chat/completions/{id}", Access: api.Visitor, Answer: json.RawMessage{}, Stream: true, Ends: true, OpenAIErrors: true,
			Handler: a.chat.CompletionHandler(),
			About:   "A completion that was made or is being made, for a client whose connection broke; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses", Access: api.Visitor, Body: json.RawMessage{},
			Answer: json.RawMessage{}, Stream: true, Ends: true, OpenAIErrors: true, MaxBody: limit,
			Handler: a.chat.ResponsesHandler(),
			About: "OpenAI's Responses, streamed or not, over the same conversations. The thread is conversation, " +
				"else that of previous_response_id, else X-Thread-Id, else new. background: true answers at once.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}", Access: api.Visitor, Answer: json.RawMessage{},
			Stream: true, Ends: true, OpenAIErrors: true, Handler: a.chat.ResponseHandler(),
			About: "A response as it stands; ?stream=true attaches to it.",
		}, {
			Method: "POST", Path: "/v1/responses/{id}/cancel", Access: api.Visitor, Body: json.RawMessage{},
			Answer: json.RawMessage{}, OpenAIErrors: true, Handler: a.chat.CancelResponseHandler(),
			About: "End a response that is under way. What it has said stays in its conversation.",
		}, {
			Method: "GET", Path: "/v1/responses/{id}/input_items", Access: api.Visitor, Answer: json.RawMessage{},
			OpenAIErrors: true, Handler: a.chat.InputItemsHandler(), About: "The messages that a response answers.",
		}, {
			Method: "DELETE", Path: "/v1/responses/{id}", Access: api.Visitor, Answer: json.RawMessage{},
			OpenAIErrors: true, Handler: a.chat.DeleteResponseHandler(),
			About: "Always refused: a response is a message of its conversation.",
		}, {
			Method: "POST", Path: "/v1/files", Access: api.Visitor, Body: json.RawMessage{}, Answer: json.RawMessage{},
			OpenAIErrors: true, MaxBody: int64(a.config.DocumentMaxBytes) + documents.FormOverhead, Handler: a.chat.FilesHandler(),
			About: "OpenAI's upload of a file, which a message then names by its id. It goes after a day unless a message uses it.",
		}, {
			Method: "GET", Path: "/v1/files", Access: api.Visitor, Answer: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.FileListHandler(), About: "The caller's files.",
			Query: map[string]string{
				"after": "The id that the page follows", "limit": "How many, at most 10000", "order": "desc, or asc", "purpose": "user_data",
			},
		}, {
			Method: "GET", Path: "/v1/files/{id}", Access: api.Visitor, Answer: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.FileHandler(), About: "A file of the caller.",
		}, {
			Method: "GET", Path: "/v1/files/{id}/content", Access: api.Visitor, ContentType: "application/octet-stream", OpenAIErrors: true,
			Handler: a.chat.FileContentHandler(), About: "The content of a file, always as an attachment.",
		}, {
			Method: "DELETE", Path: "/v1/files/{id}", Access: api.Visitor, Answer: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.DeleteFileHandler(), About: "Delete a file that no message and no flow uses; else 409.",
		}, {
			Method: "GET", Path: "/v1/models", Access: api.Visitor, Answer: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.ModelsHandler(), About: "OpenAI's list of models: the agent.",
		}, {
			Method: "GET", Path: "/v1/models/{id}", Access: api.Visitor, Answer: json.RawMessage{}, OpenAIErrors: true,
			Handler: a.chat.ModelHandler(), About: "One of the models.",
		}, {
			Method: "GET", Path: "/chat", Access: api.Public, ContentType: "text/html", Handler: a.chat.PageHandler(),
			About: "A small page to chat on. It asks for the chat key.",
		}, {
			Method: "GET", Path: "/chat/{file}", Access: api.Public, ContentType: "text/plain", Handler: a.chat.PageHandler(),
			About: "What the chat page is made of.",
		},
	}
}

func (a *app) webhookEndpoints() []api.Endpoint {
	return []api.Endpoint{
		{
			Method: "POST", Path: "/webhooks/{endpoint}", Access: api.Public, Body: json.RawMessage{}, Answer: webhook.Receipt{}, Status: 202,
			Again: true, MaxBody: webhooks.MostMaxBytes, Expect: a.webhook.Expect, Handler: a.webhook.Receive(),
			About: "Receive a webhook: verified, stored and acknowledged with its trace. A delivery that came before is 200 with the first trace.",
		}, {
			Method: "GET", Path: "/v1/webhooks/deliveries", Access: api.Admin, Answer: webhook.Page{}, Handler: a.webhook.Deliveries(),
			About: "Webhooks that came, newest first.",
			Query: map[string]string{
				"endpoint": "Name of the endpoint", "status": "State of the delivery", "limit": "How many, 50 unless said, at most 500",
				"cursor": "next_cursor of the page before",
			},
		}, {
			Method: "GET", Path: "/v1/webhooks/deliveries/{id}", Access: api.Admin, Answer: webhook.Shown{}, Handler: a.webhook.Delivery(),
			About: "One delivery, with its body.",
		}, {
			Method: "POST", Path: "/v1/webhooks/deliveries/{id}/replay", Access: api.Admin, Body: json.RawMessage{}, Answer: webhook.Replayed{},
			Status: 202, Idempotent: true, Handler: a.webhook.ReplayDelivery(),
			About: "Handle a delivery again, under a new trace.",
		},
	}
}

func (a *app) mcpEndpoints() []api.Endpoint {
	handler := a.offered.Handler()
	var all []api.Endpoint
	for _, method := range []string{"POST", "GET", "DELETE"} {
		all = append(all, api.Endpoint{
			Method: method, Path: "/mcp", Access: api.Admin, Stream: true, Ends: method == "POST", Handler: handler,
			About: "Offered skills for other programs, over the Model Context Protocol (streamable HTTP).",
		})
	}
	return all
}
