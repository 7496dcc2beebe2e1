package flows

import (
	"slices"
	"strings"
)

// paramKind is the kind of a parameter's value.
type paramKind string

const (
	textKind     paramKind = "text"             // a text with templates
	textsKind    paramKind = "texts"            // a text or a list of texts, with templates
	valueKind    paramKind = "value"            // any value, with templates in its texts
	objectKind   paramKind = "object"           // a mapping, with templates in its texts
	listKind     paramKind = "list"             // a list, or a template that yields one
	nameKind     paramKind = "name"             // the name of a variable
	namesKind    paramKind = "names"            // names of skills
	skillKind    paramKind = "skill"            // the name of a skill
	flowKind     paramKind = "flow"             // the name of a flow
	agentKind    paramKind = "agent"            // the name of an agent, no template
	durationKind paramKind = "duration"         // 90m, 24h, 7d, or a template
	timeKind     paramKind = "time"             // RFC 3339, or a template
	boolKind     paramKind = "true or false"    // no template
	countKind    paramKind = "number"           // an integer from 1
	exprKind     paramKind = "expression"       // Expr
	exprsKind    paramKind = "expressions"      // a mapping of names to Expr
	setKind      paramKind = "variables"        // a mapping of names to values, with templates in their texts
	actionsKind  paramKind = "actions"          // a list of actions
	casesKind    paramKind = "cases"            // a list of {condition | equals, actions}
	channelKind  paramKind = "channel"          // chat, webhook or log
	failureKind  paramKind = "continue or fail" // the effect of a failed child or a rejected approval
	statusKind   paramKind = "status"           // the final status of an execution
	timeoutKind  paramKind = "timeout"          // a duration within the limits of the wait, no template
	reactionKind paramKind = "fail, continue or retry"
)

// choices returns the values of an enumerated kind.
func (kind paramKind) choices() []string {
	switch kind {
	case channelKind:
		return []string{channelChat, channelWebhook, channelLog}
	case failureKind:
		return []string{onContinue, onFail}
	case statusKind:
		return []string{"completed", "failed", "timeout"}
	case reactionKind:
		return []string{onFail, onContinue, onRetry}
	default:
		return nil
	}
}

const (
	channelChat    = "chat"
	channelWebhook = "webhook"
	channelLog     = "log"

	onContinue = "continue"
	onFail     = "fail"
	onRetry    = "retry"
)

// Parameter is one parameter of an action.
type Parameter struct {
	Name     string `json:"name"`
	Takes    string `json:"takes"` // a description for people
	Required bool   `json:"required"`
	About    string `json:"about"`

	kind paramKind
}

// Action describes a type of action.
type Action struct {
	Type       string      `json:"type"`
	About      string      `json:"about"`
	Waits      string      `json:"waits,omitempty"` // the kind of wait; a waiting action has a timeout
	Parameters []Parameter `json:"parameters"`
	// Exactly one parameter of each OneOf group must be given, and at least one of each AnyOf group.
	OneOf, AnyOf [][]string `json:"-"`
}

func required(name string, kind paramKind, about string) Parameter {
	return Parameter{Name: name, Takes: string(kind), Required: true, About: about, kind: kind}
}

func optional(name string, kind paramKind, about string) Parameter {
	return Parameter{Name: name, Takes: string(kind), About: about, kind: kind}
}

// Actions lists the types of actions in the order of the documentation.
func Actions() []Action { return slices.Concat(messagingActions(), workActions(), controlActions()) }

// messagingActions are the actions between the flow and people.
func messagingActions() []Action {
	channel := optional("channel", channelKind, "replaces the flow's channel")
	target := optional("target", textKind, "the webhook target, for channel webhook")
	message := optional("message", textKind, "replaces the standard text; may contain {{requestId}}")
	wait := optional("wait", boolKind, "false: continue at once; default true")
	return []Action{
		{
			Type: "send_message", About: "Send a message to the thread.",
			Parameters: []Parameter{required("message", textKind, "the text of the message"), channel, target},
		},
		{
			Type: "open_thread", About: "Let a visitor into the thread. Saves a join token as joinToken or under saveAs, or admits a chat key.",
			Parameters: []Parameter{
				optional("key", textKind, "the name of a chat key that may speak in the thread, instead of a token"),
				optional("name", textKind, "the key's name for the thread; default its id"),
				optional("reusable", boolKind, "whether the token admits any number of visitors until it expires; by default it admits one"),
				optional("expires", durationKind, "how long the token is valid, at most 30d, default 24h. It ends with the execution"),
			},
		},
		{Type: "wait_for_response", About: "Wait for the next message in the thread; sets lastResponse.", Waits: "response"},
		{
			Type: "request_document", About: "Ask for documents and wait until all are there; sets requestId, documents and documentUrls.", Waits: "document",
			Parameters: []Parameter{
				required("documents", textsKind, "the names of the documents"), message, wait, channel,
				target,
			},
		},
		{
			Type: "request_signature", About: "Send a document to be signed; sets requestId, signedDocumentUrl and signedAt.",
			Waits: "signature",
			Parameters: []Parameter{
				required("document", textKind, "the document, or its address"), message, wait, channel,
				target,
			},
		},
		{
			Type: "assign_test", About: "Assign a test; sets requestId, testScore and testResult.", Waits: "test",
			Parameters: []Parameter{required("test", textKind, "the test, or its address"), message, wait, channel, target},
		},
	}
}

