package models_test

import (
	"context"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

// What a server refuses is left out of the same request, and of later ones.
func TestARefusedMemberIsLeftOutFromThenOn(t *testing.T) {
	t.Parallel()
	half := float32(0.5)
	responses := func(c *models.Config) { c.API = models.APIResponses }
	thinking := []models.Message{
		{Role: models.RoleUser, Content: "go"},
		{Role: models.RoleAssistant, Reasoning: "hm", ToolCalls: []models.ToolCall{{ID: "c", Name: "f", Arguments: "{}"}}},
		{Role: models.RoleTool, ToolCallID: "c", Content: "3"},
	}
	for name, test := range map[string]struct {
		refusal string
		member  string // that is refused
		learned string
		request models.Request
		change  func(*models.Config)
	}{
		"usage option": {"Unknown parameter: stream_options", `"stream_options"`, "without stream_options", ask("hi"), nil},
		"include":      {"include is not supported", `"include"`, "without include", ask("hi"), responses},
		"store":        {"Unknown parameter: 'store'", `"store"`, "without store", ask("hi"), responses},
		"temperature": {
			"temperature is not supported", `"temperature"`, "without temperature",
			models.Request{Messages: ask("hi").Messages, Temperature: &half},
			nil,
		},
		"effort": {
			"Unknown parameter: reasoning_effort", `"reasoning_effort"`, "without reasoning effort",
			models.Request{Messages: ask("hi").Messages, Effort: "low"},
			nil,
		},
		"effort responses": {
			"Unknown parameter: reasoning.effort", `"effort"`, "without reasoning effort",
			models.Request{Messages: ask("hi").Messages, Effort: "low"},
			responses,
		},
		"reasoning": {
			"reasoning_content is not supported", `"reasoning_content"`, "without reasoning",
			models.Request{Model: "kimi-k2", Messages: thinking},
			nil,
		},
		"streaming": {"stream is not supported", `"stream":true`, "without streaming", ask("hi"), nil},
	} {
		t.Run(name, func(t *testing.T) {
			server := modeltest.New(t, modeltest.Refusal(400, "x", "", test.refusal, 0), modeltest.Text("a"), modeltest.Text("b"))
			c := client(t, server, func(c *models.Config) {
				if test.change != nil {
					test.change(c)
				}
			})
			complete(t, c, test.request)
			complete(t, c, test.request)
			for n, r := range server.Requests() {
				if there := strings.Contains(r.Body, test.member); there != (n == 0) {
					t.Errorf("request %d has %s: %v in %s", n, test.member, there, r.Body)
				}
			}
			model := test.request.Model
			if model == "" {
				model = c.Model()
			}
			if got := c.Learned(model); !slices.Equal(got, []string{test.learned}) {
				t.Errorf("learned %q, want %q", got, test.learned)
			}
			if got := c.Learned("another"); got != nil {
				t.Errorf("learned %q of another model", got)
			}
		})
	}
}

func TestMembersThatTheirServerRefusesAreNotSentBack(t *testing.T) {
	t.Parallel()
	const answer = `{"choices":[{"message":{"role":"assistant","content":"hi","reasoning_details":[{"type":"x","text":"t"}]},` +
		`"finish_reason":"stop"}]}`
	server := modeltest.New(t, modeltest.Raw(200, "application/json", answer),
		modeltest.Refusal(400, "x", "", "messages[1].reasoning_details: Extra inputs are not permitted", 0), modeltest.Text("ok"))
	c := client(t, server)
	req := ask("hi")
	req.Messages = append(req.Messages, complete(t, c, req).Message, models.Message{Role: models.RoleUser, Content: "and?"})
	complete(t, c, req)
	for n, want := range []bool{false, true, false} {
		if got := strings.Contains(server.Requests()[n].Body, "reasoning_details"); got != want {
			t.Errorf("request %d has reasoning_details: %v", n, got)
		}
	}
}

// asOpenAI reaches the server under the name of OpenAI's, for which the Responses API is tried first.
func asOpenAI(t *testing.T, server *modeltest.Server) func(*models.Config) {
	t.Helper()
	address := strings.TrimSuffix(strings.TrimPrefix(server.URL(), "http://"), "/v1")
	transport := &http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return func(c *models.Config) {
		c.BaseURL, c.Model, c.HTTPClient = "http://eu.api.openai.com/v1", "gpt-5.4", &http.Client{Transport: transport}
	}
}

func TestAMissingRouteIsLearnedOnceAndAMissingModelIsNot(t *testing.T) {
	t.Parallel()
	server := modeltest.NoResponses(t, modeltest.Text("a"), modeltest.Text("b"))
	c := client(t, server, asOpenAI(t, server))
	complete(t, c, ask("hi"))
	complete(t, c, ask("hi"))
	if refused := len(server.Refused()); refused != 1 || c.API("gpt-5.4") != models.APIChat {
		t.Errorf("%d requests were refused, the protocol is %s", refused, c.API("gpt-5.4"))
	}
	server = modeltest.New(t, modeltest.Refusal(404, "x", "model_not_found", "The model `gpt-5.4` does not exist", 0))
	c = client(t, server, asOpenAI(t, server))
	if _, err := c.Complete(t.Context(), ask("hi")); err == nil || c.API("gpt-5.4") != models.APIResponses {
		t.Errorf("err = %v, the protocol is %s", err, c.API("gpt-5.4"))
	}
}
