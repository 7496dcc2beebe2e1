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

// reply is the record of a model call.
type reply struct {
	Message models.Message `json:"message"`
	Usage   models.Usage   `json:"usage"` // with Unknown
	Unknown *unknownSpend  `json:"unknown,omitempty"`
	CostUSD float64        `json:"cost_usd"`
	Spent   time.Duration  `json:"spent_ns"` // used time of the turn at the answer
	Cut     string         `json:"cut,omitempty"`
	// Activity is the activity of the call, the cause of the requested calls.
	Activity string `json:"activity_id,omitempty"`
}

// unknownSpend is the worst case of requests without an answer.
type unknownSpend struct {
	Tokens int     `json:"tokens"`
	USD    float64 `json:"usd"`
}

// callInput is the input of a model call's activity: its new messages and the tools' names. The activities of a turn
// have the whole transcript.
type callInput struct {
	Messages []models.Message `json:"messages"`
	Earlier  int              `json:"earlier_messages"`
	Tools    []string         `json:"tools"`
}

type modelCall struct {
	purpose string
	shown   any // input of the activity
	request models.Request
	account *account
	time    time.Duration          // bound of the whole turn; 0 for none
	used    func() time.Duration   // used part of time
	skill   func(name string) bool // reports whether a tool is a skill; nil without skills
	more    bool                   // there is a fallback model
	prompt  *prompts.Record
}

func (w *turn) callModel(ctx context.Context) (*reply, error) {
	fresh := min(w.fresh, len(w.messages))
	w.fresh = 0
	if w.account == nil {
		w.account = w.open(ctx, &w.Turn, w.budget, w.agent)
	}
	request := models.Request{
		Messages: w.messages, Tools: w.definitions(), Effort: w.agent.Effort, Temperature: w.temperature(),
		Schema: w.Form.schema(), OnDelta: w.OnDelta, OnRestart: w.OnRestart,
	}
	shown := callInput{
		Messages: models.Shown(w.messages[len(w.messages)-fresh:]), Earlier: len(w.messages) - fresh, Tools: w.names(),
	}
	got, err := w.withFallback(ctx, func(model string, more bool) (*reply, error) {
		request.Model, request.Fallback = model, more
		return w.callDurably(ctx, &modelCall{
			purpose: w.Purpose, shown: shown, request: request, account: w.account, time: w.budget.Time, used: w.used,
			skill: w.isSkill, more: more,
		})
	})
	if err != nil {
		return nil, err
	}
	w.spent, w.mark = got.Spent, time.Now()
	return got, nil
}

// withFallback tries the turn's models in order. It drops an unavailable model for the rest of the turn.
func (w *turn) withFallback(ctx context.Context, ask func(model string, more bool) (*reply, error)) (*reply, error) {
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

// temperature returns the agent's temperature for the protocol.
func (w *turn) temperature() *float32 {
	if w.agent.Temperature == nil {
		return nil
	}
	t := float32(*w.agent.Temperature)
	return &t
}

// classUnavailable is the class of a call to an unavailable model with a fallback.
const classUnavailable = "model_unavailable"

// used returns the used time of the turn. It excludes durable waits, and the work of a lost process after its last
// recorded answer.
func (w *turn) used() time.Duration { return w.spent + time.Since(w.mark) }

// callDurably makes one model call as a durable step; every model call uses it. The transaction of the intent reserves
// the worst case, and the transaction of the result settles the usage. A limit returns an *executions.StepError for
// endedBy.
func (l *Loop) callDurably(ctx context.Context, c *modelCall) (*reply, error) {
	r, err := c.account.reservation(ctx, l.Model, c.request)
	if err != nil {
		return nil, fmt.Errorf("ask the model: %w", err)
	}
	got, err := executions.Do(ctx, "model", executions.Call{
		Entry: activity.Entry{
			Skill: "model_call", Kind: activity.KindModel, Purpose: c.purpose,
			Model: cmp.Or(c.request.Model, l.Model.Model()),
			Input: c.shown,
		},
		Idempotent: true, // a repeated call costs money and changes nothing
		OnIntent: func(b *pgx.Batch, step string) {
			if c.prompt == nil {
				asked := c.request
				asked.MaxTokens = int(r.Need.Wanted) // the grant, unless a budget is short
				c.prompt = l.prompts.Prepare(l.Model.Prepared(asked))
			}
			c.prompt.Add(b, r.ExecutionID, r.Claim, step)
			r.Reserve(b, step) // last: all turns of a day lock the same budget until their commit
		},
	}, func(ctx context.Context, effect *executions.Effect) (*reply, error) {
		c.prompt.Committed(ctx, l.log())
		return l.complete(ctx, c, r, effect)
	})
	if err != nil {
		return nil, fmt.Errorf("ask the model: %w", err)
	}
	if got.Unknown == nil {
		l.Model.ObserveUsage(r.estimated, got.Usage) // also for an answer of another process
	}
	return got, nil
}

// complete sends the request within the remaining time.
func (l *Loop) complete(ctx context.Context, c *modelCall, r *reservation, effect *executions.Effect) (*reply, error) {
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
		return nil, &executions.StepError{
			Class:   classBudget,
			Message: fmt.Sprintf("the turn's time of %s has run out", c.time),
		}
	case errors.As(err, &limit):
		return nil, limit
	case errors.As(err, &refused) && refused.Retryable && c.more:
		return nil, &executions.StepError{Class: classUnavailable, Message: err.Error()}
	case errors.As(err, &refused):
		return nil, &executions.StepError{Class: "model", Message: err.Error()}
	}
	return got, err
}

