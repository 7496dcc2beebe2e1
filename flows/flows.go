// Package flows runs conversations and processes that are stored as data: the table agent_flows, and the durable
// function that interprets a definition.
//
// A [Definition] is a list of actions. Each has an actionType, parameters, and optional keys beside them:
//
//	id              names the action's record; the default is its type and position (send_message 2)
//	when            an expression; the action is skipped if it is false
//	saveAs          the variable for the result
//	timeout         of a waiting action; onTimeout: fail (default), continue or retry; timeoutActions run
//	                first, at every timeout. The three may also stand among the parameters.
//
// [Actions] lists the action types with their parameters. Texts may contain templates: {{name}}, {{a.b}} and
// {{name ?? "a default"}} (or {{name | default: "a default"}}). A template that is the whole text keeps the value's
// type. Conditions (when, condition) and the expressions of set are written in Expr (expr-lang.org), restricted to
// calls with bounded cost. An unknown name fails the action and the execution, with class template, the variable
// and the action.
//
// Variables accumulate: first the definition's, then the results of actions. Reserved are input, executionId, traceId
// and threadId. Waits set lastResponse, documents, documentUrls, signedDocumentUrl, signedAt, testScore, testResult,
// eventData, requestId and timedOut. trigger_agent sets the child's variables, then triggeredExecutionId,
// childExecutionStatus and childExecutionSuccess. A skill with an approval sets approvalStatus (approved, rejected or
// expired) and approvalReason. After a timeout, the variables of a wait are null.
//
// Guarantees: every applied version is stored, and an execution finishes on the version of its first recorded step.
// [Validate] applies the rules of [JSONSchema], with further checks: expressions and templates parse, timeouts are
// within [executions.Limits], ids are unique. A flow that is stopped continues after its last finished action.
//
// The interpreter is an ordinary durable function. An action is a phase (executions.Phase), and its record holds the
// variables that it set. A replay reads finished actions from their records, and control flow depends on those
// records alone. Long loops are executions.Loop, so replay stays bounded.
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
	"github.com/lanekeeper/lanekeeper/internal/schema"
)

// Bounds of a definition.
const (
	maxText    = 8192 // bytes of a description, an expression
	maxActions = 500  // nested ones included
	maxNesting = 10   // levels of nested actions
)

// Errors that callers distinguish.
var (
	// ErrNotFound reports an unknown flow or version.
	ErrNotFound = errors.New("no such flow")
	// ErrRemoved reports a flow that was removed from the workspace and cannot start.
	ErrRemoved = errors.New("the flow was removed")
	// ErrNoThread reports the start, without a thread, of a flow that needs one.
	ErrNoThread = errors.New("the flow needs a thread, and none is named")
)

var flowNameRegexp = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

// Definition declares a flow in a workspace file. [Validate] reads the actions; see the package comment.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"`
	// JSON Schema of type object; empty accepts any input
	Input map[string]any `yaml:"input" json:"input,omitempty"`
	// templates over the input; their values become labels, by which executions are found
	Labels    map[string]string `yaml:"labels" json:"labels,omitempty"`
	Variables map[string]any    `yaml:"variables" json:"variables,omitempty"` // initial values
	// channel of the flow's messages: chat, webhook or log; empty means the thread's channel
	Channel string `yaml:"channel" json:"channel,omitempty"`
	// name of a webhook_target, for channel webhook; empty means the thread's target
	Target  string `yaml:"target" json:"target,omitempty"`
	Actions []any  `yaml:"actions" json:"actions"`
}

// ScanBytes reads a stored definition, with whole numbers as int, where encoding/json would make them float64.
func (d *Definition) ScanBytes(raw []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	err := decoder.Decode(d)
	for _, tree := range []any{d.Input, d.Variables, d.Actions} {
		normalizeTree(tree) // in place
	}
	return err
}

// Validate returns all problems of d, each as "field path: problem", joined as by [errors.Join]. It uses neither
// database nor network.
func Validate(d Definition) error {
	_, err := compile(d)
	return err
}

// Triggers lists the flows that d starts, by the path of each reference. It omits those of external workers
// (external, external:NAME).
func Triggers(d Definition) map[string]string {
	return references(d, func(a *action) map[string]string {
		if a.flow == "" || executions.CanClaim(a.flow) {
			return nil
		}
		return map[string]string{a.flowPath: a.flow}
	})
}

// Skills lists the skills that d calls or offers to a model, by the path of each reference.
func Skills(d Definition) map[string]string {
	return references(d, func(a *action) map[string]string { return a.skills })
}

// Agents lists the agents that d names, by the path of each reference.
func Agents(d Definition) map[string]string {
	return references(d, func(a *action) map[string]string { return a.agents })
}

// Talks reports whether each run of d needs a thread: before its first branch it sends a message, opens the thread or
// waits for a response. A flow that talks in a branch only may start without one.
func Talks(d Definition) bool {
	for _, a := range (&compiler{}).actions(d.Actions, "actions", 0) {
		if a.when == nil && a.needsThread() {
			return true
		}
		if a.branches() {
			break
		}
	}
	return false
}

