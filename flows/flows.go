// Package flows runs conversations and processes that are written down as data: the table agent_flows, and the
// durable function that carries a definition out.
//
// A [Definition] is a list of actions. Each has an actionType, parameters, and, where they make sense, the same few
// keys beside them:
//
//	id              names the action in the records; otherwise its type and place do (send_message 2)
//	when            an expression; the action is left out when it is false
//	saveAs          the variable that takes the result
//	timeout         of an action that waits; onTimeout: fail (default), continue or retry; timeoutActions are run
//	                before that, at every timeout. The three may also stand among the parameters.
//
// The actions are listed by [Actions], with their parameters. Texts may contain templates, {{name}}, {{a.b}} and
// {{name ?? "a default"}} (or {{name | default: "a default"}}); one that is the whole text keeps the value's type.
// Conditions (when, condition) and the expressions of set are in Expr (expr-lang.org), without calls that could cost
// more than the length of the expression and of the variables. A name that is unknown when it is needed ends the
// action, and with it the execution: class template, with the variable and the action.
//
// Variables accumulate: the definition's own, then what actions save. Reserved are input, executionId, traceId and
// threadId. Waits set lastResponse, documents, documentUrls, signedDocumentUrl, signedAt, testScore, testResult,
// eventData, requestId and timedOut; trigger_agent sets the child's variables, then triggeredExecutionId,
// childExecutionStatus and childExecutionSuccess. A skill that needs an approval sets approvalStatus (approved,
// rejected or expired) and approvalReason. What a wait would have set is null after its timeout.
//
// Promises: every version that was applied is kept, and an execution finishes on the one it began with (its first
// recorded step). What [Validate] accepts is what [JSONSchema] describes, plus what a schema cannot say: expressions
// and templates that parse, timeouts within [executions.Limits], ids that occur once. A flow that is stopped at any
// moment goes on after its last finished action.
//
// Why that is safe: the interpreter is an ordinary durable function. An action is a phase (executions.Phase) whose
// record is what it set, so a replay takes finished actions from their records; what decides between them is computed
// from those records alone. Long loops are executions.Loop, so replay stays bounded.
package flows

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/executions"
)

// Bounds of a definition.
const (
	maxText    = 8192 // bytes of a description, an expression
	maxActions = 500  // nested ones counted
	maxNesting = 10   // of actions in actions
)

// Errors that callers tell apart.
var (
	// ErrNotFound reports a flow, or a version of one, that does not exist.
	ErrNotFound = errors.New("no such flow")
	// ErrRemoved reports a flow that may not begin any more: it was removed from the workspace.
	ErrRemoved = errors.New("the flow was removed")
)

var flowName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

// Definition is what a workspace file declares about a flow. Actions are read by [Validate]; see the package comment.
type Definition struct {
	Name        string         `yaml:"name" json:"name"`
	Description string         `yaml:"description" json:"description,omitempty"`
	Input       map[string]any `yaml:"input" json:"input,omitempty"`         // JSON Schema of type object; anything when empty
	Variables   map[string]any `yaml:"variables" json:"variables,omitempty"` // at the beginning
	Channel     string         `yaml:"channel" json:"channel,omitempty"`     // of its messages: chat, webhook or log; the thread's when empty
	Target      string         `yaml:"target" json:"target,omitempty"`       // of channel webhook: the name of a webhook_target; the thread's when empty
	Actions     []any          `yaml:"actions" json:"actions"`
}

// Validate reports everything that is wrong with d, each problem as "field path: what is wrong", joined as by
// [errors.Join]. It needs neither database nor network.
func Validate(d Definition) error {
	_, err := compile(d)
	return err
}

// Triggers lists the flows that d starts, by the path of each mention. Those of workers outside (external,
// external:NAME) are not among them.
func Triggers(d Definition) map[string]string {
	named := map[string]string{}
	c := &compiler{}
	for _, a := range c.actions(d.Actions, "actions", 0) {
		a.walk(func(a *action) {
			if a.flow != "" && !executions.IsExternal(a.flow) {
				named[a.flowPath] = a.flow
			}
		})
	}
	return named
}

// Skills lists the skills that d calls or lets a model call, by the path of each mention.
func Skills(d Definition) map[string]string {
	named := map[string]string{}
	c := &compiler{}
	for _, a := range c.actions(d.Actions, "actions", 0) {
		a.walk(func(a *action) { maps.Copy(named, a.skills) })
	}
	return named
}

// Agents lists the agents that d names, by the path of each mention.
func Agents(d Definition) map[string]string {
	named := map[string]string{}
	c := &compiler{}
	for _, a := range c.actions(d.Actions, "actions", 0) {
		a.walk(func(a *action) { maps.Copy(named, a.agents) })
	}
	return named
}

