package reason

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/prompts"
	"github.com/lanekeeper/lanekeeper/skills"
)

// reply is what is recorded of a model call.
type reply struct {
	Message models.Message `json:"message"`
	Usage   models.Usage   `json:"usage"` // with what lost attempts may have used, which is Unknown, too
	Unknown *unknownSpend  `json:"unknown,omitempty"`
	CostUSD float64        `json:"cost_usd"`
	Spent   time.Duration  `json:"spent_ns"` // of the turn's time, when the answer had come
	Cut     string         `json:"cut,omitempty"`
	// Activity is the row of the call: what its answer asks for was caused by it.
	Activity string `json:"activity_id,omitempty"`
}

// unknownSpend is the worst case of requests that were not answered.
type unknownSpend struct {
	Tokens int     `json:"tokens"`
	USD    float64 `json:"usd"`
}

// asked is what a model call's row shows: the messages it was the first to see, and the tools' names.
// The rows of a turn together are its whole transcript.
type asked struct {
	Messages []models.Message `json:"messages"`
	Earlier  int              `json:"earlier_messages"`
	Tools    []string         `json:"tools"`
}

// modelCall is one call of the model.
type modelCall struct {
	purpose string
	shown   any // what its row shows
	request models.Request
	account *account
	time    time.Duration          // that all calls of the account may take; 0 is no bound
	used    func() time.Duration   // how much of it is gone
	skill   func(name string) bool // whether a tool of this name is a skill; nil when none is offered
	more    bool                   // another model is asked when this one is unavailable
	prompt  *prompts.Record
}

// ask makes one model call of a turn.
func (w *turn) ask(ctx context.Context) (reply, error) {
	fresh := min(w.fresh, len(w.messages))
	w.fresh = 0
	if w.account == nil {
		w.account = w.open(ctx, w.Turn, w.budget, w.agent)
	}
	request := models.Request{
		Messages: w.messages, Tools: w.definitions(), Effort: w.agent.Effort, Temperature: w.temperature(),
		Schema: w.Form.schema(), OnDelta: w.OnDelta, OnRestart: w.OnRestart,
	}
	shown := asked{
		Messages: models.Shown(w.messages[len(w.messages)-fresh:]), Earlier: len(w.messages) - fresh, Tools: w.names(),
	}
	got, err := w.fallBack(ctx, func(model string, more bool) (reply, error) {
		request.Model = model
		return w.consult(ctx, modelCall{
			purpose: w.Purpose, shown: shown, request: request, account: w.account, time: w.budget.Time, used: w.used,
			skill: w.isSkill, more: more,
		})
	})
	if err != nil {
		return reply{}, err
	}
	w.spent, w.mark = got.Spent, time.Now()
	return got, nil
}

// fallBack asks the models of the turn in their order until one is available. One that was not is not asked again in
// this turn.
func (w *turn) fallBack(ctx context.Context, ask func(model string, more bool) (reply, error)) (reply, error) {
	for {
		got, err := ask(w.models[0], len(w.models) > 1)
		failure, ok := errors.AsType[*executions.StepError](err)
		if !ok || failure.Class != classUnavailable {
			return got, err
		}
		w.log().WarnContext(ctx, "model unavailable, falling back", "model", w.models[0], "fallback", w.models[1],
			"error", failure.Message)
		w.models = w.models[1:]
	}
}

// temperature is the agent's, as the protocol has it.
func (w *turn) temperature() *float32 {
	if w.agent.Temperature == nil {
		return nil
	}
	t := float32(*w.agent.Temperature)
	return &t
}

// classUnavailable is the class of a call whose model is unavailable while there is another.
const classUnavailable = "model_unavailable"

// used is how much of the turn's time is gone. What was waited for durably, and what a lost process did
// after its last recorded answer, is not in it.
func (w *turn) used() time.Duration { return w.spent + time.Since(w.mark) }

