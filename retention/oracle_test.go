package retention_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The oracle computes in Go which rows a pass deletes. It reads all rows and applies the rules of docs/retention.md. It
// uses no function of the database.

type execution struct {
	ID, TraceID, WaitingFor, WaitingKey, DedupeKey, ThreadID string
	ParentID                                                 string
	CreatedAt                                                time.Time
	CompletedAt                                              *time.Time
}

type event struct {
	ID, Event, Key, ExternalID, ExecutionID, ConsumedBy string
	CreatedAt                                           time.Time
}

type approval struct {
	ID, TraceID, ExecutionID, Status, ConsumedFor string
	Parked                                        bool
	CreatedAt, ExpiresAt                          time.Time
	DecidedAt, ConsumedAt                         *time.Time
}

// row is a row of any other table, with the columns that its rule reads. InUse reports that a pass must keep it.
type row struct {
	ID, Status, TraceID, ExecutionID, ThreadID string
	CreatedAt, EndedAt                         time.Time
	InUse                                      bool
}

type oracle struct {
	now        time.Time
	executions map[string]execution
	events     []event
	approvals  map[string]approval
	rows       map[string][]row // by table
}

// tableQueries has the query for the rows of each other table.
var tableQueries = map[string]string{
	"activity": `select a.id::text, '', a.trace_id, coalesce(a.execution_id::text, ''), '', a.created_at, a.created_at,
		exists (select from agent_activity_open o where o.activity_id = a.id)
		or exists (select from agent_activity_uncounted u where u.activity_id = a.id)
		from agent_activity a where a.skill_name = 's'`,
	"prompts": `select p.activity_id::text, '', '', '', '', p.created_at, p.created_at,
		exists (select from agent_activity_open o where o.activity_id = p.activity_id) from agent_prompts p`,
	"checkpoints": `select execution_id || ' ' || step, '', '', execution_id::text, '', created_at, created_at, false
		from agent_checkpoints`,
	"changes":  `select execution_id || ' ' || n, '', '', execution_id::text, '', at, at, false from agent_status_changes`,
	"requests": `select id::text, '', '', execution_id::text, '', created_at, created_at, false from agent_requests`,
	"drafts": `select execution_id::text, '', '', execution_id::text, '', updated_at, updated_at, false
		from agent_message_drafts`,
	"threads": `select id, '', '', '', '', updated_at, updated_at, false from agent_threads`,
	"messages": `select id::text, status, '', coalesce(execution_id::text, ''), thread_id, created_at, created_at, false
		from agent_messages`,
	"runs": `select id::text, status, '', coalesce(execution_id::text, ''), '', created_at,
		coalesce(finished_at, claimed_at), false
		from agent_automation_runs`,
	"deliveries": `select id::text, status, '', coalesce(execution_id::text, ''), '', received_at, finished_at, false
		from agent_webhook_deliveries`,
	"channel_messages": `select id::text, status, '', '', '', received_at,
		coalesce(finished_at, received_at), false from agent_channel_messages`,
	"outbox":      `select id::text, status, '', '', '', created_at, finished_at, false from agent_webhook_outbox`,
	"budgets":     `select scope, '', '', '', '', created_at, created_at, reserved_tokens > 0 from agent_budgets`,
	"counts":      `select span || skill, span, '', '', '', start, start, false from agent_activity_counts`,
	"unpublished": `select execution_id::text, '', '', execution_id::text, '', now(), now(), false from agent_unpublished_completions`,
	"locks": `select lane, '', '', coalesce(execution_id::text, ''), lane, now(), now(), locked_by <> ''
		and (parked or expires_at > now())
		from agent_locks`,
	"reservations": `select execution_id || step, '', '', execution_id::text, '', now(), now(), false
		from agent_budget_reservations`,
	"calls":  `select id::text, '', '', '', '', now(), now(), collected_at is null from agent_mcp_calls`,
	"memory": `select id::text, '', '', '', '', created_at, created_at, false from agent_memory`,
}

