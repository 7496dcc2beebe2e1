package executions

import (
	"context"
	"encoding/json"
	"fmt"

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
	wanted    bool            // somebody waits for the row
}

// finished is what became of an end.
type finished struct {
	freed int        // lanes
	row   *Execution // as it ended, where it was wanted and the end was shared
}

// finishSeveral writes ends in one commit, each under its own claim. They free no lanes, because what holds any is left to
// be ended by itself, as is one whose claim is not live any more.
func (e *Engine) finishSeveral(ctx context.Context, ends []lastWrite) ([]answer[finished], error) {
	ctx, cancel := context.WithTimeout(ctx, e.opts.LeaseTTL)
	defer cancel()
	n := len(ends)
	ids, claims, statuses, summaries := make([]string, n), make([]int64, n), make([]string, n), make([]string, n)
	results, failures, steps, variables := make([]*string, n), make([]*string, n), make([]*string, n), make([]*string, n)
	wanted, answers := make([]bool, n), make([]answer[finished], n)
	for i, x := range ends {
		ids[i], claims[i], statuses[i], summaries[i], wanted[i] = x.id, x.claim, string(x.status), x.summary, x.wanted
		results[i], failures[i], steps[i], variables[i] = jsonText(x.result), x.failure, x.step, jsonText(x.variables)
		answers[i].alone = true
	}
	rows, err := e.pool.Query(ctx, `
		select n, `+columns+` from (
		  select d.n, (d.execution).* from end_agent_executions(@ids, @claims, @statuses, @summaries, (@results::text[])::jsonb[],
		         @failures, @steps, (@variables::text[])::jsonb[], @wanted) d) x`,
		postgres.Strict{
			"ids": ids, "claims": claims, "statuses": statuses, "summaries": summaries, "results": results, "failures": failures,
			"steps": steps, "variables": variables, "wanted": wanted,
		})
	if err != nil {
		return nil, fmt.Errorf("finish %d executions: %w", n, err)
	}
	defer rows.Close()
	for rows.Next() {
		var place int
		var x *Execution
		into := make([]any, executionColumns)
		if rows.RawValues()[1] != nil {
			x = &Execution{}
			into = x.targets()
		}
		if err := rows.Scan(append([]any{&place}, into...)...); err != nil {
			return nil, fmt.Errorf("finish %d executions: %w", n, err)
		}
		answers[place-1] = answer[finished]{value: finished{row: x}}
	}
	if err := rows.Err(); err != nil {
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

// resultType is the result_type that belongs to a terminal status.
func resultType(s Status) string {
	switch s {
	case Completed:
		return "success"
	case Failed:
		return "failure"
	case Pending, Running, Waiting:
		return ""
	case Timeout, Cancelled:
	}
	return string(s)
}