// consult makes one model call, durably: it is the one way to the model. Its worst case is reserved in the
// transaction that records the intent, and what it used is settled in the one that records the result. A
// limit that refuses it gives a *executions.StepError that endedBy understands.
func (l *Loop) consult(ctx context.Context, c modelCall) (reply, error) {
	r, err := c.account.reservation(ctx, l.Model, c.request)
	if err != nil {
		return reply{}, fmt.Errorf("ask the model: %w", err)
	}
	got, err := executions.Do(ctx, "model", executions.Call{
		Entry: activity.Entry{
			Skill: "model_call", Kind: activity.KindModel, Purpose: c.purpose,
			Model: cmp.Or(c.request.Model, l.Model.Model()),
			Input: c.shown,
		},
		Idempotent: true, // asking again costs money, and changes nothing in the world
		OnIntent: func(b *pgx.Batch, step string) {
			r.Reserve(b, step)
			if c.prompt == nil {
				c.prompt = l.prompts.Prepare(l.Model.Prepared(c.request))
			}
			c.prompt.Add(b, r.ExecutionID, r.Claim, step)
		},
	}, func(ctx context.Context, effect *executions.Effect) (reply, error) {
		c.prompt.Committed(ctx, l.log())
		return l.complete(ctx, c, r, effect)
	})
	if err != nil {
		return reply{}, fmt.Errorf("ask the model: %w", err)
	}
	if got.Unknown == nil {
		l.Model.ObserveUsage(r.reckoned, got.Usage) // also of an answer that another process got
	}
	return got, nil
}

// complete sends the request, within the time that is left.
func (l *Loop) complete(ctx context.Context, c modelCall, r *reservation, effect *executions.Effect) (reply, error) {
	limited := ctx
	if c.time > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(ctx, c.time-c.used())
		defer cancel()
	}
	got, err := l.send(limited, c, r, effect)
	var refused *models.Error
	var limit *executions.StepError
	switch {
	case err != nil && errors.Is(limited.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		return reply{}, &executions.StepError{
			Class:   classBudget,
			Message: fmt.Sprintf("the turn's time of %s has run out", c.time),
		}
	case errors.As(err, &limit):
		return reply{}, limit
	case errors.As(err, &refused) && refused.Retryable && c.more:
		return reply{}, &executions.StepError{Class: classUnavailable, Message: err.Error()}
	case errors.As(err, &refused):
		return reply{}, &executions.StepError{Class: "model", Message: err.Error()}
	}
	return got, err
}

// send asks, within what is granted, and fills in what the row says about the answer.
func (l *Loop) send(ctx context.Context, c modelCall, r *reservation, effect *executions.Effect) (reply, error) {
	limit, err := r.grant(ctx, l.Pool, effect)
	if err != nil {
		return reply{}, err
	}
	c.request.MaxTokens, c.request.IdempotencyKey = limit, effect.Key
	c.request.BeforeRetry = func(ctx context.Context) (int, error) { return r.renew(ctx, l.Pool) }
	effect.Usage, effect.CostUSD = r.used(models.Response{Unknown: true})
	if ctx.Err() != nil {
		effect.Usage, effect.CostUSD = r.used(models.Response{})
		return reply{}, ctx.Err()
	}
	response, err := l.Model.Complete(ctx, c.request)
	settle := effect.OnResult
	effect.OnResult = func(b *pgx.Batch) {
		settle(b)
		c.prompt.Amend(ctx, l.log(), b, effect.ActivityID, response.Sent)
	}
	l.Model.ObserveUsage(r.reckoned, response.Usage) // before this is settled, and others take what it leaves
	used, cost := r.used(response)
	effect.Usage, effect.CostUSD, effect.Model = used, cost, response.Model
	if err != nil {
		return reply{}, err
	}
	effect.LedTo = c.ledTo(response.Message.ToolCalls)
	got := reply{Usage: models.Usage{
		PromptTokens: used.PromptTokens, CompletionTokens: used.CompletionTokens, TotalTokens: used.TotalTokens,
		CachedTokens: used.CachedTokens, CacheWriteTokens: used.CacheWriteTokens, Estimated: used.Estimated,
	}, CostUSD: cost, Activity: effect.ActivityID}
	if used.UnknownTokens > 0 {
		got.Unknown = &unknownSpend{used.UnknownTokens, used.UnknownUSD}
	}
	if response.FinishReason == models.FinishLength {
		l.markCut(ctx, &response, c)
	}
	if response.FinishReason == models.FinishLength || response.FinishReason == models.FinishContentFilter {
		got.Cut = string(response.FinishReason)
	}
	effect.Output, got.Message = response.Message.Shown(), response.Message
	if c.used != nil {
		got.Spent = c.used()
	}
	return got, nil
}

// ledTo counts the calls of skills in an answer, which the model call is charged to.
func (c modelCall) ledTo(made []models.ToolCall) map[string]int {
	called := map[string]int{}
	for _, m := range made {
		if c.skill != nil && c.skill(m.Name) {
			called[m.Name]++
		}
	}
	return called
}

