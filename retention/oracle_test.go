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

// The oracle computes in Go the rows that a pass deletes. It reads all rows and applies the rules of docs/retention.md,
// without the functions of the database.

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
	DecidedAt                                     *time.Time
}

// row is a row of any other table, with the columns that its rule may read.
type row struct {
	ID, Status, TraceID, ExecutionID, Of string
	At, Over                             time.Time
	Held                                 bool
}

type world struct {
	now        time.Time
	executions map[string]execution
	events     []event
	approvals  map[string]approval
	rows       map[string][]row // by table
}

// tables are the tables whose rules need only these rows.
var tables = map[string]string{
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
	"outbox":  `select id::text, status, '', '', '', created_at, finished_at, false from agent_webhook_outbox`,
	"budgets": `select scope, '', '', '', '', created_at, created_at, reserved_tokens > 0 from agent_budgets`,
	"counts":  `select span || skill, span, '', '', '', start, start, false from agent_activity_counts`,
	"untold":  `select execution_id::text, '', '', execution_id::text, '', now(), now(), false from agent_unpublished_completions`,
	"locks": `select lane, '', '', coalesce(execution_id::text, ''), lane, now(), now(), locked_by <> ''
		and (parked or expires_at > now())
		from agent_locks`,
	"reservations": `select execution_id || step, '', '', execution_id::text, '', now(), now(), false
		from agent_budget_reservations`,
	"calls":  `select id::text, '', '', '', '', now(), now(), collected_at is null from agent_mcp_calls`,
	"memory": `select id::text, '', '', '', '', created_at, created_at, false from agent_memory`,
}

func read(t *testing.T, db postgres.DB) *world {
	t.Helper()
	w := &world{
		executions: map[string]execution{}, approvals: map[string]approval{}, rows: map[string][]row{},
		now: pgtest.Value[time.Time](t, db, `select now()`),
	}
	for _, x := range pgtest.Rows[execution](t, db,
		`select id::text, trace_id, coalesce(waiting_for, ''), coalesce(waiting_key, ''), coalesce(dedupe_key, ''),
		coalesce(thread_id, ''), coalesce(parent_id::text, ''), created_at, completed_at from agent_executions`) {
		w.executions[x.ID] = x
	}
	w.events = pgtest.Rows[event](t, db, `select id::text, event, key, coalesce(external_id, ''),
		coalesce(execution_id::text, ''), coalesce(consumed_by::text, ''),
		created_at from agent_events`)
	for _, a := range pgtest.Rows[approval](t, db,
		`select id::text, trace_id, coalesce(execution_id::text, ''), status, consumed_for, parked, created_at,
		expires_at, decided_at from agent_approvals`) {
		w.approvals[a.ID] = a
	}
	for name, sql := range tables {
		w.rows[name] = pgtest.Rows[row](t, db, sql)
	}
	return w
}

func (w *world) unfinished(id string) bool {
	x, ok := w.executions[id]
	return ok && x.CompletedAt == nil
}

func (w *world) has(table string, is func(row) bool) bool {
	return slices.ContainsFunc(w.rows[table], is)
}

// asked reports whether a trace has an unused approval.
func (w *world) asked(trace string) bool {
	for _, a := range w.approvals {
		if a.TraceID == trace && (a.Status == "pending" || a.Status == "approved") && a.ExpiresAt.After(w.now) {
			return true
		}
	}
	return false
}

// before returns the time before which rows are deleted; ok is false if none are.
func (w *world) before(policy map[string]string, kind string) (cut time.Time, ok bool) {
	days, err := strconv.Atoi(strings.TrimSuffix(policy[kind], "d"))
	if err != nil {
		return cut, false
	}
	cut = w.now.AddDate(0, 0, -days)
	if kind == "activity" && days >= 60 {
		cut = time.Date(cut.UTC().Year(), cut.UTC().Month(), 1, 0, 0, 0, 0, time.UTC)
	}
	if kind == "hour_counts" {
		cut = cut.Truncate(time.Hour)
	}
	if kind == "prompts" { // kept no longer than its model call
		if log, ok := w.before(policy, "activity"); ok && log.After(cut) {
			cut = log
		}
	}
	return cut, true
}

