package reason

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// turn is a running [Turn].
type turn struct {
	callbacks *callbacks // nil without callbacks
	*Loop
	Turn
	budget           Budget
	account          *account // nil before the first model call
	agent            agents.Agent
	delegates        []delegateAgent // agents that the turn may delegate to
	models           []string        // the current model and its fallbacks; "" is the client's
	skills           []skills.Skill
	offeredCount     int // number of skills in the first request
	searchableCount  int // number of skills that only skill_search finds
	messages         []models.Message
	prefixLen        int // number of leading messages that always stay
	promptIndex      int // index of the prompt
	newCount         int // number of messages that are new to the next model call
	outcome          Outcome
	lastCalls        []*call // of the last reply
	longResults      []*longResult
	seen             memory.Seen       // memory that the turn has read
	pendingSights    []pendingSight    // answers that the next request shows
	deniedReasons    map[string]string // reasons, by skill and arguments
	lastCall         string            // the last call, with its arguments
	repeats          int               // repetitions of lastCall in a row
	emptyAnswers     int               // empty answers in a row
	malformedAnswers int               // answers without the requested form
	invalidReplies   int               // replies in a row with invalid calls only
	stopReason       string            // reason of a stall, or the limit
	elapsed          time.Duration     // used time at the last recorded answer
	measuredAt       time.Time         // time of that answer in this process
}

// newTurn begins the transcript.
func (l *Loop) newTurn(t *Turn, p *prepared) *turn {
	w := &turn{
		Loop: l, Turn: *t, budget: t.budget(l.Budget).limitedBy(p.agent.Limits), deniedReasons: map[string]string{},
		seen: memory.Seen{}, measuredAt: time.Now(), agent: p.agent,
		models:    append([]string{p.agent.Model}, p.agent.Fallback...),
		delegates: p.Delegates, skills: p.Skills, offeredCount: len(p.Skills), searchableCount: p.More,
	}
	if t.PhaseScope != "" {
		phase := budgets.Scope{Name: t.PhaseScope, Limit: t.budget(l.Budget).limit()}
		w.parentScopes = append(slices.Clone(w.parentScopes), phase)
	}
	w.seen.Add(t.Seen...)
	w.seen.Add(p.sights()...)
	w.addMessage(models.RoleSystem, p.system(t.System))
	history := dropIncomplete(t.History)
	w.messages = append(w.messages, history...)
	w.prefixLen = 1
	for w.prefixLen < len(w.messages) && w.messages[w.prefixLen].Role == models.RoleSystem {
		w.prefixLen++
	}
	w.promptIndex = len(w.messages)
	w.addMessage(models.RoleUser, p.request(t))
	w.messages[w.promptIndex].Parts = t.Images
	w.bindTools()
	if len(history) > 0 {
		w.newCount = 1 // earlier turns recorded the rest
	}
	return w
}

// Run runs a turn inside an execution. Its errors wrap executions.ErrParked and similar errors. A permanent failure of
// the model is an *executions.StepError of class model. The limits of [Budget] and the ends of a turn are no errors.
func (l *Loop) Run(ctx context.Context, t Turn) (Outcome, error) {
	if err := l.validate(&t); err != nil {
		return Outcome{}, fmt.Errorf("begin turn: %w", err)
	}
	cb := l.queueCallbacks(ctx, &t)
	defer cb.close(ctx)
	p, err := l.prepare(ctx, &t)
	if err != nil {
		return Outcome{}, err
	}
	ctx = trace.As(ctx, t.Agent)
	if p.Agent != nil {
		ctx = agents.With(ctx, p.agent)
	}
	w := l.newTurn(&t, p)
	w.callbacks = cb
	if w.searchableCount > 0 {
		w.Tools = append(w.Tools, w.skillSearch())
	}
	for w.outcome.Ended == "" {
		if w.outcome.Ended = w.exhaustedBudget(); w.outcome.Ended != "" {
			break
		}
		if err := w.iterate(ctx); err != nil {
			return w.outcome, err
		}
	}
	if w.outcome.Ended == endedIterations {
		details := fmt.Sprintf("the model replied %d times and gave no answer", w.outcome.Iterations)
		if err := w.recordStall(ctx, w.lastCalls, details); err != nil {
			return w.outcome, err
		}
	}
	if w.outcome.Text == "" {
		w.outcome.Text = w.summary()
	}
	return w.outcome, nil
}

