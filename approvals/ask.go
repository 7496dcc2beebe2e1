package approvals

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Ask requests an approval as a durable step. Without Park, a second request for the same call returns the open
// approval. A request of another execution has its own activity; the approval names that of the first.
func Ask(ctx context.Context, r Request) (Approval, error) {
	hash, err := Hash(r.Args)
	if err != nil {
		return Approval{}, fmt.Errorf("ask for approval: %w", err)
	}
	return executions.StepTx(ctx, "ask "+r.Skill, func(ctx context.Context, tx pgx.Tx) (Approval, error) {
		if !r.Park {
			if err := closeStale(ctx, tx, r, hash); err != nil {
				return Approval{}, err
			}
		}
		asked, fresh, err := insert(ctx, tx, r, hash)
		current, _ := executions.Current(ctx)
		if err != nil || !fresh && postgres.Deref(asked.ExecutionID) == current.ID {
			return asked, err
		}
		note, err := activity.Note(ctx, tx, activity.Entry{
			Skill: r.Skill, SkillID: r.SkillID, Claim: current.Claim, Kind: activity.KindCall, Input: r.Args,
		}, activity.Outcome{Status: activity.PendingApproval, Output: map[string]string{"approval_id": asked.ID}})
		if err != nil || !fresh {
			return asked, err
		}
		_, err = tx.Exec(ctx, `
			with noted as (update agent_approvals set activity_id = @note where id = @id returning id)
			select pg_notify('agent_channels', 'approval requested') from noted -- for package channels
			 where exists (select from agent_channels c where c.enabled)`,
			postgres.Strict{"note": note, "id": asked.ID})
		return asked, err
	}, executions.Input(r.Args))
}

// Request is a call that needs an approval.
type Request struct {
	Skill    string
	SkillID  string
	Revision int
	Args     json.RawMessage
	Park     bool // the execution waits for the decision and makes the call
}

// insert adds the row. fresh is false if the same call has an open one; then the requesters are merged.
func insert(ctx context.Context, tx pgx.Tx, r Request, hash string) (_ Approval, fresh bool, err error) {
	current, _ := executions.Current(ctx)
	span, _ := trace.From(ctx)
	var id string
	err = tx.QueryRow(ctx, `
		with recursive line (id, parent_id, run, depth) as (
		  select x.id, coalesce(x.parent_id, x.forked_from), x.input ->> 'run_id', 1
		    from agent_executions x where x.id = @execution_id
		  union all
		  select x.id, coalesce(x.parent_id, x.forked_from), x.input ->> 'run_id', l.depth + 1
		    from line l join agent_executions x on x.id = l.parent_id where l.depth < 50)
		insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
		       arguments_hash, expires_at, four_eyes, requested_by)
		select @trace_id, @execution_id, @step, @parked, s.name, s.revision, @arguments, @hash,
		       clock_timestamp() + make_interval(secs => @life), s.four_eyes, array(
		         select substr(k.cause, 11) from line l
		           join agent_links k on k.effect in ('execution ' || l.id, 'run ' || l.run) and k.kind = 'asked'
		         union select substr(k.cause, 11) from line l
		           join agent_checkpoints c on c.execution_id = l.id
		          cross join lateral (
		            select c.output ->> 'event_id' as id where c.waited_for <> ''
		             union all select e #>> '{}' from jsonb_path_query(c.waits, '$[*].event_id') e) v
		           join agent_links k on k.effect = 'event ' || v.id and k.kind = 'asked' order by 1)
		  from agent_skills s where s.name = @skill and s.revision = @revision for share
		on conflict (skill_name, arguments_hash) where status in ('pending', 'approved') and not parked
		do update set requested_by = case when agent_approvals.status = 'pending' then array(
		     select unnest(agent_approvals.requested_by) union select unnest(excluded.requested_by) order by 1)
		   else agent_approvals.requested_by end
		returning id::text, xmax = 0`, postgres.Strict{ // no xmax: the row is new
		"trace_id": string(span.TraceID), "execution_id": current.ID, "step": executions.StepKey(ctx), "parked": r.Park,
		"skill": r.Skill, "revision": r.Revision, "arguments": r.Args, "hash": hash, "life": Lifetime.Seconds(),
	}).Scan(&id, &fresh)
	if errors.Is(err, pgx.ErrNoRows) {
		return Approval{}, false, &executions.StepError{
			Class: "stale_skill", Message: fmt.Sprintf(
				"skill %s was changed or removed since this run read it: no approval was requested", r.Skill),
		}
	}
	if err != nil {
		return Approval{}, false, fmt.Errorf("ask for approval of %s: %w", r.Skill, err)
	}
	asked, err := Get(ctx, tx, id)
	return asked, fresh, err
}

// closeStale closes an open approval of the same call that expired or is for another revision.
func closeStale(ctx context.Context, tx pgx.Tx, r Request, hash string) error {
	_, err := tx.Exec(ctx, `
		update agent_approvals set status = 'expired'
		 where skill_name = @skill and arguments_hash = @hash and status in ('pending', 'approved') and not parked
		   and (expires_at <= clock_timestamp() or skill_revision <> @revision)`,
		postgres.Strict{"skill": r.Skill, "hash": hash, "revision": r.Revision})
	if err != nil {
		return fmt.Errorf("close expired approvals of %s: %w", r.Skill, err)
	}
	return nil
}

// Hash returns a hash of arguments that ignores the order of keys and writes numbers as jsonb does, so 1e0 is 1.
func Hash(args json.RawMessage) (string, error) {
	v, err := exactjson.Decode(args)
	if err != nil {
		return "", fmt.Errorf("decode arguments: %w", err)
	}
	canonical, err := json.Marshal(exactjson.PlainNumbers(v)) // maps are marshalled with sorted keys
	if err != nil {
		return "", fmt.Errorf("encode arguments: %w", err)
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:]), nil
}
