package reason

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
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

// callInput is the input of a model call's activity: its new messages and the tools' names. With the outputs, the
// activities of a turn together show its transcript after the history, as trimmed and bounded per row.
type callInput struct {
	Messages []models.Message `json:"messages"`
	Earlier  int              `json:"earlier_messages"`
	Tools    []string         `json:"tools"`
}

type modelCall struct {
	purpose     string
	shown       any // input of the activity
	request     models.Request
	account     *account
	timeLimit   time.Duration          // bound of the whole turn; 0 for none
	usedTime    func() time.Duration   // used part of time
	isSkill     func(name string) bool // reports whether a tool is a skill; nil without skills
	hasFallback bool                   // there is a fallback model
	prompt      *prompts.Record
}

// callModel sends the transcript to the turn's model, or to a fallback, as a durable step.
func (w *turn) callModel(ctx context.Context) (*reply, error) {
	fresh := min(w.newCount, len(w.messages))
	w.newCount = 0
	if w.account == nil {
		w.account = w.newAccount(ctx, &w.Turn, w.budget, w.agent)
	}
	request := models.Request{
		Messages: w.messages, Tools: w.definitions(), Effort: w.agent.Effort, Temperature: w.temperature(),
		Schema: w.Form.schema(), OnDelta: w.OnDelta, OnRestart: w.OnRestart,
	}
	shown := callInput{
		Messages: models.Shown(w.messages[len(w.messages)-fresh:]), Earlier: len(w.messages) - fresh, Tools: w.names(),
	}
	resp, err := w.withFallback(ctx, func(model string, hasFallback bool) (*reply, error) {
		request.Model, request.Fallback = model, hasFallback
		return w.callDurably(ctx, &modelCall{
			purpose: w.Purpose, shown: shown, request: request, account: w.account,
			timeLimit: w.budget.Time, usedTime: w.usedTime,
			isSkill: w.isSkill, hasFallback: hasFallback,
		})
	})
	if err != nil {
		return nil, err
	}
	w.elapsed, w.measuredAt = resp.Spent, time.Now()
	return resp, nil
}

// withFallback tries the turn's models in order. It drops an unavailable model for the rest of the turn. If no model
// answers, the error has the failure of each.
func (w *turn) withFallback(
	ctx context.Context, callModel func(model string, hasFallback bool) (*reply, error),
) (*reply, error) {
	earlier := ""
	for {
		model := w.models[0]
		got, err := callModel(model, len(w.models) > 1)
		failure, ok := errors.AsType[*executions.StepError](err)
		switch {
		case ok && failure.Class == classModel && earlier != "":
			return got, stepError(classModel, "%sfallback %s: %s", earlier, model, failure.Message)
		case !ok || failure.Class != classUnavailable:
			return got, err
		case earlier != "":
			earlier += "fallback " + model + ": "
		}
		earlier += failure.Message + "; "
		w.log().WarnContext(ctx, "model unavailable, falling back", "model", model, "fallback", w.models[1],
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

// The classes of failed calls.
const (
	classModel       = "model"
	classUnavailable = "model_unavailable" // the model is unavailable and has a fallback
)

// usedTime returns the used time of the turn. It excludes durable waits, and the work of a lost process after its last
// recorded answer.
func (w *turn) usedTime() time.Duration { return w.elapsed + time.Since(w.measuredAt) }

// callDurably makes one model call as a durable step; the loop makes no other. The transaction of the intent reserves
// the worst case, and the transaction of the result settles the usage. A limit returns an *executions.StepError for
// limitFromError.
func (l *Loop) callDurably(ctx context.Context, c *modelCall) (*reply, error) {
	r, err := c.account.newReservation(ctx, l.Model, c.request)
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
		l.Model.ObserveUsage(r.quote, got.Usage) // also for an answer of another process
	}
	return got, nil
}

// complete sends the request within the remaining time.
func (l *Loop) complete(ctx context.Context, c *modelCall, r *reservation, effect *executions.Effect) (*reply, error) {
	limited := ctx
	if c.timeLimit > 0 {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(ctx, c.timeLimit-c.usedTime())
		defer cancel()
	}
	got, err := l.send(limited, c, r, effect)
	var refused *models.Error
	var limit *executions.StepError
	switch {
	case err != nil && errors.Is(limited.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		return nil, stepError(classBudget, "the turn's time of %s has run out", c.timeLimit)
	case errors.As(err, &limit):
		return nil, limit
	case errors.As(err, &refused) && refused.Unavailable() && c.hasFallback:
		return nil, &executions.StepError{Class: classUnavailable, Message: err.Error()}
	case errors.As(err, &refused):
		return nil, &executions.StepError{Class: classModel, Message: err.Error()}
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
	effect.Usage, effect.CostUSD = r.recordUsage(models.Response{Unknown: true})
	if ctx.Err() != nil {
		effect.Usage, effect.CostUSD = r.recordUsage(models.Response{})
		return nil, ctx.Err()
	}
	response, err := l.Model.Complete(ctx, c.request)
	settle := effect.OnResult
	effect.OnResult = func(b *pgx.Batch) {
		c.prompt.Amend(ctx, l.log(), b, effect.ActivityID, response.Sent)
		settle(b)
	}
	l.Model.ObserveUsage(r.quote, response.Usage) // before settling frees budget for others
	used, cost := r.recordUsage(response)
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
	if c.usedTime != nil {
		got.Spent = c.usedTime()
	}
	return got, nil
}

// countSkillCalls counts the skills that an answer calls. The cost of the model call is charged to these skills.
func (c *modelCall) countSkillCalls(toolCalls []models.ToolCall) map[string]int {
	called := map[string]int{}
	for _, m := range toolCalls {
		if c.isSkill != nil && c.isSkill(m.Name) {
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
	tools := w.skillDefinitions(w.skills[:w.offeredCount])
	for _, t := range w.Tools {
		tools = append(tools, models.Tool{Name: t.Name, Description: t.Description, Parameters: t.schema()})
	}
	slices.SortStableFunc(tools, func(a, b models.Tool) int { return strings.Compare(a.Name, b.Name) })
	return append(tools, w.skillDefinitions(w.skills[w.offeredCount:])...)
}

// skillDefinitions returns the definitions of skills that no tool hides.
func (w *turn) skillDefinitions(list []skills.Skill) []models.Tool {
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
