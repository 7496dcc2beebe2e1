// Package reason is the reasoning loop: a model is asked, calls skills, gets their results, and is asked
// again until it answers in words.
//
// A turn runs inside an execution. Every model call and every skill call is a durable step, so a turn
// that dies in the middle goes on without paying for a finished model call twice and without repeating a
// finished skill call. The transcript is not stored: it is rebuilt from the recorded steps.
//
// Budgets end a turn, never an execution: iterations, tokens, money and time. A model that calls a tool
// which does not exist, or with parameters its schema refuses, is told so (the protocol's tool reply
// first, then a system message) and may try again twice; a valid call starts the count anew. An empty answer
// is asked for once more; a model that makes the same call with the same arguments is told after three and
// stopped after five. Then the turn ends as stalled, with a summary of what was done, an activity row of class
// stall, and the attempt in the log. So does a turn that has used up its iterations, whatever it called with.
//
// An answer can have a form (Form): JSON of a schema. It goes to the model's server with each request, and to servers
// without structured outputs in words. The loop itself validates the answer and asks once more for one that does not
// fit. So a turn with a form answers in it or not at all.
//
// The context fits before every request: the oldest exchanges go first, whole; the opening and the prompt stay;
// what is too long by itself is cut with a marker. Of a result that was cut the model can read the rest
// (read_result), and of very many skills it is offered the nearest and finds the others (skill_search).
//
// What a turn writes to the memory is based on what it has read. The turn keeps the revision of each entry that a
// request showed whole; it is computed from the recorded results alone, so a turn that is taken up again has read the
// same. A key that this turn has not read must be new: what an earlier turn of the conversation was shown does not
// count. A conflict gives the model both values, and counts as read.
//
// An agent (package agents) says who acts: instructions, model, skills, memory and limits. A turn records the agent's
// version, the time and the pinned memory with its first step. What a request is composed of, and in which order, is in
// prompt.go.
//
// A model decides nothing about its own powers. What it may call is fixed by the caller's scopes before it
// sees a word. A skill whose trust is "approve" is not run but asked for: recorded for whoever follows it
// through (Defer), or waited for durably (Park), with no process, and then made once, under a grant for
// exactly these arguments that is used up in the transaction of the call's intent. A denial holds for the turn.
//
// Callbacks show what happens in this process, beside the turn: they cannot delay or break it.
package reason

