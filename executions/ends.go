package executions

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lastWrite is the end of a run, as it is written.
type lastWrite struct {
	id        string
	claim     int64
	status    Status
	summary   string
	result    json.RawMessage
	failure   *string
	step      *string
	variables json.RawMessage // nil when the row has them
}

// finishSeveral writes ends in one commit, each under its own claim, and answers how many lanes each freed: none, because
// what holds any is left to be ended by itself, as is one whose claim is not live any more.
func (e *Engine) finishSeveral(ctx context.Context, ends []lastWrite) ([]answer[int], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(ends)
	ids, claims, statuses, summaries := make([]string, n), make([]int64, n), make([]string, n), make([]string, n)
	results, failures, steps, variables := make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n)
	for i, x := range ends {
		ids[i], claims[i], statuses[i], summaries[i] = x.id, x.claim, string(x.status), x.summary
		results[i], failures[i], steps[i], variables[i] = jsonText(x.result), x.failure, x.step, jsonText(x.variables)
	}
	rows, err := e.pool.Query(ctx, `
		select n, verdict = 'alone' from finish_agent_executions(@ids, @claims, @statuses, @summaries, (@results::text[])::jsonb[],
		       @failures, @steps, (@variables::text[])::jsonb[])`,
		postgres.Strict{
			"ids": ids, "claims": claims, "statuses": statuses, "summaries": summaries, "results": results, "failures": failures,
			"steps": steps, "variables": variables,
		})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	answers := make([]answer[int], n)
	var at int
	var alone bool
	_, err = pgx.ForEachRow(rows, []any{&at, &alone}, func() error {
		answers[at-1].alone = alone
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	return answers, nil
}

// jsonText is JSON as a parameter of an array; nil for none.
func jsonText(text json.RawMessage) *string {
	if text == nil {
		return nil
	}
	s := string(text)
	return &s
}
