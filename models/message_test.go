package models_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
)

// recorded is a step as earlier versions stored it: the JSON of go-openai's message.
const recorded = `{"role":"assistant","content":"I look <at> it.","reasoning_content":"Which table?","tool_calls":[
	{"id":"call_1","type":"function","function":{"name":"sizes","arguments":"{\"limit\":3}"}}]}`

func TestAStepOfAnEarlierVersionIsRead(t *testing.T) {
	t.Parallel()
	var m models.Message
	if err := json.Unmarshal([]byte(recorded), &m); err != nil {
		t.Fatal(err)
	}
	want := models.Message{
		Role: models.RoleAssistant, Content: "I look <at> it.", Reasoning: "Which table?",
		ToolCalls: []models.ToolCall{{ID: "call_1", Name: "sizes", Arguments: `{"limit":3}`}},
	}
	if diff := cmp.Diff(want, m); diff != "" {
		t.Errorf("message (-want +got):\n%s", diff)
	}
}

func TestAnEarlierVersionReadsWhatIsRecordedNow(t *testing.T) {
	t.Parallel()
	m := models.Message{
		Role: models.RoleAssistant, Content: "I look.", Reasoning: "Which?",
		Opaque: &models.Opaque{Origin: "x", Items: []string{"{}"}},
		ToolCalls: []models.ToolCall{
			{ID: "call_1", Name: "sizes", Arguments: "{}", Opaque: &models.Opaque{Origin: "x"}},
		},
	}
	stored, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var old openai.ChatCompletionMessage
	if err := json.Unmarshal(stored, &old); err != nil {
		t.Fatalf("%s: %v", stored, err)
	}
	if old.Content != m.Content || old.ReasoningContent != m.Reasoning || len(old.ToolCalls) != 1 ||
		old.ToolCalls[0].Function.Name != "sizes" {
		t.Errorf("read %+v of %s", old, stored)
	}
	var again models.Message
	if err := json.Unmarshal(stored, &again); err != nil || cmp.Diff(m, again) != "" {
		t.Errorf("read back (%v):\n%s", err, cmp.Diff(m, again))
	}
}

func TestPartsOfAMessageAreStoredInOrder(t *testing.T) {
	t.Parallel()
	m := models.Message{Role: models.RoleUser, Content: "Look:", Parts: []models.Part{
		{
			Image: &models.Image{URL: "data:image/png;base64,AAAA", Detail: "low"},
		}, {Text: "and"}, {Image: &models.Image{URL: "https://host/b.png"}},
	}}
	stored, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var again models.Message
	if err := json.Unmarshal(stored, &again); err != nil || cmp.Diff(m, again) != "" {
		t.Errorf("read back (%v):\n%s", err, cmp.Diff(m, again))
	}
	if m.Text() != "Look:\nand" {
		t.Errorf("text = %q", m.Text())
	}
}

func TestNobodySeesWhatIsOpaque(t *testing.T) {
	t.Parallel()
	const secret = "gAAAAABencrypted"
	hidden := &models.Opaque{
		Origin:  "x",
		Members: map[string]string{"extra_content": `"` + secret + `"`},
		Items:   []string{secret},
	}
	m := models.Message{
		Role:      models.RoleAssistant,
		Content:   "yes",
		Opaque:    hidden,
		ToolCalls: []models.ToolCall{{Name: "f", Opaque: hidden}},
	}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("said", "message", m, "opaque", hidden)
	stored, err := json.Marshal(m)
	if err != nil || !strings.Contains(string(stored), secret) {
		t.Fatalf("a step must keep it: %s (%v)", stored, err)
	}
	shown, err := json.Marshal(m.Shown())
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"shown": string(shown), "log": log.String(), "printed": fmt.Sprintf("%v %+v", m, m),
		"a step as it is shown": string(redact.JSON(json.RawMessage(stored), 0)),
	} {
		if strings.Contains(text, secret) {
			t.Errorf("%s: %s", name, text)
		}
	}
	if m.ToolCalls[0].Opaque == nil {
		t.Error("showing a message took its members away")
	}
}
