package webhooks

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// FormatSlack sends an event as a message of Slack, {"text": …}, with a link to its page.
const FormatSlack = "slack"

// maxSlackText bounds the text before escaping, in bytes. Slack cuts a text at 40,000 characters.
const maxSlackText = 3000

// slackEscape escapes text of the event, so that the text cannot mention a user or hide a link.
var slackEscape = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;", "\u202e", "")

// slackEvent has the fields of events that the messages use.
type slackEvent struct {
	Type string `json:"type"`
	Data struct {
		ID          string  `json:"id"`
		Name        string  `json:"name"`
		Flow        string  `json:"flow"`
		SkillName   string  `json:"skill_name"`
		Endpoint    string  `json:"endpoint"`
		TraceID     string  `json:"trace_id"`
		ExecutionID string  `json:"execution_id"`
		State       string  `json:"state"`
		Previous    string  `json:"previous"`
		Scope       string  `json:"scope"`
		Unit        string  `json:"unit"`
		Percent     int     `json:"percent"`
		Spent       float64 `json:"spent"`
		Limit       float64 `json:"limit"`
		Error       string  `json:"error_message"`
		Reason      string  `json:"disabled_reason"`
		Why         []struct {
			Text string `json:"text"`
		} `json:"why"`
	} `json:"data"`
}

// slackBody returns an event in the format of Slack's incoming webhooks. base is the agent's public URL; empty for no
// link.
func slackBody(payload, base string) (string, error) {
	var event slackEvent
	if err := json.Unmarshal([]byte(payload), &event); err != nil {
		return "", fmt.Errorf("read the event: %w", err)
	}
	text, path := event.describe()
	text = slackEscape.Replace(redact.Text(text, maxSlackText))
	if base != "" {
		text += " <" + slackEscape.Replace(strings.ReplaceAll(strings.TrimSuffix(base, "/")+path, "|", "%7C")) + "|Open>"
	}
	body, err := json.Marshal(map[string]string{"text": text})
	return string(body), err
}

// describe returns a sentence about the event, and the page with details.
func (e slackEvent) describe() (text, path string) {
	d := e.Data
	switch e.Type {
	case "verdict.changed":
		why := make([]string, len(d.Why))
		for i, w := range d.Why {
			why[i] = w.Text
		}
		text, path = "The agent is "+d.State+", was "+d.Previous, "/"
		if d.Previous == "" {
			text = "The agent is " + d.State
		}
		if len(why) > 0 {
			text += ": " + strings.Join(why, ", ")
		}
	case "budget.reached":
		amount := func(f float64) string {
			if d.Unit == "usd" {
				return human.Money(f)
			}
			return human.Counted(int64(f), "token")
		}
		text = "Today's budget (" + d.Scope + ") is at " + strconv.Itoa(d.Percent) + " %: " + amount(d.Spent) + " of " +
			amount(d.Limit)
		path = "/spend?days=1"
	case "approval.requested":
		text, path = "Approval requested: "+d.SkillName, "/approvals/"+d.ID
	case "skill.disabled":
		text, path = "Skill "+d.Name+" is disabled: "+d.Reason, "/skills/"+d.Name
	case "webhook.dead":
		text, path = "A delivery to "+d.Endpoint+" was given up: "+d.Error, "/deliveries/"+d.ID
	case "objective.completed":
		text, path = "Objective "+d.Name+" is completed", "/objectives/"+d.Name
	default:
		text, path = strings.Replace(e.Type, ".", " ", 1)+": "+d.Flow, "/executions/"+d.ID
		if d.Error != "" {
			text += ": " + d.Error
		}
	}
	return text, path
}
