package modeltest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Members that providers add to messages and require in the history.
const (
	GeminiSignature  = `{"google": {"thought_signature": "CiQBsig<%>=="}}`
	ReasoningDetails = `[{"type":"reasoning.text","text":"Let me see.","index":0,"signature":"sig"}]`
)

// badRequest refuses a request.
func badRequest(message string) (Reply, bool) {
	return Refusal(http.StatusBadRequest, "invalid_request_error", "", message, 0), true
}

// newServer starts a server with a provider's rule.
func newServer(tb testing.TB, rule func(Request) (Reply, bool), replies []Reply) *Server {
	tb.Helper()
	s := New(tb, replies...)
	s.refuse = rule
	return s
}

// OpenAI refuses tools over chat completions for models from gpt-5.6 on. Over the Responses API it refuses stored
// requests, undeclared strict schemas, and reasoning without its following item.
func OpenAI(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	return newServer(tb, func(r Request) (Reply, bool) {
		if r.Path == "/v1/chat/completions" {
			if len(r.Tools) > 0 && r.ReasoningEffort != "none" && (strings.HasPrefix(r.Model, "gpt-5.6") ||
				strings.HasPrefix(r.Model, "gpt-6")) {
				return badRequest("Function tools with reasoning_effort are not supported for " + r.Model +
					" in /v1/chat/completions. Please use /v1/responses instead.")
			}
			return Reply{}, false
		}
		return stateless(r)
	}, replies)
}

// stateless refuses requests that a client cannot replay.
func stateless(r Request) (Reply, bool) {
	if !strings.Contains(r.Body, `"store":false`) || !strings.Contains(r.Body, "reasoning.encrypted_content") {
		return badRequest("this test wants store false and encrypted reasoning")
	}
	if len(r.Tools) > 0 && !strings.Contains(r.Body, `"strict":false`) {
		return badRequest("Invalid schema for function: strict needs additionalProperties")
	}
	items := r.Items()
	for i, text := range items {
		var item, next inputItem
		if json.Unmarshal([]byte(text), &item) != nil || item.Type != "reasoning" {
			continue
		}
		if i+1 < len(items) {
			if err := json.Unmarshal([]byte(items[i+1]), &next); err != nil {
				return badRequest(err.Error())
			}
		}
		if next.Type != "message" && next.Type != "function_call" {
			return badRequest("Item of type 'reasoning' was provided without its required following item.")
		}
	}
	return Reply{}, false
}

// NoResponses has no route /v1/responses, like older servers.
func NoResponses(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	return newServer(tb, func(r Request) (Reply, bool) {
		return Raw(http.StatusNotFound, "text/plain", "404 page not found"), r.Path == "/v1/responses"
	}, replies)
}

// systemFirst refuses system messages after the first message.
func systemFirst(r Request, status int, message string) (Reply, bool) {
	for i, m := range r.Messages {
		if i > 0 && m.Role == openai.ChatMessageRoleSystem {
			return Refusal(status, "BadRequestError", "", message, 0), true
		}
	}
	return Reply{}, false
}

// QwenVLLM is vLLM with a Qwen template, which accepts a system message only as the first message. The answer has the
// reasoning in the member reasoning.
func QwenVLLM(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := newServer(tb, func(r Request) (Reply, bool) {
		return systemFirst(r, http.StatusBadRequest, "System message must be at the beginning.")
	}, replies)
	s.addMembers = func(_ call, r Reply) Reply { return r.with(`"reasoning": "Let me see."`, "") }
	return s
}

// LlamaCpp is llama.cpp with a Qwen template: it refuses with status 500, and sends thoughts as a block in the text.
func LlamaCpp(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := newServer(tb, func(r Request) (Reply, bool) {
		return systemFirst(r, http.StatusInternalServerError,
			"Jinja Exception: System message must be at the beginning. (template)")
	}, replies)
	s.addMembers = func(_ call, r Reply) Reply {
		if r.custom == nil {
			r.text = "<think>\nLet me see how this goes on.\n</think>\n\n" + r.text
		}
		return r
	}
	return s
}

// Mistral refuses the roles system and user after a tool's result.
func Mistral(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	return newServer(tb, func(r Request) (Reply, bool) {
		for i, m := range r.Messages {
			if i > 0 && r.Messages[i-1].Role == openai.ChatMessageRoleTool &&
				(m.Role == openai.ChatMessageRoleSystem || m.Role == openai.ChatMessageRoleUser) {
				return Raw(http.StatusBadRequest, "application/json", `{"object":"error","message":"Unexpected role '`+
					m.Role+`' after role 'tool'","type":"invalid_request_message_order","code":"3230"}`), true
			}
		}
		return Reply{}, false
	}, replies)
}

// ReasoningWanted refuses calls in the history without reasoning_content, empty or not, like Kimi and DeepSeek.
func ReasoningWanted(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	return newServer(tb, func(r Request) (Reply, bool) {
		var body struct {
			Messages []map[string]json.RawMessage `json:"messages"`
		}
		if err := json.Unmarshal([]byte(r.Body), &body); err != nil {
			return badRequest(err.Error())
		}
		for i, m := range body.Messages {
			if _, there := m["reasoning_content"]; m["tool_calls"] != nil && !there {
				return badRequest("Missing `reasoning_content` field in the assistant message at message index " + strconv.Itoa(i))
			}
		}
		return Reply{}, false
	}, replies)
}