// iterate calls the model once and runs the requested calls.
func (w *turn) iterate(ctx context.Context) error {
	w.trimContext()
	w.recordSights()
	reply, err := w.callModel(ctx)
	if limit, failure, ok := limitFromError(err); ok {
		w.stopAtLimit(limit, failure)
		return nil
	}
	if err != nil {
		return err
	}
	w.outcome.Iterations++
	w.addUsage(Outcome{Usage: reply.shown(), CostUSD: reply.CostUSD})
	w.messages = append(w.messages, reply.Message.Sendable())
	if len(reply.Message.ToolCalls) == 0 {
		w.outcome.Cut = reply.Cut
		if w.Form != nil {
			return w.finishForm(ctx, reply)
		}
		return w.finishText(ctx, strings.TrimSpace(cmp.Or(reply.Message.Content, reply.Message.Refusal)))
	}
	w.emptyAnswers = 0
	return w.runCalls(trace.WithCause(ctx, reply.Activity), reply.Message.ToolCalls)
}

func (w *turn) stopAtLimit(limit string, failure *executions.StepError) {
	w.outcome.Ended = limit
	if failure.Class != classBudget {
		w.stopReason = failure.Message
	}
	if !failure.Until.IsZero() {
		w.outcome.Until = failure.Until.In(w.zone())
		w.stopReason += "; it begins again on " + w.outcome.Until.Format(untilFormat)
	}
}

// untilFormat is the format of times for people.
const untilFormat = "2006-01-02 at 15:04 MST"

// zone returns the time zone of messages.
func (l *Loop) zone() *time.Location {
	if l.Zone == nil {
		return time.UTC
	}
	return l.Zone
}

// finishText ends the turn with an answer. After an empty answer, it requests an answer once more.
func (w *turn) finishText(ctx context.Context, text string) error {
	if text != "" {
		w.outcome.Text, w.outcome.Ended = text, Answered
		return nil
	}
	if w.outcome.Cut == string(models.FinishContentFilter) { // the server would filter a second answer too
		w.outcome.Text, w.outcome.Ended = filteredText, Answered
		return nil
	}
	if w.emptyAnswers++; w.emptyAnswers > 1 {
		return w.endStalled(ctx, nil, "the model gave no text",
			fmt.Sprintf("the model answered with nothing %d times in a row", w.emptyAnswers))
	}
	w.addMessage(models.RoleSystem, "Your last answer was empty. Answer in words, or call a tool.")
	return nil
}

// finishForm ends the turn with a valid answer in its form. It requests one correction, except of a cut, withheld or
// declined answer.
func (w *turn) finishForm(ctx context.Context, reply *reply) error {
	text := strings.TrimSpace(reply.Message.Content)
	if text == "" && reply.Message.Refusal == "" && reply.Cut == "" {
		return w.finishText(ctx, "")
	}
	answer, problem := w.Form.parse(text)
	quote := "" // not for the error message, which viewers may read
	final := true
	switch {
	case reply.Cut == string(models.FinishContentFilter):
		problem = formFiltered
	case reply.Cut != "":
		problem = formCutOff
	case problem == "":
		return w.finishText(ctx, answer)
	case text == "":
		problem, quote = formNotAnswered, ": "+truncate(reply.Message.Refusal, maxQuote)
	default:
		w.emptyAnswers = 0
		w.malformedAnswers++
		final = w.malformedAnswers > 1
	}
	if !final {
		// The role is the user's, because a client's schema is no rule of the runtime.
		w.addMessage(models.RoleUser, fmt.Sprintf(formCorrection, problem))
		return nil
	}
	if err := w.endStalled(ctx, nil, formMismatch+": "+problem, formMismatch+": "+problem); err != nil {
		return err
	}
	w.outcome.Ended, w.outcome.Text = EndedForm, capitalize(formMismatch)+": "+problem+quote+"."
	return nil
}

// capitalize capitalizes a sentence.
func capitalize(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// filteredText replaces an answer that the model's server withheld.
const filteredText = "The model's provider has withheld this answer: its content filter found something in the " +
	"request or in the answer."

func (w *turn) addMessage(role, text string) {
	w.messages = append(w.messages, models.Message{Role: role, Content: text})
	w.newCount++
}

// exhaustedBudget returns the exhausted budget, or "". Except for Sandbox.Stop, the result depends on recorded values
// only.
func (w *turn) exhaustedBudget() string {
	switch {
	case w.Sandbox != nil && w.Sandbox.Stop != nil && w.Sandbox.Stop():
		return EndedStopped
	case w.outcome.Iterations >= w.budget.Iterations:
		return endedIterations
	case w.outcome.Usage.TotalTokens >= w.budget.Tokens:
		return EndedTokens
	case w.budget.CostUSD > 0 && w.outcome.CostUSD >= w.budget.CostUSD:
		return EndedMoney
	}
	return ""
}

// summary describes the calls of a turn without an answer.
func (w *turn) summary() string {
	done := "nothing was done"
	if len(w.outcome.Calls) > 0 {
		done = "calls made: " + strings.Join(w.outcome.Calls, ", ")
	}
	if w.stopReason != "" {
		return fmt.Sprintf("Stopped because %s; %s.", w.stopReason, done)
	}
	return fmt.Sprintf("Stopped because the budget of %s ran out; %s.", w.outcome.Ended, done)
}
