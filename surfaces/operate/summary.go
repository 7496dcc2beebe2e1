package operate

import (
	"context"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/threads"
)

// backlog is what of a session is to be summarised now.
type backlog struct {
	From    int64             `json:"from"` // how far the present summary reaches
	Summary string            `json:"summary"`
	Old     []threads.Message `json:"old"`
}

// summarise folds the oldest turns into the session's summary when they no longer fit a turn's history. A session
// without a summary goes on with a shorter memory, so a failure is only logged.
func (o *Operate) summarise(ctx context.Context, session string) {
	b, err := executions.Step(ctx, "backlog", func(ctx context.Context) (b backlog, err error) {
		t, err := threads.Get(ctx, o.Pool, session)
		if err != nil {
			return b, err
		}
		b.From, b.Summary = t.SummaryThrough, t.Summary
		b.Old, err = threads.Backlog(ctx, o.Pool, session, 0, o.History, o.History/2, 2*o.History)
		return b, err
	})
	if err != nil || len(b.Old) == 0 {
		o.unsummarised(ctx, session, err)
		return
	}
	text, err := o.Loop.Summarise(ctx, "summary", b.Summary, spoken(b.Old))
	if err != nil {
		o.unsummarised(ctx, session, err)
		return
	}
	_, err = executions.Step(ctx, "save summary", func(ctx context.Context) (bool, error) {
		return threads.SaveSummary(ctx, o.Pool, session, b.From, *b.Old[len(b.Old)-1].Turn, text)
	})
	o.unsummarised(ctx, session, err)
}

func (o *Operate) unsummarised(ctx context.Context, session string, err error) {
	if err != nil && !executions.IsControl(err) {
		o.log.WarnContext(ctx, "session not summarised", "session", session, "error", err)
	}
}
