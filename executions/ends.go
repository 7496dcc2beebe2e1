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
	wanted    bool            // somebody waits for the row
	last      *point          // the step that ended just before; nil for none
}

// finished is what became of an end.
type finished struct {
	freed int        // lanes
	row   *Execution // as it ended, where it was wanted and the end was shared
}

// endSingly writes an end that comes alone: as a batch of one, or, where it has more to do than a batch does, by itself.
func (r *run) endSingly(ctx context.Context, end lastWrite) (finished, error) {
	got, err := r.e.finishSeveral(ctx, []lastWrite{end})
	if err != nil || got[0].alone {
		return r.endAlone(ctx, end)
	}
	return got[0].value, nil
}

// endAlone writes an end with all that follows from it, such as the lanes that it frees, in one transaction.
func (r *run) endAlone(ctx context.Context, end lastWrite) (done finished, err error) {
	err = r.with(ctx, end.variables, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			if end.last != nil { // whose fence locks the row more weakly than the end does
				b.Queue(`select from agent_executions where id = @id and claim = @claim for update`, postgres.Strict{"id": end.id, "claim": end.claim})
				end.last.queue(b)
			}
			b.Queue(`select finish_agent_execution(@id, @claim, @status, @summary, @result, @error, @step)`, postgres.Strict{
				"id": end.id, "claim": end.claim, "status": string(end.status), "summary": end.summary,
				"result": end.result, "error": end.failure, "step": end.step,
			}).QueryRow(func(row pgx.Row) error { return row.Scan(&done.freed) })
			r.queueVariables(b, text)
		})
	})
	return done, err
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
	var lasts []point
	for i, x := range ends {
		ids[i], claims[i], statuses[i], summaries[i], wanted[i] = x.id, x.claim, string(x.status), x.summary, x.wanted
		results[i], failures[i], steps[i], variables[i] = jsonText(x.result), x.failure, x.step, jsonText(x.variables)
		answers[i].alone = true
		if x.last != nil {
			lasts = append(lasts, *x.last)
		}
	}
	b := &pgx.Batch{}
	if len(lasts) > 0 {
		queueSteps(b, lasts)
	}
	b.Queue(`
		select n, `+columns+` from (
		  select d.n, (d.execution).* from end_agent_executions(@ids, @claims, @statuses, @summaries, (@results::text[])::jsonb[],
		         @failures, @steps, (@variables::text[])::jsonb[], @wanted) d) x`,
		postgres.Strict{
			"ids": ids, "claims": claims, "statuses": statuses, "summaries": summaries, "results": results, "failures": failures,
			"steps": steps, "variables": variables, "wanted": wanted,
		}).Query(func(rows pgx.Rows) error {
		for rows.Next() {
			var place int
			var x *Execution
			into := make([]any, executionColumns)
			if rows.RawValues()[1] != nil {
				x = &Execution{}
				into = x.targets()
			}
			if err := rows.Scan(append([]any{&place}, into...)...); err != nil {
				return err
			}
			answers[place-1] = answer[finished]{value: finished{row: x}}
		}
		return rows.Err()
	})
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
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
