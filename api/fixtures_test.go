package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// start starts an execution that no worker runs.
func (a *agent) start(flow string, id trace.ID) executions.Execution {
	a.t.Helper()
	x, _, err := a.engine.Start(a.t.Context(), a.pool, executions.Spec{
		Flow: flow, Surface: id.Surface(), TraceID: id, Input: map[string]string{"for": flow},
	})
	require.NoError(a.t, err)
	return x
}

// claim claims an execution for a new worker.
func (a *agent) claim(x executions.Execution) {
	a.t.Helper()
	pgtest.Exec(a.t, a.pool, `
		with w as (insert into agent_workers (name, expires_at) values ('w', clock_timestamp() + interval '1 minute')
		  returning id)
		update agent_executions x set status = 'running', claimed_by = w.id, claim = x.claim + 1 from w where x.id = @id`,
		postgres.Strict{"id": x.ID})
}

func (a *agent) fail(x executions.Execution) {
	a.t.Helper()
	a.claim(x)
	pgtest.Exec(a.t, a.pool, `update agent_executions set status = 'failed' where id = @id`, postgres.Strict{"id": x.ID})
}

func (a *agent) recordActivity(e activity.Entry, status activity.Status) string {
	a.t.Helper()
	id, err := activity.Note(a.t.Context(), a.pool, e, activity.Outcome{Status: status})
	require.NoError(a.t, err)
	return id
}

func (a *agent) skill(name string) {
	a.t.Helper()
	d := skills.Definition{Name: name, Description: "for the test", Handler: "http:GET https://example.com/"}
	_, err := skills.Put(a.t.Context(), a.pool, d, skills.SourceWorkspace)
	require.NoError(a.t, err)
}

func (a *agent) holdLane(lane, owner string) {
	a.t.Helper()
	got := pgtest.Value[bool](a.t, a.pool, `select try_acquire_agent_lock(@lane, @owner, 300)`,
		postgres.Strict{"lane": lane, "owner": owner})
	require.Truef(a.t, got, "%s does not get %s", owner, lane)
}

// objective declares an objective.
func (a *agent) objective(name string) string {
	a.t.Helper()
	d := objectives.Definition{Name: name, Goal: "be done", Steps: []string{"one", "two"}}
	_, err := objectives.Put(a.t.Context(), a.pool, d, objectives.SourceAdmin)
	require.NoError(a.t, err)
	return name
}

// automation declares an automation.
func (a *agent) automation(name string) string {
	a.t.Helper()
	d := automations.Definition{Name: name, Cron: "0 3 * * *", Prompt: "look around"}
	_, err := automations.Put(a.t.Context(), a.pool, d)
	require.NoError(a.t, err)
	return name
}

// delivery stores a received webhook.
func (a *agent) delivery(id string) string {
	a.t.Helper()
	pgtest.Exec(a.t, a.pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256)
		values ('orders', @id, 'wh_1', 'wh_2', '{}', '')`, postgres.Strict{"id": id})
	return id
}

// approval makes a call of the skill drop that needs approval. With park, the execution waits for it.
func (a *agent) approval(args string, park bool) (got approvals.Approval) {
	a.t.Helper()
	d := skills.Definition{Name: "drop", Description: "drops a table", Handler: "builtin:drop", Trust: skills.TrustApprove}
	_, err := skills.Put(a.t.Context(), a.pool, d, skills.SourceWorkspace)
	require.NoError(a.t, err)
	skill, err := skills.Get(a.t.Context(), a.pool, "drop")
	require.NoError(a.t, err)
	flow := fmt.Sprintf("ask_%d", askCount.Add(1))
	err = a.engine.Register(flow, func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		var err error
		got, err = approvals.Ask(ctx, approvals.Request{
			Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: json.RawMessage(args), Park: park,
		})
		if err == nil && park {
			_, err = executions.Wait(ctx, "approval", executions.Approval(got.ID, time.Hour))
		}
		return executions.Result{}, err
	})
	require.NoError(a.t, err)
	_, err = a.engine.RunSync(context.WithoutCancel(a.t.Context()), executions.Spec{Flow: flow, Surface: trace.Flow})
	require.NoError(a.t, err)
	return got
}

func (a *agent) storeMemory(key, category string) string {
	a.t.Helper()
	note := memory.Note{
		Category: category, Key: key, Value: "what is known of " + key,
		TraceID: string(trace.New(trace.Heartbeat)),
	}
	_, err := memory.Save(a.t.Context(), a.pool, note)
	require.NoError(a.t, err)
	return key
}
