// Package reason runs the reasoning loop. It calls a model, runs the requested skills, and returns their results to the
// model, until the model answers in words.
//
// A caller fills a [Turn] and calls [Loop.Run] inside an execution. Every model call and every skill call is a durable
// step, so a resumed turn repeats no recorded call. It rebuilds the transcript from the recorded steps. The [Outcome]
// has the answer, or the reason of another end.
//
// # Budgets and stalls
//
// Budgets of iterations, tokens, money and time end a turn, not its execution. A call of an unknown tool, or with
// invalid parameters, gets the protocol's tool reply and a system message; the model may correct the call twice. A
// valid call resets that count. After an empty answer, the loop requests an answer once more.
//
// The third equal call in a row adds a warning. The loop makes no sixth. A reply that ends with the fifth or a later
// one ends the turn as stalled. It leaves a summary, an activity of class stall, and a log line. A turn at its limit of
// iterations has the same summary, activity and log line, and ends as iterations.
//
// # Answers in a form
//
// A turn may require JSON that conforms to a schema ([Form]). Each request carries the schema, as response_format, or
// in words for servers without structured outputs. The loop validates the answer and requests at most one correction.
//
// # Context
//
// The loop trims the context before every request: it drops the oldest exchanges whole, and keeps the leading system
// messages, the prompt and the turn's newest exchange. It cuts overlong messages with a marker. The model reads the
// rest of a cut result with read_result, and finds skills beyond the offered skills with skill_search.
//
// # Memory
//
// Memory writes use optimistic locking. A write carries the revision of the entry that the turn has read. Without a
// read entry the key must be new. The turn tracks the revision of each entry that a request showed whole. It computes
// these revisions from recorded results, so a resumed turn has read the same entries. A conflict shows the model both
// values and counts as read.
//
// # Agents and approvals
//
// An agent (package agents) decides instructions, model, skills, memory and limits. The first step of a turn records
// the agent's version, the time and the pinned memory. prompt.go composes a request.
//
// The caller's scopes decide the callable skills; the model cannot extend them. A skill with trust "approve" needs an
// approval: the turn records the request for a later run ([Defer]) or waits for the decision ([Park]). A denial holds
// for the turn.
//
// A [Sandbox] isolates turns, for evals (sandbox.go).
//
// # Callbacks
//
// Callbacks report the progress of this process. All but Turn.OnWait run in a goroutine of their own. Their panics do
// not fail the turn. Slow callbacks delay it by at most three seconds at each wait for an approval, and at its end.
// OnWait runs in the turn's goroutine.
package reason

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Budget bounds one turn. A zero field takes the default.
type Budget struct {
	Iterations int           // model calls; default 12
	Tokens     int           // prompt and completion; default 200,000, math.MaxInt for no limit
	CostUSD    float64       // by the price table; 0 for no limit
	Time       time.Duration // without durable waits; default 10 minutes
	Context    int           // tokens of a request; default 60,000
	Answer     int           // tokens of one answer with hidden reasoning; default 4,096, more for reasoning models
}

func (b Budget) withDefaults() Budget {
	b.Iterations = cmp.Or(b.Iterations, 12)
	b.Tokens = cmp.Or(b.Tokens, 200_000)
	b.Time = cmp.Or(b.Time, 10*time.Minute)
	b.Context = cmp.Or(b.Context, 60_000)
	return b
}

// Loop runs turns. Pool, Model and Skills are required. It is safe for concurrent use.
type Loop struct {
	Pool   *pgxpool.Pool
	Model  *models.Client
	Skills *skills.Registry
	Agents *agents.Directory // nil: turns have no agent, and the loop sends System and Prompt unchanged
	Logger *slog.Logger      // may be nil
	Budget Budget
	// Limits bound the daily usage of all runs, besides each run's Budget.
	Limits budgets.Limits
	// Zone is the time zone of messages about limits; UTC when nil.
	Zone *time.Location
	// AdmitTrial, if set, decides whether a disabled skill gets its one trial call. AfterCall, if set, receives the
	// outcome of each call that reached its skill; a process that dies may lose it.
	AdmitTrial func(ctx context.Context, skill, owner string) (bool, error)
	AfterCall  func(ctx context.Context, skill skills.Skill, err error) error
	// Sandbox isolates the turns; nil for turns that act.
	Sandbox *Sandbox

	prompts prompts.Recorder
}

// Tool is a tool of the runtime, offered besides the skills. Do must be durable, because a replay calls it again. An
// *executions.StepError of class invalid_params from Do counts as invalid arguments. Another *executions.StepError is
// the result of the call; other errors end the turn. A tool hides a skill of the same name.
type Tool struct {
	Name        string // 1 to 64 letters, digits, _ and -
	Description string
	Parameters  json.RawMessage // JSON Schema of an object; empty for a tool without parameters
	Do          func(ctx context.Context, args json.RawMessage) (any, error)
	// DoSeen, if set, replaces Do and gets the memory that the turn has read.
	DoSeen func(ctx context.Context, args json.RawMessage, seen memory.Seen) (any, error)

	bindTurn func(w *turn) func(ctx context.Context, args json.RawMessage) (any, error) // makes Do for a turn
}

