package executions

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Filter selects executions of a listing. An execution must match all fields that are not zero.
type Filter struct {
	Status, Surface, Flow, Agent string
	Before                       string     // id: the listing continues with older executions
	TraceIDs                     []trace.ID // one of them; see [trace.ParseAny]
	Label                        string     // see [ParseLabel]; searches the newest 10,000 executions with the value
	Statuses                     []string   // one of them
	Since, Until                 time.Time  // bounds of the creation time; Until is exclusive
	Limit                        int        // default 50, at most 1000
}

// listed are the conditions and the order of List.
const listed = `
	     (@value = '' or id = any (array(
	         select l.execution_id from agent_execution_labels l
	          where l.value = @value and (@name = '' or l.name = @name)
	            and (@before = '' or l.execution_id < nullif(@before, '')::uuid)
	          order by l.execution_id desc limit 10000)))
	 and (@status = '' or status = @status)
	 and (@statuses::text[] is null or status = any (@statuses))
	 and (@surface = '' or surface = @surface)
	 and (@flow = '' or flow = @flow)
	 and (@agent = '' or agent = @agent)
	 and (@trace_ids::text[] is null or trace_id = any (@trace_ids))
	 and (@before = '' or id < nullif(@before, '')::uuid)
	 and (@since::timestamptz is null or id >= lanekeeper.agent_uuid7_floor(@since))
	 and (@until::timestamptz is null or id < lanekeeper.agent_uuid7_floor(@until))
	 order by id desc limit @limit`

// List reads executions, newest first. The branches of a flow or a surface have the conditions of their indexes.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Execution, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	name, value := ParseLabel(f.Label)
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_executions
		 where id = any (array(
		         (select id from agent_executions where @flow = '' and @surface = '' and `+listed+`)
		         union all
		         (select id from agent_executions where @flow <> '' and claimed_by is null and `+listed+`)
		         union all
		         (select id from agent_executions
		           where @flow = '' and @surface <> '' and claimed_by is null and parent_id is null and `+listed+`)
		         union all
		         (select id from agent_executions
		           where @flow = '' and @surface <> '' and claimed_by is null and parent_id is not null and `+listed+`)
		         union all
		         (select id from agent_executions
		           where (@flow <> '' or @surface <> '') and claimed_by is not null and `+listed+`)))
		 order by agent_executions.id desc limit @limit`, // an unqualified id would be the text column of the result
		pgx.QueryExecModeCacheDescribe, // a custom plan: a generic plan would scan the table
		postgres.Strict{
			"since": timeBound(f.Since), "until": timeBound(f.Until),
			"status": f.Status, "statuses": f.Statuses,
			"surface": f.Surface, "flow": f.Flow, "agent": f.Agent, "trace_ids": f.TraceIDs,
			"before": f.Before, "limit": min(f.Limit, 1000), "name": name, "value": value,
		})
	return postgres.Collect(rows, err, "list executions", pgx.RowToStructByPos[Execution])
}

// timeBound returns a bound on creation times as an SQL parameter; null for the zero time. It is not before the epoch,
// because ids have no earlier times.
func timeBound(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	if epoch := time.Unix(0, 0); t.Before(epoch) {
		return epoch
	}
	return t
}

// StatusCount is a row of the view agent_executions_by_status: the number and mean age of executions in one state.
type StatusCount struct {
	Status        Status  `json:"status"`
	Count         int64   `json:"count"`
	AvgAgeSeconds float64 `json:"avg_age_seconds"`
}

// CountByStatus counts pending, running and waiting executions.
func CountByStatus(ctx context.Context, db postgres.DB) ([]StatusCount, error) {
	rows, err := db.Query(ctx, `
		select status, count, avg_age_seconds::float8 from agent_executions_by_status order by status`)
	return postgres.Collect(rows, err, "count executions", pgx.RowToStructByPos[StatusCount])
}

// WaitingRow is a row of the views agent_executions_waiting and agent_executions_stuck.
type WaitingRow struct {
	ID           string          `json:"id"`
	TraceID      string          `json:"trace_id"`
	Surface      string          `json:"surface"`
	Agent        string          `json:"agent"`
	Flow         string          `json:"flow"`
	WaitingFor   string          `json:"waiting_for"`
	WaitingKey   string          `json:"waiting_key"`
	WaitingUntil time.Time       `json:"waiting_until"`
	WaitingData  json.RawMessage `json:"waiting_data"`
	Waited       float64         `json:"waited_seconds"`
	ThreadID     *string         `json:"-"`
}

// Redacted returns the row without secrets; see [Execution.Redacted].
func (w WaitingRow) Redacted(ctx context.Context) WaitingRow {
	w.WaitingData = redactValue(w.WaitingData)
	if activity.HidesTexts(ctx) && activity.IsConversation(w.Flow, w.Surface, w.ThreadID) {
		w.WaitingData = activity.HiddenJSON(w.WaitingData)
	}
	return w
}

// ListWaiting reads at most 500 waiting executions in the order of their deadlines. kind selects one kind of wait.
// stuck selects executions whose deadline has passed and that had no update for an hour.
func ListWaiting(ctx context.Context, db postgres.DB, kind string, stuck bool, limit int) ([]WaitingRow, error) {
	rows, err := db.Query(ctx, `
		select w.id::text, w.trace_id, w.surface, w.agent, w.flow, coalesce(w.waiting_for, ''), coalesce(w.waiting_key, ''),
		       w.waiting_until, w.waiting_data, extract(epoch from w.waiting_time)::float8,
		       (select x.thread_id from agent_executions x where x.id = w.id)
		  from agent_executions_waiting w
		 where (@kind = '' or w.waiting_for = @kind)
		   and (not @stuck or w.id in (select s.id from agent_executions_stuck s))
		 order by w.waiting_until, w.id limit @limit`,
		postgres.Strict{"kind": kind, "stuck": stuck, "limit": min(max(limit, 1), 500)})
	return postgres.Collect(rows, err, "list waiting executions", pgx.RowToStructByPos[WaitingRow])
}

// Relative is a child or a fork of an execution.
type Relative struct {
	ID     string `json:"id"`
	Flow   string `json:"flow"`
	Status Status `json:"status"`
	// From is the first step that the fork runs again. It is empty for children and for forks that keep every step.
	From string `json:"from"`
	Fork bool   `json:"fork"`
}

// Relatives reads at most 500 children and forks of an execution, oldest first.
func Relatives(ctx context.Context, db postgres.DB, id string) ([]Relative, error) {
	rows, err := db.Query(ctx, `
		select id::text, flow, status, coalesce(forked_step, ''), coalesce(forked_from = @id::uuid, false)
		  from agent_executions
		 where parent_id = @id::uuid or forked_from = @id::uuid
		 order by id limit 500`, postgres.Strict{"id": id})
	return postgres.Collect(rows, err, fmt.Sprintf("list children of execution %s", id), pgx.RowToStructByPos[Relative])
}
