package models_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

func TestASchemaThatAServerRefusesIsSaidInWordsThisOnce(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t,
		modeltest.Refusal(400, "invalid_request_error", "invalid_json_schema",
			"Invalid schema for response_format 'plan': additionalProperties is required", 0),
		modeltest.Text("{}"), modeltest.Text("{}"))
	c := client(t, server)
	req := ask("hi")
	req.Schema = &models.Schema{Name: "plan", Schema: []byte(`{"title":"refused"}`)}
	complete(t, c, req)
	req.Schema = &models.Schema{Name: "plan", Schema: []byte(`{"title":"taken"}`)}
	complete(t, c, req)
	sent := server.Requests()
	if body := sent[1].Body; strings.Contains(body, "response_format") || !strings.Contains(body, `\"refused\"`) {
		t.Errorf("after the refusal it sent %s", body)
	}
	if body := sent[2].Body; !strings.Contains(body, "response_format") || strings.Contains(body, "Form of the") {
		t.Errorf("another schema was sent as %s", body)
	}
}

func TestAModelThatIgnoresSchemasGetsThemInWords(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("{}"), modeltest.Text("{}"))
	req := ask("hi")
	req.Model, req.Schema = "claude-sonnet-5", &models.Schema{Name: "plan", Schema: []byte(`{"title":"mine"}`)}
	complete(t, client(t, server), req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	for _, r := range server.Requests() {
		if strings.Contains(r.Body, `"json_schema"`) || !strings.Contains(r.Body, `\"mine\"`) {
			t.Errorf("sent %s", r.Body)
		}
	}
}

func TestAnyObjectIsAskedForInBothWays(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("{}"), modeltest.Text("{}"))
	req := ask("hi")
	req.Schema = &models.Schema{}
	complete(t, client(t, server), req)
	complete(t, client(t, server, func(c *models.Config) { c.API = models.APIResponses }), req)
	for _, r := range server.Requests() {
		if !strings.Contains(r.Body, `{"type":"json_object"}`) || !strings.Contains(r.Body, "one JSON object") {
			t.Errorf("sent %s", r.Body)
		}
	}
}
