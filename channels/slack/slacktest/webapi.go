package slacktest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"
)

// Limits of Slack.
const (
	maxText    = 40_000
	maxBlocks  = 50
	maxSection = 3000
	maxAll     = 13_200
)

// call serves a method of the Web API.
func (s *Server) call(w http.ResponseWriter, r *http.Request) {
	method, args := r.PathValue("method"), arguments(r)
	s.mu.Lock()
	s.calls[method]++
	var fault Fault
	if s.fault != nil {
		fault = s.fault(method, s.calls[method])
	}
	s.mu.Unlock()
	switch {
	case fault.Cut:
		panic(http.ErrAbortHandler)
	case fault.RetryAfter > 0:
		w.Header().Set("Retry-After", fmt.Sprint(fault.RetryAfter))
		w.WriteHeader(http.StatusTooManyRequests)
		_, _ = io.WriteString(w, `{"ok":false,"error":"ratelimited"}`)
		return
	case fault.Status > 0:
		w.WriteHeader(fault.Status)
		return
	case fault.Error != "":
		answer(w, nil, fault.Error)
		return
	}
	got, why := s.do(method, authorization(r, args), args)
	if fault.LoseAnswer {
		panic(http.ErrAbortHandler)
	}
	answer(w, got, why)
}

func answer(w http.ResponseWriter, got map[string]any, why string) {
	if got == nil {
		got = map[string]any{}
	}
	got["ok"] = why == ""
	if why != "" {
		got["error"] = why
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_ = json.NewEncoder(w).Encode(got)
}

// arguments reads a form or a JSON body. A value that is no text stays JSON.
func arguments(r *http.Request) url.Values {
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/json") {
		_ = r.ParseMultipartForm(1 << 20)
		return r.Form
	}
	var body map[string]json.RawMessage
	_ = json.NewDecoder(r.Body).Decode(&body)
	values := url.Values{}
	for name, raw := range body {
		var text string
		if json.Unmarshal(raw, &text) != nil {
			text = string(raw)
		}
		values.Set(name, text)
	}
	return values
}

func authorization(r *http.Request, args url.Values) string {
	if token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		return token
	}
	return args.Get("token")
}

func (s *Server) do(method, token string, args url.Values) (map[string]any, string) {
	want := Token
	if method == "apps.connections.open" {
		want = AppToken
	}
	if token != want {
		return nil, "invalid_auth"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch method {
	case "auth.test":
		return map[string]any{
			"url": s.URL, "team": "Fake", "user": "bot", "team_id": Team, "user_id": BotUser, "bot_id": BotID,
		}, ""
	case "apps.connections.open":
		return map[string]any{"url": "ws" + strings.TrimPrefix(s.URL, "http") + "/socket"}, ""
	case "chat.postMessage", "chat.postEphemeral":
		return s.post1(method, args)
	case "chat.update":
		return s.update(args)
	case "conversations.replies", "conversations.history":
		return s.history(method, args)
	case "assistant.threads.setStatus":
		return nil, ""
	case "files.info":
		for _, m := range s.messages {
			for _, f := range m.Files {
				if f.ID == args.Get("file") {
					return map[string]any{"file": f}, ""
				}
			}
		}
		return nil, "file_not_found"
	}
	return nil, "unknown_method"
}

func (s *Server) post1(method string, args url.Values) (map[string]any, string) {
	m := Message{
		Channel: args.Get("channel"), TS: s.ts(), ThreadTS: args.Get("thread_ts"), User: BotUser, BotID: BotID,
		Type: "message", Text: args.Get("text"), Blocks: rawJSON(args.Get("blocks")), Metadata: rawJSON(args.Get("metadata")),
	}
	if user, is := strings.CutPrefix(m.Channel, "U"); is { // a message to a user arrives in their direct messages
		m.Channel = "D" + user
	}
	if method == "chat.postEphemeral" {
		m.Only = args.Get("user")
	}
	if why := refuses(m); why != "" {
		return nil, why
	}
	s.messages = append(s.messages, m)
	return map[string]any{"channel": m.Channel, "ts": m.TS, "message_ts": m.TS, "message": m}, ""
}

func rawJSON(text string) json.RawMessage {
	if text == "" {
		return nil
	}
	return json.RawMessage(text)
}

// refuses returns Slack's error for a message.
func refuses(m Message) string {
	var blocks []struct {
		Text struct {
			Text string `json:"text"`
		} `json:"text"`
	}
	switch {
	case m.Channel == "" || strings.HasPrefix(m.Channel, "X"):
		return "channel_not_found"
	case m.Text == "" && len(m.Blocks) == 0:
		return "no_text"
	case utf8.RuneCountInString(m.Text) > maxText:
		return "msg_too_long"
	case len(m.Blocks) > 0 && json.Unmarshal(m.Blocks, &blocks) != nil, len(blocks) > maxBlocks:
		return "invalid_blocks"
	}
	all := 0
	for _, b := range blocks {
		n := utf8.RuneCountInString(b.Text.Text)
		if n > maxSection {
			return "invalid_blocks"
		}
		all += n
	}
	if all > maxAll {
		return "msg_blocks_too_long"
	}
	return ""
}

func (s *Server) update(args url.Values) (map[string]any, string) {
	at := slices.IndexFunc(s.messages, func(m Message) bool {
		return m.Channel == args.Get("channel") && m.TS == args.Get("ts")
	})
	if at < 0 {
		return nil, "message_not_found"
	}
	m := s.messages[at]
	if m.BotID != BotID || m.Only != "" {
		return nil, "cant_update_message"
	}
	m.Text, m.Blocks = args.Get("text"), rawJSON(args.Get("blocks"))
	if metadata := rawJSON(args.Get("metadata")); metadata != nil {
		m.Metadata = metadata
	}
	if why := refuses(m); why != "" {
		return nil, why
	}
	m.Edits++
	s.messages[at] = m
	return map[string]any{"channel": m.Channel, "ts": m.TS, "text": m.Text}, ""
}

func (s *Server) history(method string, args url.Values) (map[string]any, string) {
	found := []Message{}
	for _, m := range s.messages {
		within := method == "conversations.history" && m.ThreadTS == "" ||
			method == "conversations.replies" && (m.TS == args.Get("ts") || m.ThreadTS == args.Get("ts"))
		if m.Channel != args.Get("channel") || m.Only != "" || !within || m.TS < args.Get("oldest") {
			continue
		}
		if all := args.Get("include_all_metadata"); all != "true" && all != "1" {
			m.Metadata = nil
		}
		found = append(found, m)
	}
	if method == "conversations.history" {
		slices.Reverse(found)
	}
	return map[string]any{"messages": found, "has_more": false}, ""
}

func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Header.Get("Authorization") != "Bearer "+Token {
		w.WriteHeader(http.StatusForbidden)
		return
	}
	for _, m := range s.messages {
		for _, f := range m.Files {
			if f.ID == r.PathValue("id") {
				_, _ = io.WriteString(w, f.Content)
				return
			}
		}
	}
	w.WriteHeader(http.StatusNotFound)
}