// compiled is a definition ready to be run.
type compiled struct {
	name            string
	variables       map[string]any
	channel, target string
	input           *inputSchema // nil takes anything
	actions         []*action
}

func compile(d Definition) (*compiled, error) {
	c := &compiler{ids: map[string]string{}}
	if !flowName.MatchString(d.Name) {
		c.add("name", "%q must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name)
	}
	if d.Name == executions.External {
		c.add("name", "%q is what workers outside run; take another name", d.Name)
	}
	if len(d.Description) > maxText || strings.ContainsRune(d.Description, 0) {
		c.add("description", "must have at most %d bytes and no NUL character", maxText)
	}
	if d.Channel != "" {
		c.choice(d.Channel, channelSort, "channel")
	}
	if d.Target != "" && d.Channel != channelWebhook {
		c.add("target", "only channel webhook has one")
	}
	f := &compiled{name: d.Name, channel: d.Channel, target: d.Target}
	f.variables = c.variables(d.Variables)
	var err error
	if f.input, err = compileInput(d.Input); err != nil {
		c.problems = append(c.problems, err)
	}
	if len(d.Actions) == 0 {
		c.add("actions", "is empty; a flow has at least one action")
	}
	f.actions = c.actions(d.Actions, "actions", 0)
	if c.count > maxActions {
		c.add("actions", "are %d in all; a flow has at most %d", c.count, maxActions)
	}
	if len(c.problems) > 0 {
		return nil, errors.Join(c.problems...)
	}
	return f, nil
}

// variables checks and normalises the variables of the beginning. They are taken as they stand: no templates.
func (c *compiler) variables(given map[string]any) map[string]any {
	for name := range given {
		c.variable("variables."+name, name)
	}
	value, err := normal(given)
	if err != nil {
		c.add("variables", "%s", err)
		return nil
	}
	found, _ := value.(map[string]any)
	return found
}

func orElse(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}

// classed is an error with a stable word for its sort.
type classed struct {
	class   string
	message string
}

func (e *classed) Error() string { return e.message }

// ErrorClass is the sort of error, as the records keep it.
func (e *classed) ErrorClass() string { return e.class }

func failure(class, format string, args ...any) error {
	return &classed{class: class, message: fmt.Sprintf(format, args...)}
}

// inputSchema is what a flow takes.
type inputSchema struct {
	schema *jsonschema.Schema
}

// noLoader keeps a schema from reading files or the network.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("%s is outside this schema, and only references inside it are followed", url)
}

// compileInput reads a flow's schema; nil when it has none.
func compileInput(schema map[string]any) (*inputSchema, error) {
	if len(schema) == 0 {
		return nil, nil
	}
	if schema["type"] != "object" {
		return nil, fmt.Errorf(`input.type: must be "object": an input has names`)
	}
	raw, err := json.Marshal(schema)
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	c.AssertFormat()
	const url = "flow:input"
	if err := c.AddResource(url, doc); err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	compiled, err := c.Compile(url)
	if err != nil {
		return nil, fmt.Errorf("input: %s", oneLine(err))
	}
	return &inputSchema{compiled}, nil
}

// InvalidInput reports an input that a flow does not take. Over HTTP it is 422.
type InvalidInput struct {
	Flow   string
	Reason string
}

func (e *InvalidInput) Error() string {
	return fmt.Sprintf("flow %s does not take this input: %s", e.Flow, e.Reason)
}

// ErrorClass is the sort of error, as the records keep it.
func (e *InvalidInput) ErrorClass() string { return "invalid_input" }

// accept checks an input and completes it with the defaults of the properties that are absent. Nothing at all is the
// empty object.
func (s *inputSchema) accept(flow string, raw json.RawMessage) (any, error) {
	if trimmed := bytes.TrimSpace(raw); len(trimmed) == 0 || string(trimmed) == "null" {
		raw = json.RawMessage(`{}`)
	}
	if s == nil {
		return parsed(raw)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, &InvalidInput{flow, "it is not JSON: " + err.Error()}
	}
	if given, ok := doc.(map[string]any); ok {
		full := make(map[string]any, len(given))
		for name, p := range s.schema.Properties {
			if p.Default != nil {
				full[name] = *p.Default
			}
		}
		maps.Copy(full, given)
		doc = full
	}
	if err := s.schema.Validate(doc); err != nil {
		return nil, &InvalidInput{flow, oneLine(err)}
	}
	return normal(doc)
}

// oneLine is the library's error without its headline.
func oneLine(err error) string {
	lines := strings.Split(err.Error(), "\n")
	if len(lines) > 1 {
		lines = lines[1:]
	}
	for i, line := range lines {
		lines[i] = strings.TrimPrefix(strings.TrimSpace(line), "- ")
	}
	return strings.Join(lines, "; ")
}