func readOracle(t *testing.T, db postgres.DB) *oracle {
	t.Helper()
	o := &oracle{
		executions: map[string]execution{}, approvals: map[string]approval{}, rows: map[string][]row{},
		now: pgtest.Value[time.Time](t, db, `select now()`),
	}
	for _, x := range pgtest.Rows[execution](t, db,
		`select id::text, trace_id, coalesce(waiting_for, ''), coalesce(waiting_key, ''), coalesce(dedupe_key, ''),
		coalesce(thread_id, ''), coalesce(parent_id::text, ''), created_at, completed_at from agent_executions`) {
		o.executions[x.ID] = x
	}
	o.events = pgtest.Rows[event](t, db, `select id::text, event, key, coalesce(external_id, ''),
		coalesce(execution_id::text, ''), coalesce(consumed_by::text, ''),
		created_at from agent_events`)
	for _, a := range pgtest.Rows[approval](t, db,
		`select id::text, trace_id, coalesce(execution_id::text, ''), status, consumed_for, parked, created_at,
		expires_at, decided_at, consumed_at from agent_approvals`) {
		o.approvals[a.ID] = a
	}
	for name, sql := range tableQueries {
		o.rows[name] = pgtest.Rows[row](t, db, sql)
	}
	return o
}

func (o *oracle) unfinished(id string) bool {
	x, ok := o.executions[id]
	return ok && x.CompletedAt == nil
}

func (o *oracle) anyRow(table string, is func(row) bool) bool {
	return slices.ContainsFunc(o.rows[table], is)
}

// hasOpenApproval reports whether a trace has an unused approval.
func (o *oracle) hasOpenApproval(trace string) bool {
	for _, a := range o.approvals {
		if a.TraceID == trace && (a.Status == "pending" || a.Status == "approved") && a.ExpiresAt.After(o.now) {
			return true
		}
	}
	return false
}

// cutoff returns the time before which a pass deletes rows of a kind; ok is false for the policy forever.
func (o *oracle) cutoff(policy map[string]string, kind string) (cutoff time.Time, ok bool) {
	if kind == "prompts" { // a prompt is kept no longer than its model call
		log, logEnds := o.cutoff(policy, "activity")
		cutoff, ok = o.cutoffOf(policy, kind)
		if logEnds && (!ok || log.After(cutoff)) {
			cutoff = log
		}
		return cutoff, ok || logEnds
	}
	return o.cutoffOf(policy, kind)
}

// cutoffOf is cutoff by the policy of the kind alone.
func (o *oracle) cutoffOf(policy map[string]string, kind string) (cutoff time.Time, ok bool) {
	days, err := strconv.Atoi(strings.TrimSuffix(policy[kind], "d"))
	if err != nil {
		return cutoff, false
	}
	cutoff = o.now.AddDate(0, 0, -days)
	if kind == "activity" && days >= 60 {
		cutoff = time.Date(cutoff.UTC().Year(), cutoff.UTC().Month(), 1, 0, 0, 0, 0, time.UTC)
	}
	if kind == "hour_counts" {
		cutoff = cutoff.Truncate(time.Hour)
	}
	return cutoff, true
}