// workActions are the actions that do external work or wait for it.
func workActions() []Action {
	return []Action{
		{
			Type: "trigger_agent", About: "Start another flow, and wait for its end.", Waits: "agent",
			Parameters: []Parameter{
				optional("flow", flowKind, "the flow's name"), optional("agent", flowKind, "alias of flow"),
				optional("input", objectKind, "the child's input"),
				optional("waitForCompletion", boolKind, "default true"),
				optional("canInheritLock", boolKind, "whether an awaited child may use the parent's lanes; default true"),
				optional("onFailure", failureKind, "the reaction to a child that did not complete; default continue"),
			},
			OneOf: [][]string{{"flow", "agent"}},
		},
		{
			Type: "wait_for_event", About: "Wait for EVENT_COMPLETED with a key; sets eventData.", Waits: "event",
			Parameters: []Parameter{required("key", textKind, "the event's key")},
		},
		{
			Type: "delay", About: "Wait for a time, at most 30 days.",
			Parameters: []Parameter{
				optional("duration", durationKind, "the time to wait"),
				optional("until", timeKind, "the moment to wait for; a past moment ends the wait at once"),
			},
			OneOf: [][]string{{"duration", "until"}},
		},
		{
			Type: "skill", About: "Call a skill. A skill of trust approve waits for an admin first, and sets approvalStatus and approvalReason.",
			Parameters: []Parameter{
				required("name", skillKind, "the skill"), optional("arguments", objectKind, "the arguments of the call"),
				optional("onRejection", failureKind, "the reaction to a rejected or expired approval; default fail"),
			},
		},
		{
			Type: "reason", About: "Ask the model. Saves its answer as answer, or under saveAs.",
			Parameters: []Parameter{
				required("prompt", textKind, "the prompt"), optional("system", textKind, "replaces the standard system message"),
				optional("skills", namesKind, "the skills that the model may call; default none"),
				optional("agent", agentKind,
					"the agent whose instructions, model and limits apply; default the execution's agent"),
			},
		},
		{
			Type: "set", About: "Set variables. Expressions see the values from before the action.",
			Parameters: []Parameter{
				optional("variables", setKind, "the values"), optional("expressions", exprsKind, "expressions for the values"),
			},
			AnyOf: [][]string{{"variables", "expressions"}},
		},
	}
}

// controlActions are the actions that choose other actions.
func controlActions() []Action {
	return []Action{
		{
			Type: "if", About: "Run the actions of one of two branches.",
			Parameters: []Parameter{
				required("condition", exprKind, "the condition"), required("then", actionsKind, "the actions if it is true"),
				optional("else", actionsKind, "the actions if it is false"),
			},
		},
		{
			Type: "switch", About: "Run the actions of the first case that matches: its condition is true, or its equals is the value.",
			Parameters: []Parameter{
				optional("value", valueKind, "the value that equals is compared with"),
				required("cases", casesKind, "the cases, in order"), optional("default", actionsKind,
					"the actions if no case matches"),
			},
		},
		{
			Type: "for_each", About: "Run actions for each item of a list, one after another; index counts from 0.",
			Parameters: []Parameter{
				required("items", listKind, "the list, at most 10,000 items"),
				optional("as", nameKind, "the variable for the item; default item"), required("actions", actionsKind,
					"the actions"),
			},
		},
		{
			Type: "while", About: "Run actions while a condition holds; index counts from 0.",
			Parameters: []Parameter{
				required("condition", exprKind, "checked before each iteration"),
				optional("max", countKind, "the most iterations, default 1,000; the flow fails if the condition still holds after them"),
				required("actions", actionsKind, "the actions"),
			},
		},
		{
			Type: "end", About: "End the execution.",
			Parameters: []Parameter{
				optional("status", statusKind, "default completed"), optional("summary", textKind, "the result in words"),
				optional("result", valueKind, "the result as data"),
			},
		},
		{
			Type: "fail", About: "End the execution as failed.",
			Parameters: []Parameter{required("message", textKind, "the reason")},
		},
	}
}

// timeoutKeys may stand beside the parameters of a waiting action, or among them.
var timeoutKeys = []string{"timeout", "onTimeout", "timeoutActions"}

// commonKeys may stand beside the parameters of every action.
var commonKeys = []string{"id", "actionType", "when", "parameters", "saveAs"}

// specs are the types of actions by name.
var specs = func() map[string]Action {
	all := map[string]Action{}
	for _, a := range Actions() {
		all[a.Type] = a
	}
	return all
}()

func (a Action) parameter(name string) (Parameter, bool) {
	i := slices.IndexFunc(a.Parameters, func(p Parameter) bool { return p.Name == name })
	if i < 0 {
		return Parameter{}, false
	}
	return a.Parameters[i], true
}

func (a Action) names() []string {
	list := make([]string, len(a.Parameters))
	for i, p := range a.Parameters {
		list[i] = p.Name
	}
	return list
}

// saves reports whether an action may have saveAs.
func (a Action) saves() bool {
	return !slices.Contains([]string{"set", "delay", "if", "switch", "for_each", "while", "end", "fail"}, a.Type)
}

func joinNames(words []string) string { return strings.Join(words, ", ") }
