package reason

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// turn is a running [Turn].
type turn struct {
	view *callbacks // nil without callbacks
	*Loop
	Turn
	budget        Budget
	account       *account // nil before the first model call
	agent         agents.Agent
	delegates     []delegateAgent // agents that the turn may delegate to
	models        []string        // the current model and its fallbacks; "" is the client's
	skills        []skills.Skill
	first         int // number of skills offered from the beginning
	more          int // number of skills that only skill_search finds
	messages      []models.Message
	opening       int // number of leading messages that always stay
	prompt        int // index of the prompt
	fresh         int // number of messages that are new to the next model call
	outcome       Outcome
	made          []*call // of the last reply
	results       []*longResult
	seen          memory.Seen       // memory that the turn has read
	pendingSights []answer          // answers that the next request shows
	denied        map[string]string // reasons, by skill and arguments
	last          string            // the last call, with its arguments
	same          int               // repetitions of last in a row
	silent        int               // empty answers in a row
	unformed      int               // answers without the requested form
	bad           int               // replies in a row with invalid calls only
	why           string            // reason of a stall, or the limit
	spent         time.Duration     // used time at the last recorded answer
	mark          time.Time         // of that answer in this process
}

// newTurn begins the transcript.
func (l *Loop) newTurn(t *Turn, p *prepared) *turn {
	w := &turn{
		Loop: l, Turn: *t, budget: t.budget(l.Budget).limitedBy(p.who.Limits), denied: map[string]string{},
		seen: memory.Seen{}, mark: time.Now(), agent: p.who,
		models:    append([]string{p.who.Model}, p.who.Fallback...),
		delegates: p.Delegates, skills: p.Skills, first: len(p.Skills), more: p.More,
	}
	w.seen.Add(t.Seen...)
	w.seen.Add(p.sights()...)
	w.addMessage(models.RoleSystem, p.system(t.System))
	history := dropIncomplete(t.History)
	w.messages = append(w.messages, history...)
	w.opening = 1
	for w.opening < len(w.messages) && w.messages[w.opening].Role == models.RoleSystem {
		w.opening++
	}
	w.prompt = len(w.messages)
	w.addMessage(models.RoleUser, p.request(t))
	w.messages[w.prompt].Parts = t.Images
	w.bind()
	if len(history) > 0 {
		w.fresh = 1 // earlier turns recorded the rest
	}
	return w
}

// Run runs a turn inside an execution. It returns executions.ErrParked and similar errors unchanged; other errors are
// permanent failures of the model.
func (l *Loop) Run(ctx context.Context, t Turn) (Outcome, error) {
	if err := l.validate(&t); err != nil {
		return Outcome{}, fmt.Errorf("begin turn: %w", err)
	}
	view := l.queueCallbacks(ctx, &t)
	defer view.close(ctx)
	p, err := l.prepare(ctx, &t)
	if err != nil {
		return Outcome{}, err
	}
	ctx = trace.As(ctx, t.Agent)
	if p.Agent != nil {
		ctx = agents.With(ctx, p.who)
	}
	w := l.newTurn(&t, p)
	w.view = view
	if w.more > 0 {
		w.Tools = append(w.Tools, w.skillSearch())
	}
	for w.outcome.Ended == "" {
		if w.outcome.Ended = w.exhausted(); w.outcome.Ended != "" {
			break
		}
		if err := w.iterate(ctx); err != nil {
			return w.outcome, err
		}
	}
	if w.outcome.Ended == endedIterations {
		details := fmt.Sprintf("the model called tools %d times in a row and gave no answer", w.outcome.Iterations)
		if err := w.recordStall(ctx, w.made, details); err != nil {
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
	if limit, failure, ok := endedBy(err); ok {
		w.stopAtLimit(limit, failure)
		return nil
	}
	if err != nil {
		return err
	}
	w.outcome.Iterations++
	w.count(Outcome{Usage: reply.shown(), CostUSD: reply.CostUSD})
	w.messages = append(w.messages, reply.Message.Sendable())
	if len(reply.Message.ToolCalls) == 0 {
		w.outcome.Cut = reply.Cut
		if w.Form != nil {
			return w.finishForm(ctx, reply)
		}
		return w.answer(ctx, strings.TrimSpace(cmp.Or(reply.Message.Content, reply.Message.Refusal)))
	}
	w.silent = 0
	return w.runCalls(trace.WithCause(ctx, reply.Activity), reply.Message.ToolCalls)
}

func (w *turn) stopAtLimit(limit string, failure *executions.StepError) {
	w.outcome.Ended = limit
	if failure.Class != classBudget {
		w.why = failure.Message
	}
	if !failure.Until.IsZero() {
		w.outcome.Until = failure.Until.In(w.zone())
		w.why += "; it begins again on " + w.outcome.Until.Format(untilFormat)
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

// answer ends the turn with an answer. After an empty answer, it requests an answer once more.
func (w *turn) answer(ctx context.Context, text string) error {
	if text != "" {
		w.outcome.Text, w.outcome.Ended = text, Answered
		return nil
	}
	if w.outcome.Cut == string(models.FinishContentFilter) { // the server would filter a second answer too
		w.outcome.Text, w.outcome.Ended = filteredText, Answered
		return nil
	}
	if w.silent++; w.silent > 1 {
		return w.stall(ctx, nil, "the model gave no text",
			fmt.Sprintf("the model answered with nothing %d times in a row", w.silent))
	}
	w.addMessage(models.RoleSystem, "Your last answer was empty. Answer in words, or call a tool.")
	return nil
}

// finishForm ends the turn with a valid answer in its form. It requests one correction, except for a cut or withheld
// answer.
func (w *turn) finishForm(ctx context.Context, reply *reply) error {
	text := strings.TrimSpace(reply.Message.Content)
	if text == "" && reply.Message.Refusal == "" && reply.Cut == "" {
		return w.answer(ctx, "")
	}
	answer, wrong := w.Form.read(text)
	final := true
	switch {
	case reply.Cut == string(models.FinishContentFilter):
		wrong = formFiltered
	case reply.Cut != "":
		wrong = formCutOff
	case wrong == "":
		return w.answer(ctx, answer)
	case text == "":
		wrong = fmt.Sprintf(formNotAnswered, clipped(reply.Message.Refusal))
	default:
		w.unformed++
		final = w.unformed > 1
	}
	if !final {
		w.addMessage(models.RoleUser, fmt.Sprintf(formCorrection, wrong)) // a client's own schema is no rule of the runtime
		return nil
	}
	if err := w.stall(ctx, nil, whyOtherwise+": "+wrong, whyOtherwise+": "+wrong); err != nil {
		return err
	}
	w.outcome.Ended, w.outcome.Text = EndedForm, upper(whyOtherwise)+": "+wrong+"."
	return nil
}

// upper capitalizes a sentence.
func upper(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// filteredText replaces an answer that the model's server withheld.
const filteredText = "The model's provider has withheld this answer: its content filter found something in the " +
	"request or in the answer."

func (w *turn) addMessage(role, text string) {
	w.messages = append(w.messages, models.Message{Role: role, Content: text})
	w.fresh++
}

// exhausted returns the exhausted budget, or "". The result depends on recorded values only.
func (w *turn) exhausted() string {
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
	if w.why != "" {
		return fmt.Sprintf("Stopped because %s; %s.", w.why, done)
	}
	return fmt.Sprintf("Stopped because the budget of %s ran out; %s.", w.outcome.Ended, done)
}
