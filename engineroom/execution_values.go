package engineroom

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// valuesView holds an execution's input, variables and result, or its latest checkpoint.
type valuesView struct {
	ID, Tab                  string
	Checkpoint               shownValue
	Status                   string
	Input, Variables, Result shownValue
	Summary, Error           shownValue
}

// executionValues reads the row's values, each up to maxValue characters.
func (room *Room) executionValues(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(executionSubject)
	view := valuesView{ID: subject.ID, Tab: subject.Tab}
	if subject.Tab == "checkpoint" {
		var err error
		view.Checkpoint, err = room.latestCheckpoint(ctx, subject.ID)
		return view, err
	}
	var input, variables, result, summary, failure string
	err := room.Read.QueryRow(ctx, `
		select e.status, left(v.input, 8192), octet_length(v.input), left(v.variables, 8192), octet_length(v.variables),
		       left(v.result, 8192), octet_length(v.result), left(e.result_summary, 8192), octet_length(e.result_summary),
		       left(v.error, 8192), octet_length(v.error)
		  from agent_executions e
		 cross join lateral (select e.input::text as input, e.variables::text as variables,
		                            coalesce(e.result::text, '') as result, coalesce(e.error_message, '') as error) v
		 where e.id = @id`, postgres.Strict{"id": subject.ID}).
		Scan(&view.Status, &input, &view.Input.Bytes, &variables, &view.Variables.Bytes, &result, &view.Result.Bytes,
			&summary, &view.Summary.Bytes, &failure, &view.Error.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read the values of the execution: %w", err)
	}
	hide, err := room.hidesTextsOf(ctx, subject.ID)
	if err != nil {
		return nil, err
	}
	hideJSON(hide, &input, &view.Input.Bytes)
	hideJSON(hide, &variables, &view.Variables.Bytes)
	hideJSON(hide, &result, &view.Result.Bytes)
	if hide && summary != "" {
		summary, view.Summary.Bytes = activity.HiddenText, int64(len(activity.HiddenText))
	}
	view.Input, view.Variables = shownJSON(input, view.Input.Bytes), shownJSON(variables, view.Variables.Bytes)
	view.Result = shownJSON(result, view.Result.Bytes)
	view.Summary, view.Error = shownText(summary, view.Summary.Bytes), shownText(failure, view.Error.Bytes)
	return view, nil
}

// latestCheckpoint reads the newest checkpoint of an execution, as JSON; empty for none.
func (room *Room) latestCheckpoint(ctx context.Context, id string) (shownValue, error) {
	rows, err := room.Read.Query(ctx, `
		select left(j.text, 8192), octet_length(j.text) from (
		  select case when @hide then jsonb_set(c.row, '{output}', to_jsonb(@note::text)) else c.row end::text as text from (
		    select to_jsonb(k) as row from agent_checkpoints k where k.execution_id = @id
		     order by k.created_at desc, k.step desc limit 1) c) j`, customPlan,
		postgres.Strict{"id": id, "hide": activity.HidesTexts(ctx), "note": activity.HiddenText})
	var body string
	var size int64
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&body, &size}, func() error { return nil })
	}
	if err != nil {
		return shownValue{}, fmt.Errorf("read the latest checkpoint: %w", err)
	}
	return shownJSON(body, size), nil
}

// stepsOffered bounds the recorded steps that the fork form offers.
const stepsOffered = 200

// forkForm holds the defaults of the fork form.
type forkForm struct {
	ID, From string
	Flow     string
	Why      string // reason why the execution cannot be forked; empty if it can
	Data     bool   // the flow is a document with versions
	Input    string
	Hidden   bool     // the input is too long or redacted, so the form does not show it
	Steps    []string // newest recorded steps, from which the fork can start
}

// executionFork reads the fork form. It is not live, because an update would lose edits.
func (room *Room) executionFork(ctx context.Context, req *pageRequest) (any, error) {
	subject := req.Subject.(executionSubject)
	f := forkForm{ID: subject.ID, From: subject.From}
	var size int64
	err := room.Read.QueryRow(ctx, `
		select left(e.flow, 200), e.flow_version is not null, left(i.text, 8192), octet_length(i.text)
		  from agent_executions e cross join lateral (select e.input::text as text) i where e.id = @id`,
		postgres.Strict{"id": subject.ID}).Scan(&f.Flow, &f.Data, &f.Input, &size)
	if err != nil {
		return nil, fmt.Errorf("read the input of the execution: %w", err)
	}
	if f.Why = room.Unforkable()[f.Flow]; f.Why != "" {
		return f, nil
	}
	hide, err := room.hidesTextsOf(ctx, subject.ID)
	if err != nil {
		return nil, err
	}
	if f.Hidden = hide || int64(len(f.Input)) < size || isAbridged(f.Input); f.Hidden {
		f.Input = ""
	}
	f.Steps, err = postgres.Values[string](ctx, room.Read, "read recorded steps", `
		select c.step from agent_checkpoints c where c.execution_id = @id and octet_length(c.step) <= 300
		 order by c.created_at desc, c.step desc limit @limit`, postgres.Strict{"id": subject.ID, "limit": stepsOffered})
	return f, err
}

// isAbridged reports whether the page shows JSON incompletely. An edit of the shown text would lose the rest.
func isAbridged(text string) bool {
	shown := shownJSON(text, int64(len(text)))
	return !shown.Whole || shown.Text != formatJSON(text) || strings.ContainsFunc(text, isInvisible)
}
