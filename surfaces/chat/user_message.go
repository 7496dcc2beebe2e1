package chat

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// UserMessage is a visitor's message with its sender, thread and agent.
type UserMessage struct {
	Owner         string // the chat key
	Secret        string // the visitor token; "": the key speaks for its users
	Name          string // the visitor's name for the thread; "": a new thread
	Join          string // a join token, which gives access to its thread under Name
	Participant   string
	Channel       string // default chat
	Target        string // on a channel of people: its name
	Texts         []string
	Images        [][]threads.Image // of each of Texts
	Earlier       []Line            // the history of a new thread
	Model         string            // the id in the request
	MaxTokens     int               // 0: no bound
	Key           string            // the idempotency key; "": none
	Hash          string            // of the body; a repeated key requires the same one
	TraceID       trace.ID
	Files         [][]File          // of each of Texts
	Seen          int64             // the last place in the thread that the visitor has read
	agent         agents.Agent      // the agent that answers
	available     *reason.Available // what the turn chooses from
	ownsTrace     bool              // no other message has the trace
	thread        string            // the id of the thread
	threadExists  bool              // the thread exists
	resolvedName  string            // the name for which thread and threadExists were read; "": none, or used
	nameGenerated bool              // Name was generated
	response      *responseEcho     // of a request to /v1/responses
	form          *reason.Form      // the format of the answer; nil for text
	formParam     string            // the parameter that names the format
	unseen        *span             // the flows' messages that the answer shows first; nil before insert
	requiredLast  string            // the execution that must be the thread's last; "": any
	retry         *retry            // recognises an equal earlier request; nil: the message has none
	hold          *admission.Hold   // admits the turn; nil for a message without HTTP
}

// Line is a message of the history that a client sends.
type Line struct {
	Role, Text string
	Images     []threads.Image
}

// principal is the sender.
func (a *UserMessage) principal() threads.Principal {
	if a.Secret != "" {
		return threads.Visitor(a.Owner, a.Secret)
	}
	return threads.Key(a.Owner)
}

// input returns the input of the turn, or of the relay to an execution.
func (a *UserMessage) input(to string) input {
	return input{
		Owner: a.Owner, Visitor: a.principal().Proof, Thread: a.thread, Name: a.Name, Model: a.Model, MaxTokens: a.MaxTokens,
		Hash: a.Hash, To: to, Channel: a.Channel, Target: a.Target,
		Response: a.response, Form: a.form, Unseen: a.unseen,
	}
}

// spec describes the execution of a turn.
func (a *UserMessage) spec() executions.Spec {
	s := executions.Spec{
		Flow: Flow, Surface: trace.Chat, TraceID: a.TraceID, Agent: agentName(a.agent), ThreadID: a.thread,
		Queue: executions.Interactive, Priority: 1, Input: a.input(""),
	}
	switch {
	case a.Key != "" && a.Secret != "":
		s.DedupeKey = "chat visitor:" + a.principal().Proof + ":" + a.Owner + ":" + a.Key
	case a.Key != "":
		s.DedupeKey = "chat:" + a.Owner + ":" + a.Key
	case a.ownsTrace: // stores the message once if the answer to its commit is lost
		s.DedupeKey = "chat request " + string(a.TraceID)
	}
	return s
}

// newThread returns the thread that the message creates.
func (a *UserMessage) newThread() threads.Thread {
	return threads.Thread{
		ID: a.thread, Name: a.Name, Channel: cmp.Or(a.Channel, channel), Target: a.Target, Agent: agentName(a.agent),
		Participant: truncate(a.Participant, 200),
	}
}

// input is the input of a turn's execution. The thread has the message.
type input struct {
	Owner     string `json:"owner"`
	Visitor   string `json:"visitor,omitempty"` // digest of the visitor's secret
	Thread    string `json:"thread_id"`
	Name      string `json:"thread_name,omitempty"` // the visitor's name for the thread; "": its id
	Model     string `json:"model"`
	MaxTokens int    `json:"max_tokens,omitempty"`
	Hash      string `json:"request_hash,omitempty"`
	To        string `json:"to,omitempty"`      // the execution that receives a relayed message
	Channel   string `json:"channel,omitempty"` // default chat
	Target    string `json:"target,omitempty"`  // on a channel of people: its name
	// Response is the part of the request that a response repeats; nil for a completion.
	Response *responseEcho `json:"response,omitempty"`
	Form     *reason.Form  `json:"form,omitempty"` // the format of the answer; nil for text
	// Unseen is the span of the flows' messages since the last answer; nil for a relay.
	Unseen *span `json:"unseen,omitempty"`
}

// maxBytes returns the limit of the model's text in bytes; 0 is no limit.
func (in input) maxBytes() int { return min(in.MaxTokens, math.MaxInt32) * bytesPerToken }

// isSentBy reports whether a principal sent the message.
func (in input) isSentBy(p threads.Principal) bool {
	return in.Owner == p.Owner && in.Visitor == p.Proof
}

// principal is the sender.
func (in input) principal() threads.Principal {
	if in.Visitor != "" {
		return threads.Principal{Kind: threads.ByVisitor, Owner: in.Owner, Proof: in.Visitor}
	}
	return threads.Key(in.Owner)
}

// name returns the visitor's name for the thread.
func (in input) name() string { return cmp.Or(in.Name, in.Thread) }

func readInput(x *executions.Execution) (in input, err error) {
	if err := json.Unmarshal(x.Input, &in); err != nil {
		return in, fmt.Errorf("read input of execution %s: %w", x.ID, err)
	}
	return in, nil
}
