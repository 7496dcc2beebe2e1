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

// turn is a Turn under way.
type turn struct {
	view *viewer // nil without callbacks
	*Loop
	Turn
	budget     Budget
	account    *account // from the first model call on
	agent      agents.Agent
	colleagues []colleague // agents that it may delegate to
	models     []string    // to ask, the first until it is unavailable; "" is the client's
	skills     []skills.Skill
	first      int // of skills, how many were offered at once
	more       int // skills in scope that are not offered, but can be searched
	messages   []models.Message
	opening    int // messages at the start that always stay
	prompt     int // the index of the prompt
	fresh      int // messages that the next model call is the first to see
	outcome    Outcome
	made       []*call // of the last reply
	results    []*longResult
	seen       memory.Seen       // what this turn has read of the memory
	unseen     []answer          // what the model sees with the next request
	denied     map[string]string // why, by skill and arguments
	last       string            // the last call, with its arguments
	same       int               // how often it was made in a row
	silent     int               // answers without words in a row
	unformed   int               // answers that had not the form that was asked for
	bad        int               // replies in a row whose calls were all refused
	why        string            // it stalled, or which limit stopped it
	spent      time.Duration     // of the turn's time, up to the last recorded answer
	mark       time.Time         // when this process had that answer
}

// newTurn opens the transcript.
func (l *Loop) newTurn(t Turn, p prepared) *turn {
	w := &turn{
		Loop: l, Turn: t, budget: t.budget(l.Budget).tightened(p.who.Limits), denied: map[string]string{},
		seen: memory.Seen{}, mark: time.Now(), agent: p.who, models: p.candidates(),
		colleagues: p.Delegates, skills: p.Skills, first: len(p.Skills), more: p.More,
	}
	w.seen.Add(t.Seen...)
	w.seen.Add(p.sights()...)
	w.say(models.RoleSystem, p.system(t.System))
	history := wholeExchanges(t.History)
	w.messages = append(w.messages, history...)
	w.opening = 1
	for w.opening < len(w.messages) && w.messages[w.opening].Role == models.RoleSystem {
		w.opening++
	}
	w.prompt = len(w.messages)
	w.say(models.RoleUser, p.request(t))
	w.messages[w.prompt].Parts = t.Images
	w.bind()
	if len(history) > 0 {
		w.fresh = 1 // the rest is recorded where it was said
	}
	return w
}

// Run takes a turn. It is called inside an execution and returns executions.ErrParked and its like
// untouched; other errors are those of the model that retries did not help.
func (l *Loop) Run(ctx context.Context, t Turn) (Outcome, error) {
	if err := l.fits(t); err != nil {
		return Outcome{}, fmt.Errorf("begin turn: %w", err)
	}
	view := l.watch(ctx, &t)
	defer view.close(ctx)
	p, err := l.prepare(ctx, t)
	if err != nil {
		return Outcome{}, err
	}
	ctx = trace.As(ctx, t.Agent)
	if p.Agent != nil {
		ctx = agents.With(ctx, p.who)
	}
	w := l.newTurn(t, p)
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
		details := fmt.Sprintf("the model called tools %d times in a row and came to no answer", w.outcome.Iterations)
		if err := w.noteStall(ctx, w.made, details); err != nil {
			return w.outcome, err
		}
	}
	if w.outcome.Text == "" {
		w.outcome.Text = w.summary()
	}
	return w.outcome, nil
}

// iterate asks the model once and does what it says.
func (w *turn) iterate(ctx context.Context) error {
	w.fit()
	w.see()
	reply, err := w.ask(ctx)
	if limit, failure, ok := endedBy(err); ok {
		w.stopped(limit, failure)
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
			return w.formed(ctx, reply)
		}
		return w.answer(ctx, strings.TrimSpace(cmp.Or(reply.Message.Content, reply.Message.Refusal)))
	}
	w.silent = 0
	return w.act(trace.WithCause(ctx, reply.Activity), reply.Message.ToolCalls)
}

// stopped ends the turn by a limit.
func (w *turn) stopped(limit string, failure *executions.StepError) {
	w.outcome.Ended = limit
	if failure.Class != classBudget {
		w.why = failure.Message
	}
	if !failure.Until.IsZero() {
		w.outcome.Until = failure.Until.In(w.zone())
		w.why += "; it begins anew on " + w.outcome.Until.Format(untilFormat)
	}
}

// untilFormat is how a moment is told to people.
const untilFormat = "2006-01-02 at 15:04 MST"

// zone is the agent's time zone.
func (l *Loop) zone() *time.Location {
	if l.Zone == nil {
		return time.UTC
	}
	return l.Zone
}

// answer ends the turn with the model's words. For one that says nothing there is a second chance.
func (w *turn) answer(ctx context.Context, text string) error {
	if text != "" {
		w.outcome.Text, w.outcome.Ended = text, Answered
		return nil
	}
	if w.outcome.Cut == string(models.FinishContentFilter) { // asked again, the server would filter it again
		w.outcome.Text, w.outcome.Ended = filteredText, Answered
		return nil
	}
	if w.silent++; w.silent > 1 {
		return w.stall(ctx, nil, "the model gave no text",
			fmt.Sprintf("the model answered with nothing %d times in a row", w.silent))
	}
	w.say(models.RoleSystem, "Your last answer was empty. Answer in words, or call a tool.")
	return nil
}

// formed ends the turn with an answer in the form that was asked for. An answer that was cut off or withheld would be
// so again, and is not asked for again.
func (w *turn) formed(ctx context.Context, reply reply) error {
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
		w.say(models.RoleUser, fmt.Sprintf(formCorrection, wrong)) // of a client's own schema: no rule of the runtime
		return nil
	}
	if err := w.stall(ctx, nil, whyOtherwise+": "+wrong, whyOtherwise+": "+wrong); err != nil {
		return err
	}
	w.outcome.Ended, w.outcome.Text = EndedForm, upper(whyOtherwise)+": "+wrong+"."
	return nil
}

// upper begins a sentence.
func upper(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// filteredText stands for an answer of which the model's server has withheld all.
const filteredText = "The model's provider has withheld this answer: its content filter found something in the " +
	"request or in the answer."

// say adds a message.
func (w *turn) say(role, text string) {
	w.messages = append(w.messages, models.Message{Role: role, Content: text})
	w.fresh++
}

// exhausted names the budget that has run out, if one has. What it looks at is recorded, so a replay
// decides alike.
func (w *turn) exhausted() string {
	switch {
	case w.outcome.Iterations >= w.budget.Iterations:
		return endedIterations
	case w.outcome.Usage.TotalTokens >= w.budget.Tokens:
		return EndedTokens
	case w.budget.CostUSD > 0 && w.outcome.CostUSD >= w.budget.CostUSD:
		return endedMoney
	}
	return ""
}

// summary says what a turn that ends without an answer has done.
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
