package chat

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// summaryInput is the input of a summary's execution.
type summaryInput struct {
	Thread string `json:"thread_id"`
	Before int64  `json:"before_turn"` // the first turn that is not summarised
}

// summarySpec describes the execution that extends the summary of the thread after this turn. It runs in the
// background.
func (t *turn) summarySpec() executions.Spec {
	return executions.Spec{
		Flow: SummaryFlow, Surface: trace.Chat, TraceID: trace.ID(t.exec.TraceID), Agent: t.exec.Agent,
		ParentID: t.exec.ID,
		ThreadID: t.in.Thread, Priority: 3, DedupeKey: "chat_summary:" + t.exec.ID,
		Input: summaryInput{Thread: t.in.Thread, Before: t.turnNumber},
	}
}

// summaryRange is the range of messages that a summary adds.
type summaryRange struct {
	Previous string `json:"previous"`
	From     int64  `json:"from_through"` // the end of the previous summary
	First    int64  `json:"first_turn"`
	Through  int64  `json:"through_turn"`
	Last     int64  `json:"last_seq"`
}

// summarise is the durable function that summarises the old turns of a thread.
func (c *Chat) summarise(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in summaryInput
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	f, err := executions.Step(ctx, "backlog",
		func(ctx context.Context) (summaryRange, error) { return c.backlog(ctx, in) })
	if err != nil || f.Through == 0 {
		return executions.Result{Summary: "no turn is old enough"}, err
	}
	old, err := executions.RetryTransient(ctx, func(ctx context.Context) ([]threads.Message, error) {
		return threads.Turns(ctx, c.Pool, in.Thread, f.First, f.Through+1, f.Last)
	})
	if err != nil {
		return executions.Result{}, err
	}
	messages := make([]models.Message, len(old))
	for i, m := range old {
		messages[i] = models.Message{Role: m.Role, Content: m.Content}
		if m.Images > 0 {
			messages[i].Content += fmt.Sprintf("\n[%d images came with this message]", m.Images)
		}
	}
	text, err := c.Summarise(ctx, SummaryFlow, f.Previous, messages)
	if err != nil {
		return executions.Result{}, err
	}
	saved, err := executions.StepTx(ctx, "save", func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return threads.SaveSummary(ctx, tx, in.Thread, f.From, f.Through, truncate(text, maxSummary))
	})
	summary := fmt.Sprintf("%d messages folded into the summary, up to turn %d", len(old), f.Through)
	if !saved {
		summary = "another process has extended the summary"
	}
	return executions.Result{Summary: summary}, err
}

// maxSummary bounds a summary, in characters.
const maxSummary = 4000

// backlog selects the turns to summarise: those beyond half of the window, at most one window at a time.
func (c *Chat) backlog(ctx context.Context, in summaryInput) (summaryRange, error) {
	t, err := threads.Get(ctx, c.Pool, in.Thread)
	if err != nil {
		return summaryRange{}, err
	}
	old, err := threads.Backlog(ctx, c.Pool, in.Thread, in.Before, c.History*3/4, c.History/2, c.History)
	if err != nil || len(old) == 0 {
		return summaryRange{}, err
	}
	f := summaryRange{Previous: t.Summary, From: t.SummaryThrough, First: *old[0].Turn, Through: *old[len(old)-1].Turn}
	for _, m := range old {
		f.Last = max(f.Last, *m.Seq)
	}
	return f, nil
}