// overExecutions returns the executions to delete.
func (w *world) overExecutions(cut time.Time) map[string]bool {
	gone := map[string]bool{}
	for id, x := range w.executions {
		is := func(r row) bool { return r.ExecutionID == id }
		stays := x.CreatedAt.After(cut) || w.asked(x.TraceID) || w.unfinished(x.ParentID) || w.has("untold", is) ||
			w.has("locks", is) ||
			w.has("reservations", is) ||
			w.has("runs", func(r row) bool { return r.ExecutionID == id && r.Status == "claimed" }) ||
			w.has("messages", func(r row) bool {
				return r.ExecutionID == id && (r.Status == "queued" || r.Status == "sending")
			}) ||
			w.has("calls", func(r row) bool { return r.Held && "mcp.call "+r.ID == x.DedupeKey })
		for _, y := range w.executions {
			stays = stays || y.TraceID == x.TraceID && (y.CompletedAt == nil || y.CompletedAt.After(cut)) ||
				y.ParentID == id && y.CompletedAt == nil || y.WaitingFor == "agent" && y.WaitingKey == id
		}
		for _, v := range w.events {
			stays = stays || v.ExternalID == "completed "+id && w.unfinished(v.ConsumedBy)
		}
		gone[id] = !stays
	}
	return gone
}

// takeExecutions deletes executions with their rows.
func (w *world) takeExecutions(gone map[string]bool) {
	for _, table := range []string{"checkpoints", "changes", "requests", "drafts"} {
		w.rows[table] = slices.DeleteFunc(w.rows[table], func(r row) bool { return gone[r.ExecutionID] })
	}
	w.events = slices.DeleteFunc(w.events, func(v event) bool {
		end, _ := strings.CutPrefix(v.ExternalID, "completed ")
		decided, of := strings.CutPrefix(v.ExternalID, "approval ")
		a := w.approvals[decided]
		return gone[end] || of && a.Parked && gone[a.ExecutionID]
	})
	for id, over := range gone {
		if over {
			delete(w.executions, id)
		}
	}
}

func (w *world) overEvent(v event, cut time.Time) bool {
	switch _, known := w.executions[v.Key]; {
	case v.CreatedAt.After(cut) || w.unfinished(v.ConsumedBy):
		return false
	case v.Event == "AGENT_COMPLETED" && v.ExecutionID == "":
		return !known
	case v.Event == "AGENT_COMPLETED":
		_, known = w.executions[v.ExecutionID]
		return !known
	case v.Event == "APPROVAL_DECIDED":
		_, known = w.executions[w.approvals[v.Key].ExecutionID]
		return !known
	case v.Event == "paid" || v.ConsumedBy != "": // no wait expects "paid", and a wait consumed the other
		return true
	}
	for _, x := range w.executions {
		if x.CompletedAt == nil && x.CreatedAt.Before(v.CreatedAt.Add(w.now.Sub(cut))) {
			return false
		}
	}
	return true
}

func (w *world) overApproval(a approval, cut time.Time) bool {
	_, known := w.executions[a.ExecutionID]
	used, _, _ := strings.Cut(a.ConsumedFor, " ")
	over := a.Status == "rejected" || a.Status == "expired" || a.Status == "consumed" || a.ExpiresAt.Before(cut)
	return over && a.CreatedAt.Before(cut) && (a.DecidedAt == nil || a.DecidedAt.Before(cut)) &&
		!w.unfinished(a.ExecutionID) &&
		(!a.Parked || !known) && !w.unfinished(used)
}

