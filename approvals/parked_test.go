package approvals_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// parkedFlow is a running engine with a flow that requests approval, waits, and makes an approved call.
type parkedFlow struct {
	t      *testing.T
	pool   *pgxpool.Pool
	engine *executions.Engine
	acted  atomic.Int32
}

// startParked starts an engine with the flow, whose call has the arguments args. change edits the options.
func startParked(t *testing.T, args string, change ...func(*executions.Options)) *parkedFlow {
	t.Helper()
	pool, s := setUp(t)
	p := &parkedFlow{t: t, pool: pool}
	listener := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	p.engine = enginetest.New(t, pool, append(change, func(o *executions.Options) { o.Listener = listener })...)
	enginetest.Register(t, p.engine, "flow", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return p.flow(ctx, s, json.RawMessage(args))
	})
	testkit.Run(t, p.engine.Run, listener.Run)
	return p
}

// flow ends with "called", or with how the approval ended: STATUS by NAME: REASON.
func (p *parkedFlow) flow(ctx context.Context, s skills.Skill, args json.RawMessage) (executions.Result, error) {
	asked, err := approvals.Ask(ctx, approvals.Request{
		Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: args,
		Park: true,
	})
	if err != nil {
		return executions.Result{}, err
	}
	out, err := executions.Wait(ctx, "approval", executions.Approval(asked.ID, approvals.Lifetime))
	if err != nil {
		return executions.Result{}, err
	}
	var decision struct{ Status, By, Reason string }
	if err := json.Unmarshal(out.Data, &decision); err != nil {
		return executions.Result{}, err
	}
	if decision.Status != "approved" {
		return executions.Result{Summary: decision.Status + " by " + decision.By + ": " + decision.Reason}, nil
	}
	x, _ := executions.Current(ctx)
	_, err = executions.Do(ctx, "call", executions.Call{
		Entry:    activity.Entry{Skill: "drop"},
		OnIntent: approvals.Use(asked.ID, x.ID, "call"),
	},
		func(context.Context, *executions.Effect) (bool, error) {
			p.acted.Add(1)
			return true, nil
		})
	return executions.Result{Summary: "called"}, err
}

// start starts the flow and waits until it is parked. It returns the execution and the approval.
func (p *parkedFlow) start() (executionID, approvalID string) {
	p.t.Helper()
	x, _, err := p.engine.Start(p.t.Context(), p.pool, executions.Spec{Flow: "flow", Surface: trace.Operate})
	require.NoError(p.t, err)
	return x.ID, *enginetest.Await(p.t, p.pool, x.ID, executions.Waiting).WaitingKey
}

func TestFiftyDecisionsTakeEffectOnce(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{"table":"x"}`)
	id, approval := p.start()
	var won atomic.Int32
	var group errgroup.Group
	for i := range 50 {
		group.Go(func() error {
			_, err := approvals.Decide(t.Context(), p.pool, approval, i%2 == 0, fmt.Sprint("admin ", i), "")
			if err == nil {
				won.Add(1)
			} else if !errors.Is(err, approvals.ErrDecided) {
				return err
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	x := enginetest.Await(p.t, p.pool, id, executions.Completed)
	decided, err := approvals.Get(t.Context(), p.pool, approval)
	require.NoError(t, err)
	called, ended := map[string]int32{"consumed": 1, "rejected": 0}[decided.Status]
	assert.Truef(t, ended && won.Load() == 1 && p.acted.Load() == called && (called == 1) == (x.ResultSummary == "called"),
		"%d decided, the approval is %s, %d calls, the run says %q", won.Load(), decided.Status, p.acted.Load(),
		x.ResultSummary)
	assert.Equal(t, 1, pgtest.Value[int](t, p.pool, `select count(*) from agent_events where event = 'APPROVAL_DECIDED'`))
	n := pgtest.Value[int](t, p.pool, `select count(*) from agent_activity where skill_name = 'decide_approval'
		and trace_id like 'op\_%'`)
	assert.Equal(t, 1, n, "activities of the decision")
}

func TestRejectionEndsWait(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{}`)
	id, approval := p.start()
	_, err := p.pool.Exec(t.Context(), `update agent_approvals set arguments = '{"table":"y"}' where id = $1`, approval)
	assert.Truef(t, approvals.IsUnusable(err), "the arguments of a pending approval changed: %v", err)
	_, err = approvals.Decide(t.Context(), p.pool, approval, false, "admin", "not today")
	require.NoError(t, err)
	x := enginetest.Await(p.t, p.pool, id, executions.Completed)
	assert.Truef(t, x.ResultSummary == "rejected by admin: not today" && p.acted.Load() == 0,
		"ended with %q, %d calls", x.ResultSummary, p.acted.Load())
	_, err = p.pool.Exec(t.Context(), `update agent_approvals set status = 'approved' where id = $1`, approval)
	assert.Truef(t, approvals.IsUnusable(err), "a rejected approval became approved: %v", err)
}

