package evals

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// ErrNoCase reports a trace that yields no case.
var ErrNoCase = errors.New("the trace has no message to a model")

// FromTrace creates a case from a trace: the messages of its first model call, and a stub for each call that this
// execution made and that ended. The rows of a trace are redacted. A stub omits a redacted argument, so it matches any
// value. The case approves a skill with an approved call. Without a message of a user, FromTrace returns [ErrNoCase].
func FromTrace(t activity.Trace, name string) (Case, error) {
	c := Case{Name: name, From: t.TraceID, Skills: map[string][]Stub{}, Approvals: map[string]string{}}
	if c.Name == "" {
		c.Name = "from " + t.TraceID
	}
	order, iterations, asked := []string{}, 0, map[string]bool{}
	first := slices.IndexFunc(t.Activities, func(row activity.Row) bool { return row.Kind == activity.KindModel })
	for _, row := range t.Activities {
		if first >= 0 && executionID(row) != executionID(t.Activities[first]) {
			continue // the row belongs to a delegated task, or to a flow that a skill started
		}
		if row.Kind == activity.KindModel && row.Purpose != PurposeJudge {
			iterations++
		}
		switch {
		case row.Kind == activity.KindModel && c.Messages == nil:
			c.Messages, c.Now = parseMessages(row.Input), row.CreatedAt.UTC().Format(time.RFC3339)
		case isCall(row) && row.Status == activity.PendingApproval:
			asked[row.SkillName] = true
		case isCall(row) && (row.Status == activity.Success || row.Status == activity.Error):
			if isRefusal(row.ErrorClass) {
				continue
			}
			if asked[row.SkillName] {
				c.Approvals[row.SkillName] = Approve
			}
			order = append(order, row.SkillName)
			c.Skills[row.SkillName] = append(c.Skills[row.SkillName], newStub(row))
		}
	}
	if len(c.Messages) == 0 {
		return Case{}, ErrNoCase
	}
	c.Expect = []Expectation{{InOrder: order}}
	if len(order) == 0 {
		c.Expect = []Expectation{{Within: &Within{Iterations: iterations}}}
	}
	return c, nil
}

// YAML encodes a case as an entry of the cases of a suite.
func (c Case) YAML() (string, error) {
	text, err := exactjson.YAML([]Case{c})
	if err != nil {
		return "", fmt.Errorf("show the case: %w", err)
	}
	var out strings.Builder
	for line := range strings.Lines(string(text)) {
		out.WriteString("  " + line)
	}
	return out.String(), nil
}

func executionID(row activity.Row) string {
	if row.ExecutionID == nil {
		return ""
	}
	return *row.ExecutionID
}

// isCall reports whether a row is a call of a skill, or a call of the tool delegate, whose row is a phase.
func isCall(row activity.Row) bool {
	return row.Kind == activity.KindCall || row.Kind == activity.KindPhase && row.SkillName == "delegate"
}

// isRefusal reports whether an error class means that the call was not made.
func isRefusal(class string) bool {
	return slices.Contains([]string{"invalid_params", "unknown_tool", "denied", "stall", "disabled"}, class)
}

// prefaceEnd ends the data of the runtime before a message.
const prefaceEnd = "[End of context]\n\n"

// parseMessages reads the messages that a model call added, from the first message of a user on.
func parseMessages(input json.RawMessage) (list []Message) {
	var in struct {
		Messages []struct{ Role, Content string } `json:"messages"`
	}
	if json.Unmarshal(input, &in) != nil {
		return nil
	}
	for _, m := range in.Messages {
		text := m.Content
		if _, after, ok := strings.Cut(text, prefaceEnd); ok {
			text = after
		}
		switch {
		case text == "":
		case m.Role == "user":
			list = append(list, Message{User: text})
		case m.Role == "assistant" && len(list) > 0:
			list = append(list, Message{Assistant: text})
		}
	}
	for len(list) > 0 && list[len(list)-1].User == "" {
		list = list[:len(list)-1]
	}
	return list
}

// newStub creates the stub of a call.
func newStub(row activity.Row) Stub {
	var s Stub
	if input, err := decodeExact(row.Input); err == nil {
		s.When, _ = input.(map[string]any)
	}
	delegated := row.Kind == activity.KindPhase // the input of delegate has even the parameters that the model omitted
	for key, value := range s.When {
		text, err := json.Marshal(value)
		if err != nil || strings.Contains(string(text), redact.Marker) ||
			delegated && slices.Contains([]string{"null", "0", `""`}, string(text)) {
			delete(s.When, key)
		}
	}
	if row.Status == activity.Error {
		s.Error, s.Class = "it failed", row.ErrorClass
		if row.ErrorMessage != nil && *row.ErrorMessage != "" {
			s.Error = *row.ErrorMessage
		}
		return s
	}
	var err error
	if s.Returns, err = decodeExact(row.Output); err != nil || s.Returns == nil {
		s.Returns = map[string]any{}
	}
	if output, ok := s.Returns.(map[string]any); ok && delegated {
		s.Returns = map[string]any{"answer": output["answer"]}
	}
	return s
}

// CheckAppended returns an error unless the text after is the text before with one more case, of the given name, in its
// last suite.
func CheckAppended(before, after []byte, name string) error {
	old, err := lastSuite(before)
	if err != nil {
		return err
	}
	now, err := lastSuite(after)
	switch {
	case err != nil:
		return err
	case len(now.Cases) != len(old.Cases)+1 || now.Cases[len(now.Cases)-1].Name != name:
		return errors.New("the case would not be the last one of its suite")
	}
	for _, c := range old.Cases {
		if c.Name == name {
			return fmt.Errorf("the suite has a case %q already", name)
		}
	}
	return nil
}

// suiteNames has the names of a document's cases.
type suiteNames struct {
	Kind  string
	Cases []struct{ Name string }
}

// lastSuite reads the last document of a file, which must be a suite.
func lastSuite(text []byte) (suite suiteNames, err error) {
	documents := yaml.NewDecoder(bytes.NewReader(text))
	for {
		next := suite
		next.Kind, next.Cases = "", nil
		if err := documents.Decode(&next); err != nil {
			if errors.Is(err, io.EOF) {
				break
			}
			return suite, err
		}
		suite = next
	}
	if suite.Kind != "eval" {
		return suite, errors.New("its last document is not of kind: eval")
	}
	return suite, nil
}