// isSkill says that the model is offered a skill of this name, and no part of the runtime that has it.
func (w *turn) isSkill(name string) bool {
	return slices.ContainsFunc(w.skills, func(s skills.Skill) bool { return s.Name == name }) &&
		!slices.ContainsFunc(w.Tools, func(t Tool) bool { return t.Name == name })
}

// shown is what a call has used as the log has it.
func (r reply) shown() activity.Usage {
	u := activity.Usage{
		PromptTokens: r.Usage.PromptTokens, CachedTokens: r.Usage.CachedTokens,
		CacheWriteTokens: r.Usage.CacheWriteTokens,
		CompletionTokens: r.Usage.CompletionTokens, TotalTokens: r.Usage.TotalTokens, Estimated: r.Usage.Estimated,
	}
	if r.Unknown != nil {
		u.UnknownTokens, u.UnknownUSD = r.Unknown.Tokens, r.Unknown.USD
	}
	return u
}

// markCut says in the answer itself that it is not whole. Calls that were cut are refused for their arguments.
func (l *Loop) markCut(ctx context.Context, response *models.Response, c modelCall) {
	l.log().WarnContext(ctx, "answer cut at its limit", "max_tokens", c.request.MaxTokens,
		"completion_tokens", response.Usage.CompletionTokens)
	if len(response.Message.ToolCalls) > 0 {
		return
	}
	mark := "[The answer was cut off here: it had reached its limit of tokens.]"
	if c.request.MaxTokens > 0 {
		mark = fmt.Sprintf("[The answer was cut off here: it had reached its limit of %d tokens.]", c.request.MaxTokens)
	}
	if response.Message.Content != "" {
		mark = "\n\n" + mark
	}
	response.Message.Content += mark
	if c.request.OnDelta != nil {
		c.request.OnDelta(mark)
	}
}

// definitions are the tools in the form the model gets them. A skill that has the name of a tool is not among them: the
// tool is called under it, and servers refuse a name that comes twice.
func (w *turn) definitions() []models.Tool {
	tools := w.ofSkills(w.skills[:w.first])
	for _, t := range w.Tools {
		tools = append(tools, models.Tool{Name: t.Name, Description: t.Description, Parameters: t.schema()})
	}
	slices.SortStableFunc(tools, func(a, b models.Tool) int { return strings.Compare(a.Name, b.Name) })
	return append(tools, w.ofSkills(w.skills[w.first:])...)
}

// ofSkills are the definitions of skills, without those that a part of the runtime has the name of.
func (w *turn) ofSkills(list []skills.Skill) []models.Tool {
	tools := make([]models.Tool, 0, len(w.skills)+len(w.Tools))
	for _, s := range list {
		if !slices.ContainsFunc(w.Tools, func(t Tool) bool { return t.Name == s.Name }) {
			tools = append(tools, s.Tool())
		}
	}
	return tools
}

// names lists what can be called.
func (w *turn) names() []string {
	names := make([]string, 0, len(w.skills)+len(w.Tools))
	for _, s := range w.skills {
		names = append(names, s.Name)
	}
	for _, t := range w.Tools {
		names = append(names, t.Name)
	}
	return names
}

// ApprovalMode says what a turn does with a call that only an admin can allow.
type ApprovalMode int

const (
	// Defer records that the call is wanted and goes on; whoever follows approvals through makes it later.
	Defer ApprovalMode = iota
	// Park waits, durably, for the decision, and makes the call when it is approved.
	Park
)

// ToolEvent is the start (Done is false) or the end of a tool call that happens in this process.
type ToolEvent struct {
	ID        string          // of the call, as the model gave it
	Name      string          // of the tool
	Arguments json.RawMessage // as the model gave them; they need not be valid JSON
	Done      bool
	Status    string // when done: success, error, denied or pending_approval
	Result    string // when done: what the model is told
	Error     string // why it was not made or failed, if so
	Duration  time.Duration
}

// patience is how long the end of a turn waits for callbacks that have not caught up.
const patience = 3 * time.Second

// viewer calls a turn's callbacks, one at a time and in order, beside the turn: one that is slow or panics
// does not hold the turn up, nor use its time.
type viewer struct {
	log *slog.Logger

	mu    sync.Mutex
	queue []func()
	over  bool          // nothing more is added
	left  bool          // nothing more is called
	wake  chan struct{} // has room for one
	done  chan struct{}
}