// rests reports whether a thread has no pending work.
func (w *world) rests(id string) bool {
	for _, x := range w.executions {
		if x.CompletedAt == nil && x.ThreadID == id || x.WaitingFor == "response" && x.WaitingKey == id {
			return false
		}
	}
	return !w.has("locks", func(r row) bool { return r.Held && r.ID == "thread:"+id }) &&
		!w.has("messages", func(r row) bool { return r.Of == id && (r.Status == "queued" || w.unfinished(r.ExecutionID)) })
}

// take runs a whole pass with a policy.
func (w *world) take(policy map[string]string) {
	if cut, ok := w.before(policy, "executions"); ok {
		w.takeExecutions(w.overExecutions(cut))
	}
	over := map[string]func(r row, cut time.Time) bool{ // by policy and table
		"automation_runs runs": func(r row, cut time.Time) bool {
			return (r.Status == "success" || r.Status == "skipped") && r.Over.Before(cut) && !w.unfinished(r.ExecutionID)
		},
		"deliveries deliveries": func(r row, cut time.Time) bool {
			return (r.Status == "done" || r.Status == "ignored") && r.Over.Before(cut) && !w.unfinished(r.ExecutionID)
		},
		"channel_messages channel_messages": func(r row, cut time.Time) bool {
			return r.Status == "done" && r.Over.Before(cut)
		},
		"outbox outbox":      func(r row, cut time.Time) bool { return r.Status != "pending" && r.Over.Before(cut) },
		"prompts prompts":    func(r row, _ time.Time) bool { return !r.Held },
		"hour_counts counts": func(r row, _ time.Time) bool { return r.Status == "hour" },
		"budgets budgets": func(r row, _ time.Time) bool {
			trace, run := strings.CutPrefix(r.ID, "run:")
			for _, x := range w.executions {
				if run && x.TraceID == trace && x.CompletedAt == nil {
					return false
				}
			}
			return !r.Held
		},
		"activity activity": func(r row, _ time.Time) bool {
			for _, x := range w.executions {
				if x.TraceID == r.TraceID && x.CompletedAt == nil {
					return false
				}
			}
			return !r.Held && !w.asked(r.TraceID) && !w.unfinished(r.ExecutionID)
		},
	}
	for names, rule := range over {
		kind, table, _ := strings.Cut(names, " ")
		if cut, ok := w.before(policy, kind); ok {
			w.rows[table] = slices.DeleteFunc(w.rows[table], func(r row) bool { return r.At.Before(cut) && rule(r, cut) })
		}
	}
	approvals := w.approvals
	if cut, ok := w.before(policy, "approvals"); ok {
		approvals = map[string]approval{}
		for id, a := range w.approvals {
			if !w.overApproval(a, cut) {
				approvals[id] = a
			}
		}
	}
	w.approvals = approvals
	if cut, ok := w.before(policy, "events"); ok {
		w.events = slices.DeleteFunc(w.events, func(v event) bool { return w.overEvent(v, cut) })
	}
	if cut, ok := w.before(policy, "messages"); ok {
		var rest []string
		for _, r := range w.rows["threads"] {
			if r.At.Before(cut) && w.rests(r.ID) {
				rest = append(rest, r.ID)
			}
		}
		w.rows["threads"] = slices.DeleteFunc(w.rows["threads"], func(r row) bool { return slices.Contains(rest, r.ID) })
		w.rows["messages"] = slices.DeleteFunc(w.rows["messages"], func(r row) bool { return slices.Contains(rest, r.Of) })
	}
}

// keys returns the remaining rows by table, in order.
func (w *world) keys() map[string][]string {
	all := map[string][]string{}
	for name, rows := range w.rows {
		for _, r := range rows {
			all[name] = append(all[name], r.ID)
		}
	}
	for id := range w.executions {
		all["executions"] = append(all["executions"], id)
	}
	for id := range w.approvals {
		all["approvals"] = append(all["approvals"], id)
	}
	for _, v := range w.events {
		all["events"] = append(all["events"], v.ID+" "+v.Event)
	}
	for _, list := range all {
		slices.Sort(list)
	}
	return all
}
