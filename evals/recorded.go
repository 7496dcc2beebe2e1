package evals

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Recorded is the recorded turn of a trace: the prompt, the model's calls, and their results. It is redacted, because
// prompts and the activity log are.
type Recorded struct {
	Surface          string           `json:"surface"`
	Rules            string           `json:"rules"`             // of the surface, before the agent's instructions
	Now              time.Time        `json:"now"`               // the time in the prompt
	Context          string           `json:"context,omitempty"` // the preface of the prompt, without the time
	Prompt           string           `json:"prompt"`
	History          []models.Message `json:"history,omitempty"`
	Tools            []RecordedTool   `json:"tools,omitempty"`  // tools of the runtime, without the skills
	Skills           []string         `json:"skills,omitempty"` // names of the offered skills
	Pinned           map[string]any   `json:"pinned,omitempty"` // memory, by category/key
	Model            string           `json:"model"`
	Calls            []RecordedCall   `json:"calls"`
	Iterations       int              `json:"iterations"`
	PromptTokens     int              `json:"prompt_tokens"`
	CompletionTokens int              `json:"completion_tokens"`
	CostUSD          float64          `json:"cost_usd"`
}

// RecordedTool is the definition of a tool, in the format of chat completions.
type RecordedTool struct {
	Function struct {
		Name        string          `json:"name"`
		Description string          `json:"description"`
		Parameters  json.RawMessage `json:"parameters"`
	} `json:"function"`
}

// RecordedCall is a call that the model requested, and the result that the model received.
type RecordedCall struct {
	Skill  string          `json:"skill"`
	Args   json.RawMessage `json:"args"`
	Result json.RawMessage `json:"result"`
	Denied bool            `json:"denied,omitempty"` // its approval was denied
}

// unplayable is the reason why a recorded turn cannot be played.
type unplayable string

func (n unplayable) Error() string { return string(n) }

// Reasons why a turn cannot be played.
const (
	noPrompt   unplayable = "its prompt is not recorded"
	noAnswer   unplayable = "it ended without an answer"
	withMedia  unplayable = "it shows a picture or a document"
	withForm   unplayable = "its answer has a form"
	longResult unplayable = "a result was cut"
)

// keepRuntimeTools keeps the tools of the runtime in r.Tools, and moves the names of skills to r.Skills.
func (r *Recorded) keepRuntimeTools(known []skills.Skill) {
	r.Tools = slices.DeleteFunc(r.Tools, func(t RecordedTool) bool {
		name := t.Function.Name
		isSkill := slices.ContainsFunc(known, func(s skills.Skill) bool { return s.Name == name })
		if isSkill {
			r.Skills = append(r.Skills, name)
		}
		return isSkill || isRuntimeTool(name)
	})
}

// Case describes the turn of a trace as a case.
func (r Recorded) Case(traceID string) Case {
	c := Case{
		Name: traceID, From: traceID, Now: r.Now.Format(time.RFC3339), Memory: r.Pinned,
		Messages: []Message{{User: r.Prompt}}, Expect: []Expectation{{Exact: []string{}}},
	}
	for _, call := range r.Calls {
		if !call.Denied {
			c.Expect[0].Exact = append(c.Expect[0].Exact, call.Skill)
		}
	}
	return c
}

// Failure returns the class and message of a failed call. They are empty for another call.
func (c RecordedCall) Failure() (class, message string) {
	var failed map[string]string
	if json.Unmarshal(c.Result, &failed) != nil || len(failed) != 2 {
		return "", ""
	}
	return failed["error"], failed["message"]
}

// Match returns the recorded call of a skill with index n among those with these arguments, or the last one if there
// are fewer.
func (r Recorded) Match(skill string, args json.RawMessage, n int) (recorded RecordedCall, ok bool) {
	for _, call := range r.Calls {
		if call.Skill == skill && equalArgs(skill, args, call.Args) {
			if recorded, ok = call, true; n == 0 {
				break
			}
			n--
		}
	}
	return recorded, ok
}

// Follows returns the first difference between observed and recorded calls, or nil if there is none.
func (r Recorded) Follows(calls []Call) []string {
	requested := slices.DeleteFunc(slices.Clone(calls), func(c Call) bool { return c.Refused || isRuntimeTool(c.Skill) })
	for i, recorded := range r.Calls {
		switch {
		case i >= len(requested):
			return reasonf("%s was not called", recorded.Skill)
		case requested[i].Skill != recorded.Skill:
			return reasonf("call %d is %s; the recorded one is %s", i+1, requested[i].Skill, recorded.Skill)
		case !equalArgs(recorded.Skill, requested[i].Args, recorded.Args):
			return reasonf("call %d of %s has other arguments than the recorded one", i+1, recorded.Skill)
		case (requested[i].Approval == "denied") != recorded.Denied:
			return reasonf("call %d of %s has another decision than the recorded one", i+1, recorded.Skill)
		}
	}
	if len(requested) > len(r.Calls) {
		return reasonf("%s was called besides the recorded calls", requested[len(r.Calls)].Skill)
	}
	return nil
}

// equalArgs reports whether arguments equal the recorded ones, apart from letter case and spacing of strings, and from
// null members. A redacted string equals every string. The value of memory_write is ignored, because the result of the
// call does not depend on it.
func equalArgs(skill string, got, recorded json.RawMessage) bool {
	a, err := decodeExact(got)
	if err != nil {
		return false
	}
	b, err := decodeExact(recorded)
	if err != nil {
		return false
	}
	gotArgs, isObject := a.(map[string]any)
	recordedArgs, bothObjects := b.(map[string]any)
	if skill == "memory_write" && isObject && bothObjects {
		delete(gotArgs, "value")
		delete(recordedArgs, "value")
	}
	return equalValue(a, b)
}

func equalValue(got, recorded any) bool {
	switch r := recorded.(type) {
	case string:
		g, ok := got.(string)
		return ok && (strings.Contains(r, redact.Marker) || normalizeText(g) == normalizeText(r))
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			return false
		}
		for key, value := range r {
			if !equalValue(g[key], value) {
				return false
			}
		}
		for key, value := range g {
			if _, there := r[key]; !there && value != nil {
				return false
			}
		}
		return true
	case []any:
		g, ok := got.([]any)
		return ok && slices.EqualFunc(g, r, equalValue)
	}
	return reflect.DeepEqual(got, recorded)
}

// normalizeText returns a string in lower case, with single spaces.
func normalizeText(s string) string { return strings.Join(strings.Fields(strings.ToLower(s)), " ") }