import (
	"context"
	"encoding/json"
	"log/slog"
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

// Budget bounds one turn. Zero fields take the default.
type Budget struct {
	Iterations int           // model calls; default 12
	Tokens     int           // prompt and completion together; default 200,000
	CostUSD    float64       // by the price table; 0 is no limit
	Time       time.Duration // of work, waits for others not counted; default 10 minutes
	Context    int           // tokens of context before old exchanges are dropped; default 60,000
	Answer     int           // tokens of one answer, with hidden reasoning; default 4,096, more for models that reason
}

func (b Budget) withDefaults() Budget {
	if b.Iterations == 0 {
		b.Iterations = 12
	}
	if b.Tokens == 0 {
		b.Tokens = 200_000
	}
	if b.Time == 0 {
		b.Time = 10 * time.Minute
	}
	if b.Context == 0 {
		b.Context = 60_000
	}
	return b
}

// Loop is what all turns share. Pool, Model and Skills are required. It is safe for concurrent use.
type Loop struct {
	Pool   *pgxpool.Pool
	Model  *models.Client
	Skills *skills.Registry
	Agents *agents.Directory // says who acts; nil: turns have no agent, and nothing stands around System and Prompt
	Logger *slog.Logger      // may be nil
	Budget Budget
	// Limits bound what all runs together use in a day, beside each run's Budget.
	Limits budgets.Limits
	// Zone is the time zone in which people are told when a limit ends; UTC when nil.
	Zone *time.Location
	// Admit, where set, decides whether a skill that is out of service may be tried once; After hears how
	// a skill call ended.
	Admit func(ctx context.Context, skill, owner string) (bool, error)
	After func(ctx context.Context, skill skills.Skill, err error) error

	prompts prompts.Recorder
}

// Tool is something a turn offers besides the skills: part of the runtime, not of the workspace. Do must be durable
// itself: it is called again when the turn is replayed, and makes its effects in steps. Arguments that only Do can
// judge it refuses with an *executions.StepError of class invalid_params; the model is corrected then as if the schema
// had refused them. Any other *executions.StepError, which is how steps fail, is the call's result; other errors end
// the turn. A skill of the same name is not offered.
type Tool struct {
	Name        string // 1 to 64 letters, digits, _ and -
	Description string
	Parameters  json.RawMessage // JSON Schema of an object; empty for a tool that takes nothing
	Do          func(ctx context.Context, args json.RawMessage) (any, error)
	// DoSeen, where set, is called instead of Do, with what the turn has read of the memory by then.
	DoSeen func(ctx context.Context, args json.RawMessage, seen memory.Seen) (any, error)

	within func(w *turn) func(ctx context.Context, args json.RawMessage) (any, error) // makes Do for a turn
}

// Turn is one task for the model. A turn that is taken up again must be given the same values.
type Turn struct {
	Purpose string // a phase or a surface's turn; spend is counted under it
	Agent   string // who acts; the execution's agent when empty
	System  string // the rules of the surface; the agent's own instructions follow them
	Context string // what the runtime found, for the preface of Prompt: data, never instructions
	// History is what was said before, oldest first: it stands between System and Prompt.
	History []models.Message
	Prompt  string
	Images  []models.Part  // that came with the prompt
	Form    *Form          // of the answer; nil for one in words
	Seen    []memory.Sight // what the prompt shows of what skills may write
	Scopes  []string       // of the skills that are offered, with those on trial; none offers only Tools
	Also    []string       // skills that are offered whatever their scope, unless the agent has a list without them
	Tools   []Tool
	// Approvals says whether a call that needs leave is recorded for later or waited for.
	Approvals ApprovalMode
	// Budget, where set, stands in for the Loop's.
	Budget *Budget
	// BudgetScope is under which name tokens and money are reserved; "run:" and the trace id by default.
	BudgetScope string

	// The callbacks show what happens in this process, never what is replayed from the record.
	OnDelta    func(text string)
	OnRestart  func() // what OnDelta showed of the present answer does not count: it begins anew
	OnTool     func(ToolEvent)
	OnApproval func(approvals.Approval) // a call waits for this decision

	// Of a turn that another delegated:
	above []budgets.Scope // what that allows it to use
	only  []string        // the skills it may use; all in scope when empty
	depth int             // how many delegations led to it
}

// Using is the turn with those skills alone of the ones in its scopes.
func (t Turn) Using(names ...string) Turn {
	t.only = names
	return t
}

// budget is the turn's own, or the loop's.
func (t Turn) budget(loop Budget) Budget {
	if t.Budget != nil {
		return t.Budget.withDefaults()
	}
	return loop.withDefaults()
}

// Outcome is how a turn ended. Text is the model's answer, or, where it has none, a summary of what was done. Ended is
// answered, stalled, form, or the name of the budget or limit that ran out; Until is when that limit begins anew. Cut
// is why an answer is not whole: length or content_filter, as the model's server says.
type Outcome struct {
	Text       string         `json:"text"`
	Ended      string         `json:"ended"`
	Until      time.Time      `json:"until,omitzero"`
	Cut        string         `json:"cut,omitempty"`
	Iterations int            `json:"iterations"`
	Calls      []string       `json:"calls"`
	Usage      activity.Usage `json:"usage"`
	CostUSD    float64        `json:"cost_usd"`
}

// How a turn ends, besides the names of what can stop it: iterations, time, tokens, money, and day and surface, which
// are of tokens or money that others use, too.
const (
	Answered = "answered"
	Stalled  = "stalled"
	// EndedForm is a turn whose answer did not have its Form. Text says why.
	EndedForm = "form"
)

// maxRetries is how often a model may correct a bad call.
const maxRetries = 2