// send sends the request within the granted tokens, and completes the activity.
func (l *Loop) send(ctx context.Context, c *modelCall, r *reservation, effect *executions.Effect) (*reply, error) {
	limit, err := r.grant(ctx, l.Pool, effect)
	if err != nil {
		return nil, err
	}
	c.request.MaxTokens, c.request.IdempotencyKey = limit, effect.Key
	c.request.BeforeRetry = func(ctx context.Context) (int, error) { return r.renew(ctx, l.Pool) }
	effect.Usage, effect.CostUSD = r.used(models.Response{Unknown: true})
	if ctx.Err() != nil {
		effect.Usage, effect.CostUSD = r.used(models.Response{})
		return nil, ctx.Err()
	}
	response, err := l.Model.Complete(ctx, c.request)
	settle := effect.OnResult
	effect.OnResult = func(b *pgx.Batch) {
		c.prompt.Amend(ctx, l.log(), b, effect.ActivityID, response.Sent)
		settle(b)
	}
	l.Model.ObserveUsage(r.estimated, response.Usage) // before settling frees budget for others
	used, cost := r.used(response)
	effect.Usage, effect.CostUSD, effect.Model = used, cost, response.Model
	if err != nil {
		return nil, err
	}
	effect.LedTo = c.countSkillCalls(response.Message.ToolCalls)
	got := &reply{Usage: models.Usage{
		PromptTokens: used.PromptTokens, CompletionTokens: used.CompletionTokens, TotalTokens: used.TotalTokens,
		CachedTokens: used.CachedTokens, CacheWriteTokens: used.CacheWriteTokens, Estimated: used.Estimated,
	}, CostUSD: cost, Activity: effect.ActivityID}
	if used.UnknownTokens > 0 {
		got.Unknown = &unknownSpend{used.UnknownTokens, used.UnknownUSD}
	}
	if response.FinishReason == models.FinishLength {
		l.markTruncated(ctx, &response, c)
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

// countSkillCalls counts the skills that an answer calls. The cost of the model call is charged to these skills.
func (c *modelCall) countSkillCalls(made []models.ToolCall) map[string]int {
	called := map[string]int{}
	for _, m := range made {
		if c.skill != nil && c.skill(m.Name) {
			called[m.Name]++
		}
	}
	return called
}

// isSkill reports whether a name belongs to a skill that no tool hides.
func (w *turn) isSkill(name string) bool {
	return slices.ContainsFunc(w.skills, func(s skills.Skill) bool { return s.Name == name }) &&
		!slices.ContainsFunc(w.Tools, func(t Tool) bool { return t.Name == name })
}

// shown returns the usage for the activity log.
func (r *reply) shown() activity.Usage {
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

// markTruncated appends a note to an answer that its limit cut. Cut calls fail their validation instead.
func (l *Loop) markTruncated(ctx context.Context, response *models.Response, c *modelCall) {
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

// definitions returns the tools for the model. A skill with the name of a tool is omitted, because servers reject
// duplicate names.
func (w *turn) definitions() []models.Tool {
	tools := w.ofSkills(w.skills[:w.first])
	for _, t := range w.Tools {
		tools = append(tools, models.Tool{Name: t.Name, Description: t.Description, Parameters: t.schema()})
	}
	slices.SortStableFunc(tools, func(a, b models.Tool) int { return strings.Compare(a.Name, b.Name) })
	return append(tools, w.ofSkills(w.skills[w.first:])...)
}

// ofSkills returns the definitions of skills that no tool hides.
func (w *turn) ofSkills(list []skills.Skill) []models.Tool {
	tools := make([]models.Tool, 0, len(w.skills)+len(w.Tools))
	for _, s := range list {
		if !slices.ContainsFunc(w.Tools, func(t Tool) bool { return t.Name == s.Name }) {
			tools = append(tools, s.Tool())
		}
	}
	return tools
}

// names returns the names of all callable tools.
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

// ApprovalMode decides how a turn handles a call that needs an approval.
type ApprovalMode int

const (
	// Defer records the request and continues; a later run makes the call.
	Defer ApprovalMode = iota
	// Park waits durably for the decision and makes an approved call.
	Park
)

// ToolEvent is the start, or with Done the end, of a tool call in this process.
type ToolEvent struct {
	ID        string          // of the call
	Name      string          // of the tool
	Arguments json.RawMessage // of the model; may be invalid JSON
	Done      bool
	Status    string // of a done call: success, error, denied or pending_approval
	Result    string // of a done call, for the model
	Error     string // of a failed or refused call
	Duration  time.Duration
	// ApprovalID is the requested approval of the call; empty for none.
	ApprovalID string
}

// flushTimeout bounds the wait for callbacks.
const flushTimeout = 3 * time.Second

// callbacks calls a turn's callbacks in order, in a goroutine of its own. A slow or panicking callback does not delay
// the turn.
type callbacks struct {
	log *slog.Logger

	mu        sync.Mutex
	queue     []func()
	closed    bool          // the queue accepts no more
	abandoned bool          // run calls no more callbacks
	wake      chan struct{} // has room for one signal
	done      chan struct{}
}

// queueCallbacks redirects a turn's callbacks to a queue; nil without callbacks. The caller must close it.
func (l *Loop) queueCallbacks(ctx context.Context, t *Turn) *callbacks {
	if t.OnDelta == nil && t.OnRestart == nil && t.OnTool == nil && t.OnApproval == nil {
		return nil
	}
	v := &callbacks{log: l.log(), wake: make(chan struct{}, 1), done: make(chan struct{})}
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

func (v *callbacks) add(show func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.closed {
		v.queue = append(v.queue, show)
		v.signal()
	}
}

func (v *callbacks) signal() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// run calls the queued callbacks until close.
func (v *callbacks) run(ctx context.Context) {
	defer close(v.done)
	for {
		batch, over := v.drain()
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

func (v *callbacks) drain() (batch []func(), over bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	batch, v.queue = v.queue, nil
	return batch, v.closed
}

// call calls one callback. It returns false if the turn abandoned the queue.
func (v *callbacks) call(ctx context.Context, show func()) (goOn bool) {
	v.mu.Lock()
	goOn = !v.abandoned
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

// flush waits, within flushTimeout, for the queued callbacks. After a durable wait, another process may continue with
// the data that the callbacks stored.
func (v *callbacks) flush(ctx context.Context) {
	if v == nil {
		return
	}
	shown := make(chan struct{})
	v.add(func() { close(shown) })
	timer := time.NewTimer(flushTimeout)
	defer timer.Stop()
	select {
	case <-shown:
	case <-v.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

// close waits, within flushTimeout, for all callbacks. No callback starts after close returns.
func (v *callbacks) close(ctx context.Context) {
	if v == nil {
		return
	}
	v.mu.Lock()
	v.closed = true
	v.signal()
	v.mu.Unlock()
	timer := time.NewTimer(flushTimeout)
	defer timer.Stop()
	select {
	case <-v.done:
	case <-timer.C:
		v.mu.Lock()
		v.abandoned = true
		v.mu.Unlock()
		v.log.WarnContext(ctx, "callbacks of a turn did not keep up and were left behind")
	}
}

func (w *turn) toolStarted(c *call) {
	if c.live {
		return
	}
	c.live, c.began = true, time.Now()
	if w.OnTool != nil {
		w.OnTool(c.event())
	}
}

// toolEnded reports the end of a call that this process made.
func (w *turn) toolEnded(c *call, status, failure string) {
	if !c.live || w.OnTool == nil {
		return
	}
	e := c.event()
	e.Done, e.Status, e.Result, e.Error, e.Duration = true, status, c.result, failure, time.Since(c.began)
	w.OnTool(e)
}

// event is the start of a call.
func (c *call) event() ToolEvent {
	e := ToolEvent{ID: c.id, Name: c.name, Arguments: c.args}
	if c.approval != nil {
		e.ApprovalID = c.approval.row.ID
	}
	return e
}

// firstTime reports whether the turn reaches a place for the first time. Without callbacks it records nothing and
// returns false.
func (w *turn) firstTime(ctx context.Context, place string) (first bool, err error) {
	if w.OnTool == nil && w.OnApproval == nil {
		return false, nil
	}
	_, err = executions.Step(ctx, "show "+place, func(context.Context) (struct{}, error) {
		first = true
		return struct{}{}, nil
	})
	return first, err
}

// notifyOnce reports a call that the turn does not make.
func (w *turn) notifyOnce(ctx context.Context, c *call, place, status, failure string) error {
	first, err := w.firstTime(ctx, place)
	if err == nil && first {
		w.toolStarted(c)
		w.toolEnded(c, status, failure)
	}
	return err
}