// A decision resumes the waiting execution at once, also a decision by plain SQL. No sweep runs after it.
func TestSQLDecisionResumesExecution(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{}`, func(o *executions.Options) { o.SweepEvery = time.Hour })
	id, approval := p.start()
	pgtest.Exec(t, p.pool, `select decide_agent_approval($1, true, 'dba', 'by hand')`, approval)
	assert.Equal(t, "called", enginetest.Await(p.t, p.pool, id, executions.Completed).ResultSummary)
}

// The same call of two executions needs two approvals. Neither can use the other's.
func TestParkedApprovalBelongsToItsExecution(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{"table":"x"}`)
	first, ofFirst := p.start()
	second, ofSecond := p.start()
	require.True(t, ofFirst != ofSecond, "both executions wait for the same approval")
	_, err := approvals.Decide(t.Context(), p.pool, ofFirst, true, "admin", "")
	require.NoError(t, err)
	enginetest.Await(p.t, p.pool, first, executions.Completed)
	err = callApproved(t, p.pool, ofFirst, func() { t.Error("acted") })
	assert.Truef(t, approvals.IsUnusable(err), "use of a used approval: %v", err)
	unused, err := approvals.Approved(t.Context(), p.pool, "", 5)
	assert.Truef(t, err == nil && len(unused) == 0, "a heartbeat would make %+v, %v", unused, err)
	// An approval without its event resumes nothing.
	pgtest.Exec(t, p.pool, `update agent_approvals set status = 'approved' where id = $1`, ofSecond)
	err = callApproved(t, p.pool, ofSecond, func() { t.Error("called with the approval of another execution") })
	assert.Truef(t, approvals.IsUnusable(err), "use of another execution's approval: %v", err)
	x, err := executions.Get(t.Context(), p.pool, second)
	assert.Truef(t, err == nil && x.Status == executions.Waiting, "the second is %s, %v", x.Status, err)
}

func TestApprovalEndsWithItsExecution(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{}`)
	id, approval := p.start()
	_, err := p.engine.Cancel(t.Context(), id, "admin", "enough")
	require.NoError(t, err)
	_, err = approvals.Decide(t.Context(), p.pool, approval, true, "admin", "")
	assert.ErrorIs(t, err, approvals.ErrDecided, "decided although no execution waits")
	got, err := approvals.Get(t.Context(), p.pool, approval)
	assert.Truef(t, err == nil && got.Status == "expired", "the approval is %s, %v", got.Status, err)
}

func TestListShowsExpiredApprovals(t *testing.T) {
	t.Parallel()
	p := startParked(t, `{}`)
	_, approval := p.start()
	pgtest.Exec(t, p.pool, `update agent_approvals set expires_at = clock_timestamp() where id = $1`, approval)
	for status, want := range map[string]int{"": 1, "pending": 0, "expired": 1, "approved": 0} {
		got, err := approvals.List(t.Context(), p.pool, approvals.Filter{Status: status})
		assert.NoError(t, err, status, got)
		assert.Equal(t, want, len(got), status, got)
		if len(got) == 1 && got[0].Status != "expired" {
			t.Errorf("%q lists it as %s", status, got[0].Status)
		}
	}
}

// A change or removal of the skill resumes the waiting execution at once, with the reason.
func TestChangedSkillResumesWaitingExecution(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, want string }{
		"changed": {
			`update agent_skills set revision = revision + 1 where name = 'drop'`,
			"the skill drop was changed: revision 1 is now 2",
		},
		"removed": {`delete from agent_skills where name = 'drop'`, "the skill drop was removed"},
	} {
		t.Run(name, func(t *testing.T) {
			p := startParked(t, `{"table":"x"}`, func(o *executions.Options) { o.SweepEvery = time.Hour })
			id, approval := p.start()
			pgtest.Exec(t, p.pool, c.change)
			assert.Equal(t, "expired by : "+c.want, enginetest.Await(p.t, p.pool, id, executions.Completed).ResultSummary)
			got, err := approvals.Get(t.Context(), p.pool, approval)
			assert.Truef(t, err == nil && got.Status == "expired" && got.Reason == c.want, "the approval is %+v (%v)", got, err)
			list, err := approvals.Pending(t.Context(), p.pool, 10)
			assert.Truef(t, err == nil && len(list) == 0, "pending: %+v (%v)", list, err)
			n := pgtest.Value[int](t, p.pool, `select count(*) from agent_activity where skill_name = 'close_approval'
				and status = 'skipped'
				and input ->> 'approval_id' = $1 and input ->> 'reason' = $2`, approval, c.want)
			assert.Equal(t, 1, n, "activities of it")
			assert.Equal(t, 0, p.acted.Load())
		})
	}
}

func TestChangedSkillClosesRecordedApprovals(t *testing.T) {
	t.Parallel()
	pool, s := setUp(t)
	pending, granted := requestApproval(t, pool, s, `{"table":"x"}`), requestApproval(t, pool, s, `{"table":"y"}`)
	require.NoError(t, approve(t, pool, granted))
	// another text is no other call
	pgtest.Exec(t, pool, `update agent_skills set description = description || '.' where name = 'drop'`)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_approvals where status = 'expired'`))
	pgtest.Exec(t, pool, `update agent_skills set revision = 2 where name = 'drop'`)
	for _, id := range []string{pending, granted} {
		got, err := approvals.Get(t.Context(), pool, id)
		assert.Truef(t, err == nil && got.Status == "expired" && strings.Contains(got.Reason, "was changed"),
			"the approval is %+v (%v)", got, err)
	}
	// A run that read the skill before its change requests no impossible approval.
	runFlow(t, pool, func(ctx context.Context) error {
		_, err := approvals.Ask(ctx, approvals.Request{
			Skill: s.Name, SkillID: s.ID, Revision: s.Revision,
			Args: json.RawMessage(`{"table":"z"}`),
		})
		failure, ok := errors.AsType[*executions.StepError](err)
		assert.Truef(t, ok && failure.Class == "stale_skill", "requested another approval: %v", err)
		return nil
	})
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_approvals where status = 'pending'`))
}