// watch puts a viewer between a turn and its callbacks; nil when it has none. Whoever calls it calls close.
func (l *Loop) watch(ctx context.Context, t *Turn) *viewer {
	if t.OnDelta == nil && t.OnRestart == nil && t.OnTool == nil && t.OnApproval == nil {
		return nil
	}
	v := &viewer{log: l.log(), wake: make(chan struct{}, 1), done: make(chan struct{})}
	if show := t.OnDelta; show != nil {
		t.OnDelta = func(text string) { v.add(func() { show(text) }) }
	}
	if show := t.OnRestart; show != nil {
		t.OnRestart = func() { v.add(show) }
	}
	if show := t.OnTool; show != nil {
		t.OnTool = func(e ToolEvent) { v.add(func() { show(e) }) }
	}
	if show := t.OnApproval; show != nil {
		t.OnApproval = func(a approvals.Approval) { v.add(func() { show(a) }) }
	}
	go v.run(context.WithoutCancel(ctx))
	return v
}

func (v *viewer) add(show func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.over {
		v.queue = append(v.queue, show)
		v.knock()
	}
}

func (v *viewer) knock() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// run calls what was added until close and the last of it.
func (v *viewer) run(ctx context.Context) {
	defer close(v.done)
	for {
		batch, over := v.take()
		for _, show := range batch {
			if !v.call(ctx, show) {
				return
			}
		}
		switch {
		case len(batch) > 0:
		case over:
			return
		default:
			<-v.wake
		}
	}
}

func (v *viewer) take() (batch []func(), over bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	batch, v.queue = v.queue, nil
	return batch, v.over
}

// call calls one callback; false when the turn has left.
func (v *viewer) call(ctx context.Context, show func()) (goOn bool) {
	v.mu.Lock()
	goOn = !v.left
	v.mu.Unlock()
	if !goOn {
		return false
	}
	defer func() {
		if p := recover(); p != nil { // goOn stays true
			v.log.ErrorContext(ctx, "callback of a turn panicked", "panic", fmt.Sprint(p))
		}
	}()
	show()
	return true
}

// catchUp waits until what was added so far was shown, for as long as its patience lasts: who waits for somebody else
// may go on in another process, which finds what was stored by then.
func (v *viewer) catchUp(ctx context.Context) {
	if v == nil {
		return
	}
	shown := make(chan struct{})
	v.add(func() { close(shown) })
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-shown:
	case <-v.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

// close waits until everything was shown, for as long as its patience lasts. After it no further callback begins.
func (v *viewer) close(ctx context.Context) {
	if v == nil {
		return
	}
	v.mu.Lock()
	v.over = true
	v.knock()
	v.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-v.done:
	case <-timer.C:
		v.mu.Lock()
		v.left = true
		v.mu.Unlock()
		v.log.WarnContext(ctx, "callbacks of a turn did not keep up and were left behind")
	}
}

// begin shows that a call is made now.
func (w *turn) begin(c *call) {
	if c.live {
		return
	}
	c.live, c.began = true, time.Now()
	if w.OnTool != nil {
		w.OnTool(ToolEvent{ID: c.id, Name: c.name, Arguments: c.args})
	}
}

// end shows how a call went, if this process made it.
func (w *turn) end(c *call, status, failure string) {
	if !c.live || w.OnTool == nil {
		return
	}
	w.OnTool(ToolEvent{
		ID: c.id, Name: c.name, Arguments: c.args, Done: true,
		Status: status, Result: c.result, Error: failure, Duration: time.Since(c.began),
	})
}

// news reports whether the turn comes to this place for the first time, for the sake of who watches. Without a
// watcher nothing is recorded and nothing is news.
func (w *turn) news(ctx context.Context, place string) (first bool, err error) {
	if w.OnTool == nil && w.OnApproval == nil {
		return false, nil
	}
	_, err = executions.Step(ctx, "show "+place, func(context.Context) (struct{}, error) {
		first = true
		return struct{}{}, nil
	})
	return first, err
}

// showOnce shows a call that is not made.
func (w *turn) showOnce(ctx context.Context, c *call, place, status, failure string) error {
	first, err := w.news(ctx, place)
	if err == nil && first {
		w.begin(c)
		w.end(c, status, failure)
	}
	return err
}