// references collects the references of all actions, including nested ones.
func references(d Definition, referencesOf func(a *action) map[string]string) map[string]string {
	byPath := map[string]string{}
	for _, a := range (&compiler{}).actions(d.Actions, "actions", 0) {
		a.walk(func(a *action) { maps.Copy(byPath, referencesOf(a)) })
	}
	return byPath
}

// compiledFlow is a definition that is ready to run.
type compiledFlow struct {
	name            string
	variables       map[string]any
	labels          map[string]any // with parsed templates
	channel, target string
	input           *inputSchema // nil accepts any input
	actions         []*action
}

// compile checks a definition as far as it can without the database, and parses its expressions and templates. Its
// error joins all problems, each beginning with the path of its key.
func compile(d Definition) (*compiledFlow, error) {
	c := &compiler{ids: map[string]string{}}
	if !flowNameRegexp.MatchString(d.Name) {
		c.add("name", "%q must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name)
	}
	if d.Name == executions.External {
		c.add("name", "%q is reserved for external workers; choose another name", d.Name)
	}
	if len(d.Description) > maxText || strings.ContainsRune(d.Description, 0) {
		c.add("description", "must have at most %d bytes and no NUL character", maxText)
	}
	if d.Channel != "" {
		c.oneOf(d.Channel, channelKind, "channel")
	}
	if d.Target != "" && d.Channel != channelWebhook {
		c.add("target", "only channel webhook has a target")
	}
	f := &compiledFlow{name: d.Name, channel: d.Channel, target: d.Target}
	f.variables, f.labels = c.variables(d.Variables), c.labels(d.Labels)
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

// labels validates the names and parses the templates.
func (c *compiler) labels(templates map[string]string) map[string]any {
	if len(templates) > executions.MaxLabels {
		c.add("labels", "are %d; an execution has at most %d", len(templates), executions.MaxLabels)
	}
	parsed := map[string]any{}
	for name, text := range templates {
		if err := executions.CheckLabelName(name); err != nil {
			c.add("labels."+name, "%s", err)
		}
		parsed[name] = parseTree(text, "labels."+name, func(path string, err error) { c.add(path, "%s", err) })
	}
	return parsed
}

// variables validates and normalizes the initial variables. It parses no templates.
func (c *compiler) variables(given map[string]any) map[string]any {
	for name := range given {
		c.variable("variables."+name, name)
	}
	value, err := normalize(given)
	if err != nil {
		c.add("variables", "%s", err)
		return nil
	}
	variables, _ := value.(map[string]any)
	return variables
}

// classError is an error with a stable class.
type classError struct {
	class   string
	message string
}

func (e *classError) Error() string { return e.message }

// ErrorClass returns the class that records store.
func (e *classError) ErrorClass() string { return e.class }

func classErrorf(class, format string, args ...any) error {
	return &classError{class: class, message: fmt.Sprintf(format, args...)}
}

// inputSchema validates a flow's input.
type inputSchema struct {
	schema *jsonschema.Schema
}

// compileInput compiles the schema of a flow's input. It returns nil for an empty schema.
func compileInput(given map[string]any) (*inputSchema, error) {
	if len(given) == 0 {
		return nil, nil
	}
	if given["type"] != "object" {
		return nil, fmt.Errorf(`input.type: must be "object"`)
	}
	raw, err := json.Marshal(given)
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	compiled, err := schema.Compile(raw, (*jsonschema.Compiler).AssertFormat)
	if err != nil {
		return nil, fmt.Errorf("input: %s", schema.OneLine(err))
	}
	if err := schema.CheckDefaults(compiled); err != nil {
		return nil, fmt.Errorf("input.%w", err)
	}
	return &inputSchema{compiled}, nil
}

// InvalidInput reports input that violates a flow's schema. Over HTTP it is 422.
type InvalidInput struct {
	Flow   string
	Reason string
}

func (e *InvalidInput) Error() string {
	return fmt.Sprintf("flow %s does not take this input: %s", e.Flow, e.Reason)
}

// ErrorClass returns the class that records store.
func (e *InvalidInput) ErrorClass() string { return "invalid_input" }

// validate validates input and adds the defaults of absent properties. Empty input is the empty object.
func (s *inputSchema) validate(flow string, raw json.RawMessage) (any, error) {
	if trimmed := bytes.TrimSpace(raw); len(trimmed) == 0 || string(trimmed) == "null" {
		raw = json.RawMessage(`{}`)
	}
	if s == nil {
		return decodeNormal(raw)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, &InvalidInput{flow, "it is not JSON: " + err.Error()}
	}
	if object, ok := doc.(map[string]any); ok {
		doc = schema.WithDefaults(s.schema, object)
	}
	if err := s.schema.Validate(doc); err != nil {
		return nil, &InvalidInput{flow, schema.OneLine(err)}
	}
	return normalize(doc)
}