// deletableExecutions reports, for each execution, whether a pass deletes it.
func (o *oracle) deletableExecutions(cutoff time.Time) map[string]bool {
	deletable := map[string]bool{}
	for id, x := range o.executions {
		is := func(r row) bool { return r.ExecutionID == id }
		keep := x.CreatedAt.After(cutoff) || o.hasOpenApproval(x.TraceID) || o.unfinished(x.ParentID) ||
			o.anyRow("unpublished", is) ||
			o.anyRow("locks", is) ||
			o.anyRow("reservations", is) ||
			o.anyRow("runs", func(r row) bool { return r.ExecutionID == id && r.Status == "claimed" }) ||
			o.anyRow("messages", func(r row) bool {
				return r.ExecutionID == id && (r.Status == "queued" || r.Status == "sending")
			}) ||
			o.anyRow("calls", func(r row) bool { return r.InUse && "mcp.call "+r.ID == x.DedupeKey })
		for _, y := range o.executions {
			keep = keep || y.TraceID == x.TraceID && (y.CompletedAt == nil || y.CompletedAt.After(cutoff)) ||
				y.ParentID == id && y.CompletedAt == nil || y.WaitingFor == "agent" && y.WaitingKey == id
		}
		for _, v := range o.events {
			keep = keep || v.ExternalID == "completed "+id && o.unfinished(v.ConsumedBy)
		}
		deletable[id] = !keep
	}
	return deletable
}

// deleteExecutions deletes executions with their dependent rows.
func (o *oracle) deleteExecutions(deletable map[string]bool) {
	for _, table := range []string{"checkpoints", "changes", "requests", "drafts"} {
		o.rows[table] = slices.DeleteFunc(o.rows[table], func(r row) bool { return deletable[r.ExecutionID] })
	}
	o.events = slices.DeleteFunc(o.events, func(v event) bool {
		end, isEnd := strings.CutPrefix(v.ExternalID, "completed ")
		decided, isApproval := strings.CutPrefix(v.ExternalID, "approval ")
		a := o.approvals[decided]
		return isEnd && deletable[end] || isApproval && a.Parked && deletable[a.ExecutionID]
	})
	for id, deleted := range deletable {
		if deleted {
			delete(o.executions, id)
		}
	}
}

func (o *oracle) eventDeletable(v event, cutoff time.Time) bool {
	switch _, exists := o.executions[v.Key]; {
	case v.CreatedAt.After(cutoff) || o.unfinished(v.ConsumedBy):
		return false
	case v.Event == "AGENT_COMPLETED" && v.ExecutionID == "":
		return !exists
	case v.Event == "AGENT_COMPLETED":
		_, exists = o.executions[v.ExecutionID]
		return !exists
	case v.Event == "APPROVAL_DECIDED":
		_, exists = o.executions[o.approvals[v.Key].ExecutionID]
		return !exists
	case v.Event == "paid" || v.ConsumedBy != "": // no wait expects "paid", and a consumed event has had its wait
		return true
	}
	for _, x := range o.executions {
		if x.CompletedAt == nil && x.CreatedAt.Before(v.CreatedAt.Add(o.now.Sub(cutoff))) {
			return false
		}
	}
	return true
}

func (o *oracle) approvalDeletable(a approval, cutoff time.Time) bool {
	_, exists := o.executions[a.ExecutionID]
	consumer, _, _ := strings.Cut(a.ConsumedFor, " ")
	closed := a.Status == "rejected" || a.Status == "expired" || a.Status == "consumed" || a.ExpiresAt.Before(cutoff)
	return closed && a.CreatedAt.Before(cutoff) && (a.DecidedAt == nil || a.DecidedAt.Before(cutoff)) &&
		(a.ConsumedAt == nil || a.ConsumedAt.Before(cutoff)) && !o.unfinished(a.ExecutionID) &&
		(!a.Parked || !exists) && !o.unfinished(consumer)
}

// threadIdle reports whether a thread has no pending work.
func (o *oracle) threadIdle(id string) bool {
	for _, x := range o.executions {
		if x.CompletedAt == nil && x.ThreadID == id || x.WaitingFor == "response" && x.WaitingKey == id {
			return false
		}
	}
	return !o.anyRow("locks", func(r row) bool { return r.InUse && r.ID == "thread:"+id }) &&
		!o.anyRow("messages", func(r row) bool {
			return r.ThreadID == id && (r.Status == "queued" || r.Status == "sending" || o.unfinished(r.ExecutionID))
		})
}

