package lanes

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// wanted is a lane that somebody asks for.
type wanted struct {
	lane  string
	owner Owner
	ttl   time.Duration
}

// held is a lease that somebody gives back.
type held struct {
	lane  string
	owner Owner
	token int64
}

// tryTogether is tryLane, with others who ask now. The claims of executions do not come here: see takeLane.
func (k *Keeper) tryTogether(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error) {
	return k.tries.Do(ctx, wanted{lane, owner, ttl}, func() (answer, error) { return tryLane(ctx, db, lane, owner, ttl) })
}

// numbered is an answer to one of many, from 1.
type numbered struct {
	n int64
	told
}

func readNumbered(row pgx.CollectableRow) (t numbered, err error) {
	err = row.Scan(&t.n, &t.Acquired, &t.FencingToken, &t.ExpiresAt, &t.Holder, &t.WasHolder, &t.WasUntil, &t.Now)
	return t, err
}

// tryMany asks for several lanes, of different owners, in one commit.
func tryMany(ctx context.Context, db postgres.DB, all []wanted) ([]batch.Answer[answer], error) {
	var lanes, owners []string
	var ttls []int32
	for _, w := range all {
		lanes, owners, ttls = append(lanes, w.lane), append(owners, w.owner.name), append(ttls, seconds(w.ttl))
	}
	rows, err := db.Query(ctx, `
		select a.n, a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder, coalesce(a.was_holder, '') as was_holder,
		       coalesce(a.was_until, 'epoch') as was_until, clock_timestamp() as now
		  from lanekeeper.acquire_agent_locks(@lanes::text[], @owners::text[], @ttls::int[]) a`,
		postgres.Strict{"lanes": lanes, "owners": owners, "ttls": ttls})
	if err != nil {
		return nil, err
	}
	found, err := pgx.CollectRows(rows, readNumbered)
	if err != nil {
		return nil, err
	}
	answers := batch.Unanswered[answer](len(all))
	for _, f := range found {
		answers[f.n-1] = batch.Answer[answer]{Value: f.answer()}
	}
	return answers, nil
}

// lateGrant gives back what was granted to a caller who has gone away.
func (k *Keeper) lateGrant(w wanted, a answer) {
	k.mu.Lock()
	nested := k.held[key{w.lane, w.owner.name}] != nil
	k.mu.Unlock()
	if !a.Acquired || nested {
		return
	}
	k.giveUp(context.Background(), w.lane, w.owner, w.ttl, func(ctx context.Context) error {
		_, err := freeLane(ctx, k.db, held{w.lane, w.owner, a.FencingToken})
		return err
	})
}

// release is the answer to who gives a lane back.
type release struct {
	done bool
	to   string // whom it was handed over to
}

// freeTogether is freeLane, with others who give theirs back now.
func (k *Keeper) freeTogether(ctx context.Context, h held) (release, error) {
	alone := func() (release, error) { return freeLane(ctx, k.db, h) }
	if h.owner.claim {
		return alone()
	}
	return k.frees.Do(ctx, h, alone)
}

// freeLane releases one lane. It waits about a second for a fenced write under its token, then the error is
// ErrBlocked. When nobody is handed the lane, the commit is not waited for: a server that crashes within the same
// second may hold the lane for its owner, who is gone, until the lease ends. That is safe, and the statement is the
// whole transaction. A grant is always durable, and all that was committed before it.
func freeLane(ctx context.Context, db postgres.DB, h held) (release, error) {
	var passed *string
	err := db.QueryRow(ctx, `
		select f.passed, set_config('synchronous_commit', case f.passed when '' then 'off' else current_setting('synchronous_commit') end, true)
		  from lanekeeper.release_agent_lock(@lane, @owner, @token, true) f (passed)`,
		postgres.Strict{"lane": h.lane, "owner": h.owner.name, "token": h.token}).Scan(&passed, nil)
	if passed == nil || err != nil {
		return release{}, blocked(err)
	}
	return passedOn(*passed), nil
}

// passedOn reads what a release says of whom the lane went to.
func passedOn(passed string) release {
	to, _ := readHanded(passed)
	return release{done: true, to: to.owner}
}

// freed is an answer of freeMany.
type freed struct {
	N      int64
	Passed string // whom the lane went to
	Mode   string // of the commit
}

// freeMany is freeLane for several. It never waits; those that it leaves alone have no answer.
func freeMany(ctx context.Context, db postgres.DB, all []held) ([]batch.Answer[release], error) {
	var lanes, owners []string
	var tokens []int64
	for _, h := range all {
		lanes, owners, tokens = append(lanes, h.lane), append(owners, h.owner.name), append(tokens, h.token)
	}
	rows, err := db.Query(ctx, `
		with f as materialized (
		  select w.n, r.passed
		    from unnest(@lanes::text[], @owners::text[], @tokens::bigint[]) with ordinality w (lane, owner, token, n),
		         lanekeeper.release_agent_lock(w.lane, w.owner, w.token, true, false) r (passed)
		   where r.passed is not null)
		select f.n, f.passed, set_config('synchronous_commit', case when h.handed then current_setting('synchronous_commit') else 'off' end, true)
		  from f cross join (select bool_or(o.passed <> '') as handed from f o) h`,
		postgres.Strict{"lanes": lanes, "owners": owners, "tokens": tokens})
	if err != nil {
		return nil, err
	}
	done, err := pgx.CollectRows(rows, pgx.RowToStructByPos[freed])
	if err != nil {
		return nil, err
	}
	answers := batch.Unanswered[release](len(all))
	for _, f := range done {
		answers[f.N-1] = batch.Answer[release]{Value: passedOn(f.Passed)}
	}
	return answers, nil
}