// Gemini signs each first call and refuses a history without the signature, with an error in a list.
func Gemini(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := newServer(tb, func(r Request) (Reply, bool) {
		var body struct {
			Messages []struct {
				Calls []map[string]json.RawMessage `json:"tool_calls"`
			} `json:"messages"`
		}
		if err := json.Unmarshal([]byte(r.Body), &body); err != nil {
			return badRequest(err.Error())
		}
		for i, m := range body.Messages {
			if i > 0 && r.Messages[i].Role == openai.ChatMessageRoleSystem {
				return geminiError("system role only at the beginning")
			}
			if len(m.Calls) > 0 && !strings.Contains(string(m.Calls[0]["extra_content"]), "thought_signature") {
				return geminiError("Function call is missing a thought_signature in functionCall parts.")
			}
		}
		return Reply{}, false
	}, replies)
	s.addMembers = func(_ call, r Reply) Reply { return r.with("", `"extra_content": `+GeminiSignature) }
	return s
}

func geminiError(message string) (Reply, bool) {
	return Raw(http.StatusBadRequest, "application/json", `[{
  "error": {
    "code": 400,
    "message": "`+message+`",
    "status": "INVALID_ARGUMENT"
  }
}]`), true
}

// OpenRouter sends reasoning_details in pieces and requires them whole.
func OpenRouter(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := newServer(tb, func(r Request) (Reply, bool) {
		var body struct {
			Messages []map[string]json.RawMessage `json:"messages"`
		}
		if err := json.Unmarshal([]byte(r.Body), &body); err != nil {
			return badRequest(err.Error())
		}
		for _, m := range body.Messages {
			if m["tool_calls"] == nil {
				continue
			}
			var details []struct{ Text, Signature string }
			if json.Unmarshal(m["reasoning_details"], &details) != nil || len(details) != 1 ||
				details[0].Text != "Let me see." || details[0].Signature != "sig" {
				return badRequest("reasoning_details must be passed back unmodified, got " + string(m["reasoning_details"]))
			}
		}
		return Reply{}, false
	}, replies)
	s.addMembers = func(_ call, r Reply) Reply {
		return r.with(
			`"reasoning": "Let ", "reasoning_details": [{"type":"reasoning.text","text":"Let ","index":0}]`,
			"",
			`"reasoning": "me see.", "reasoning_details": [{"type":"reasoning.text","text":"me see.","index":0,`+
				`"signature":"sig"}]`,
		)
	}
	return s
}

// AzureClassic requires the header api-key and ?api-version, and starts each stream with a chunk without choices.
func AzureClassic(tb testing.TB, replies ...Reply) *Server {
	tb.Helper()
	s := newServer(tb, func(r Request) (Reply, bool) {
		if r.Header.Get("api-key") == "" || r.Header.Get("Authorization") != "" {
			return Refusal(http.StatusUnauthorized, "invalid_request_error", "401", "Access denied", 0), true
		}
		if r.Query.Get("api-version") == "" {
			return Refusal(http.StatusNotFound, "invalid_request_error", "404", "Resource not found", 0), true
		}
		return Reply{}, false
	}, replies)
	s.addMembers = func(_ call, r Reply) Reply {
		r.before = `{"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[]}`
		return r
	}
	return s
}

// WithReasoning adds reasoning in the member reasoning.
func (r Reply) WithReasoning(text string) Reply { return r.with(`"reasoning": `+jsonText(text), "") }

// with adds members to the delta of a message, one chunk per piece, and to its first call.
func (r Reply) with(piece, call string, more ...string) Reply {
	if r.custom == nil {
		r.members, r.callMembers = append([]string{piece}, more...), call
	}
	return r
}

// streamWithMembers streams an answer with a provider's members.
func (r Reply) streamWithMembers(c call, a chatwire.Answer) error {
	c.w.Header().Set("Content-Type", "text/event-stream")
	var out strings.Builder
	chunk := func(delta, finish string) {
		fmt.Fprintf(&out, `data: {"id":%s,"object":"chat.completion.chunk","model":%s,`+
			`"choices":[{"index":0,"delta":{%s},"finish_reason":%s}]}`+"\n\n", jsonText(a.ID), jsonText(a.Model), delta, finish)
	}
	if r.before != "" {
		out.WriteString("data: " + r.before + "\n\n")
	}
	chunk(`"role":"assistant"`, "null")
	for _, piece := range r.members {
		if piece != "" {
			chunk(piece, "null")
		}
	}
	for _, piece := range chatwire.Pieces(a.Text) {
		chunk(`"content":`+jsonText(piece), "null")
	}
	for i, made := range a.Calls {
		members := ""
		if i == 0 && r.callMembers != "" {
			members = "," + r.callMembers
		}
		chunk(fmt.Sprintf(`"tool_calls":[{"index":%d,"id":%s,"type":"function","function":{"name":%s,"arguments":%s}%s}]`,
			i, jsonText(made.ID), jsonText(made.Function.Name), jsonText(made.Function.Arguments), members), "null")
	}
	chunk("", jsonText(string(a.Finish)))
	if a.Usage != nil && c.wantsUsage() {
		usage, err := json.Marshal(a.Usage)
		if err != nil {
			return err
		}
		out.WriteString(`data: {"choices":[],"usage":` + string(usage) + "}\n\n")
	}
	out.WriteString("data: [DONE]\n\n")
	_, err := c.w.Write([]byte(out.String()))
	return err
}