// prune deletes the rows that a whole pass with a policy deletes.
func (o *oracle) prune(policy map[string]string) {
	if cutoff, ok := o.cutoff(policy, "executions"); ok {
		o.deleteExecutions(o.deletableExecutions(cutoff))
	}
	rules := map[string]func(r row, cutoff time.Time) bool{ // by policy and table
		"automation_runs runs": func(r row, cutoff time.Time) bool {
			return (r.Status == "success" || r.Status == "skipped") && r.EndedAt.Before(cutoff) && !o.unfinished(r.ExecutionID)
		},
		"deliveries deliveries": func(r row, cutoff time.Time) bool {
			return (r.Status == "done" || r.Status == "ignored") && r.EndedAt.Before(cutoff) && !o.unfinished(r.ExecutionID)
		},
		"channel_messages channel_messages": func(r row, cutoff time.Time) bool {
			return r.Status == "done" && r.EndedAt.Before(cutoff)
		},
		"outbox outbox":      func(r row, cutoff time.Time) bool { return r.Status != "pending" && r.EndedAt.Before(cutoff) },
		"prompts prompts":    func(r row, _ time.Time) bool { return !r.InUse },
		"hour_counts counts": func(r row, _ time.Time) bool { return r.Status == "hour" },
		"budgets budgets": func(r row, _ time.Time) bool {
			trace, run := strings.CutPrefix(r.ID, "run:")
			for _, x := range o.executions {
				if run && x.TraceID == trace && x.CompletedAt == nil {
					return false
				}
			}
			return !r.InUse
		},
		"activity activity": func(r row, _ time.Time) bool {
			for _, x := range o.executions {
				if x.TraceID == r.TraceID && x.CompletedAt == nil {
					return false
				}
			}
			return !r.InUse && !o.hasOpenApproval(r.TraceID) && !o.unfinished(r.ExecutionID)
		},
	}
	for policyAndTable, rule := range rules {
		kind, table, _ := strings.Cut(policyAndTable, " ")
		if cutoff, ok := o.cutoff(policy, kind); ok {
			o.rows[table] = slices.DeleteFunc(o.rows[table], func(r row) bool {
				return r.CreatedAt.Before(cutoff) && rule(r, cutoff)
			})
		}
	}
	approvals := o.approvals
	if cutoff, ok := o.cutoff(policy, "approvals"); ok {
		approvals = map[string]approval{}
		for id, a := range o.approvals {
			if !o.approvalDeletable(a, cutoff) {
				approvals[id] = a
			}
		}
	}
	o.approvals = approvals
	if cutoff, ok := o.cutoff(policy, "events"); ok {
		o.events = slices.DeleteFunc(o.events, func(v event) bool { return o.eventDeletable(v, cutoff) })
	}
	if cutoff, ok := o.cutoff(policy, "messages"); ok {
		var idle []string
		for _, r := range o.rows["threads"] {
			if r.CreatedAt.Before(cutoff) && o.threadIdle(r.ID) {
				idle = append(idle, r.ID)
			}
		}
		o.rows["threads"] = slices.DeleteFunc(o.rows["threads"], func(r row) bool { return slices.Contains(idle, r.ID) })
		o.rows["messages"] = slices.DeleteFunc(o.rows["messages"], func(r row) bool {
			return slices.Contains(idle, r.ThreadID)
		})
	}
}

// remaining returns the remaining rows by table, in order.
func (o *oracle) remaining() map[string][]string {
	all := map[string][]string{}
	for name, rows := range o.rows {
		for _, r := range rows {
			all[name] = append(all[name], r.ID)
		}
	}
	for id := range o.executions {
		all["executions"] = append(all["executions"], id)
	}
	for id := range o.approvals {
		all["approvals"] = append(all["approvals"], id)
	}
	for _, v := range o.events {
		all["events"] = append(all["events"], v.ID+" "+v.Event)
	}
	for _, list := range all {
		slices.Sort(list)
	}
	return all
}