// Turn is one task for the model. A resumed turn must get the same values.
type Turn struct {
	Purpose string // labels the spend: a phase or a surface's turn
	Agent   string // the acting agent; the execution's when empty

	System  string           // the rules of the surface; the agent's own instructions follow them
	History []models.Message // the earlier messages, oldest first, between System and Prompt
	Context string           // data of the runtime for the preface of Prompt
	Prompt  string
	Images  []models.Part  // belong to Prompt
	Form    *Form          // the required form of the answer; nil for words
	Seen    []memory.Sight // the memory entries that Prompt shows

	// Scopes selects the skills. If it is empty, the turn offers only Tools.
	Scopes      []string
	ExtraSkills []string // skills of other scopes that the agent may use; ignored without Scopes
	// Available, if the caller has just read it, saves the turn a read.
	Available *Available
	Tools     []Tool
	// Approvals decides whether the turn waits for an approval.
	Approvals ApprovalMode

	// Budget, if set, replaces the Loop's.
	Budget *Budget
	// BudgetScope is the name of the turn's budget; default: "run:" and the trace id.
	BudgetScope string
	// PhaseScope, if set, is the name of a budget that the turn shares with other turns. Its limits are those of the turn
	// without the agent's.
	PhaseScope string

	// OnDelta, OnRestart, OnTool and OnApproval report the work of this process, and no replayed step. With OnTool or
	// OnApproval, the turn records further steps, so a resumed turn must set the same of the two, even to functions that
	// do nothing.
	OnDelta    func(text string)
	OnRestart  func() // the current answer restarts; earlier deltas are void
	OnTool     func(ToolEvent)
	OnApproval func(approvals.Approval) // a call waits for this decision
	// The turn calls OnWait itself, before each wait for a decision or a delegated task, also before a recorded wait. A
	// slow OnWait delays the turn, and its panic is the turn's.
	OnWait func()

	// Of a delegated turn:
	parentScopes []budgets.Scope // of the delegating turns
	onlySkills   []string        // skills; all in scope when empty
	depth        int             // number of delegations
}

// WithSkills limits the turn to the named skills of its scopes. Without names, it sets no limit.
func (t Turn) WithSkills(names ...string) Turn {
	t.onlySkills = names
	return t
}

// budget returns the turn's budget, or the loop's.
func (t *Turn) budget(loop Budget) Budget {
	if t.Budget != nil {
		return t.Budget.withDefaults()
	}
	return loop.withDefaults()
}

// Outcome is the end of a turn.
type Outcome struct {
	Text       string         `json:"text"`           // the answer; without one, the reason and a summary of the calls
	Ended      string         `json:"ended"`          // one of the ends below
	Until      time.Time      `json:"until,omitzero"` // when the limit that ended the turn resets; zero if it does not
	Cut        string         `json:"cut,omitempty"`  // why the last answer is incomplete: length or content_filter
	Iterations int            `json:"iterations"`
	Calls      []string       `json:"calls"` // names of the called skills and tools, such as "mail" and "mail (denied)"
	Usage      activity.Usage `json:"usage"`
	CostUSD    float64        `json:"cost_usd"`
}

// Starved reports a turn that a limit ended which other turns have used up, or reserved.
func (o Outcome) Starved() bool {
	return o.Ended == EndedDay || o.Ended == EndedSurface || o.Ended == EndedPhase
}

// Ends of a turn.
const (
	Answered     = "answered"
	Stalled      = "stalled"
	EndedForm    = "form"    // the answer did not have the Form
	EndedStopped = "stopped" // the sandbox stopped the turn

	// Limits that end a turn.
	endedIterations = "iterations"
	EndedTime       = "time"
	EndedTokens     = "tokens"  // of the run
	EndedMoney      = "money"   // of the run
	EndedPhase      = "phase"   // of the PhaseScope
	EndedDay        = "day"     // of all runs
	EndedSurface    = "surface" // of the surface's runs, or the agent's
	EndedEval       = "eval"    // of the run of an eval
)

// maxRetries bounds the corrections of bad calls in a row.
const maxRetries = 2

// toolName is the form of a tool's name that servers accept.
var toolName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// validate rejects an invalid turn: this is a bug of the caller, and the model must not be blamed for it.
func (l *Loop) validate(t *Turn) error {
	if l.Pool == nil || l.Model == nil || l.Skills == nil {
		return errors.New("a Loop needs Pool, Model and Skills")
	}
	if limit := t.budget(l.Budget).CostUSD; math.IsNaN(limit) {
		return errors.New("the budget's CostUSD is no amount")
	}
	names := map[string]bool{}
	for _, tool := range t.Tools {
		if names[tool.Name] {
			return fmt.Errorf("two tools are named %s", tool.Name)
		}
		names[tool.Name] = true
		if err := l.validateTool(tool); err != nil {
			return err
		}
	}
	return nil
}

// validateTool rejects a tool that no model could call.
func (l *Loop) validateTool(t Tool) error {
	switch {
	case !toolName.MatchString(t.Name):
		return fmt.Errorf("%q is not a tool's name: it is 1 to 64 letters, digits, _ and -", t.Name)
	case t.Do == nil && t.DoSeen == nil && t.bindTurn == nil:
		return fmt.Errorf("the tool %s has no Do", t.Name)
	case !json.Valid(t.schema()):
		return fmt.Errorf("the parameters of %s are no JSON", t.Name)
	}
	if callErr, ok := errors.AsType[*skills.CallError](l.Skills.Check(t.asSkill(), nil)); ok {
		return callErr
	}
	return nil
}

func (l *Loop) log() *slog.Logger { return cmp.Or(l.Logger, slog.New(slog.DiscardHandler)) }
