package executions_test

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// recordAll records a step of each execution, with variables where they are given, and returns the places of those that were kept.
func recordAll(ctx context.Context, db postgres.DB, ids []string, claims []int64, steps []string, variables []*string) (kept string, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(string_agg(i::text, ' ' order by i), '')
		  from generate_series(1, @n::int) i
		 where i not in (
		   select n from lanekeeper.checkpoint_agent_executions(@ids, @claims, @steps, array_fill('print'::text, array[@n::int]), null, array_fill('3'::jsonb, array[@n::int]),
		          (@variables::text[])::jsonb[]) where verdict = 'alone')`,
		postgres.Strict{"ids": ids, "claims": claims, "n": len(ids), "steps": steps, "variables": variables}).Scan(&kept)
	return kept, err
}

// Of a batch of steps those are written whose claim is live and whose row nobody has locked against it, and nothing of the others.
func TestABatchOfStepsIsWrittenUnderEachClaim(t *testing.T) {
	t.Parallel()
	t.Run("with variables", func(t *testing.T) { batchOfSteps(t, true, "1 6 11 14") })
	t.Run("without", func(t *testing.T) { batchOfSteps(t, false, "1 6 11 13 14") })
}

func batchOfSteps(t *testing.T, showing bool, kept string) {
	t.Parallel()
	pool := pgtest.DB(t)
	live, dead := worker(t, pool), worker(t, pool)
	names := []string{"live", "stale", "ahead", "dead", "locked", "written", "cancelled", "parked", "pending", "ended", "shown", "shown stale", "unshowable", "live"}
	ids, claims, steps, variables := make([]string, len(names)), make([]int64, len(names)), make([]string, len(names)), make([]*string, len(names))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	for i, name := range names {
		steps[i] = "step"
		if i > 0 && name == "live" { // another branch of the first
			ids[i], claims[i], steps[i] = ids[0], claims[0], "other"
			continue
		}
		ids[i] = pending(t, pool)
		args := postgres.Strict{"id": ids[i]}
		if name == "pending" {
			continue
		}
		claims[i] = mustClaim(t, pool, ids[i], map[bool]string{true: dead, false: live}[name == "dead"])
		if showing && (strings.HasPrefix(name, "shown") || name == "unshowable") {
			variables[i] = new(`{"x": 2}`)
		}
		switch name {
		case "stale", "shown stale":
			claims[i]--
		case "ahead":
			claims[i]++
		case "locked":
			exec(t, tx, `select from agent_executions where id = @id for update`, args)
		case "written", "unshowable": // in a step of another branch, beside which others may write, but not the row
			exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": ids[i], "claim": claims[i]})
			if name == "unshowable" {
				exec(t, tx, `update agent_executions set progress_seconds = 9 where id = @id`, args)
			}
		case "cancelled":
			exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
			claims[i]++ // the number that a cancel leaves is nobody's
		case "parked":
			exec(t, pool, `select lanekeeper.wait_agent_execution(@id, 1, 'wait', 'event', 'k', '1 hour', null)`, args)
			claims[i]++
		case "ended":
			exec(t, pool, `select lanekeeper.complete_agent_execution(@id, 1, 'completed', '', null, null, null)`, args)
		}
	}
	expire(t, pool, ids[slices.Index(names, "dead")])
	before := make([]string, len(ids))
	for i, id := range ids {
		before[i] = everything(t, pool, id)
	}
	got, err := recordAll(t.Context(), pool, ids, claims, steps, variables)
	if err != nil || got != kept {
		t.Errorf("%s were kept: %v", got, err)
	}
	for i, name := range names {
		if !slices.Contains(strings.Fields(kept), strconv.Itoa(i+1)) {
			if after := everything(t, pool, ids[i]); after != before[i] {
				t.Errorf("%s:\nbefore %s\nafter  %s", name, before[i], after)
			}
			continue
		}
		record := value[string](t, pool, `
			select claim || fingerprint || failed || output from agent_checkpoints where execution_id = @id and step = @step`,
			postgres.Strict{"id": ids[i], "step": steps[i]})
		x := get(t, pool, ids[i])
		if shown := string(x.Variables) == `{"x": 2}`; record != "1printfalse3" || shown != (showing && name == "shown") {
			t.Errorf("%s: record %s, variables %s", name, record, x.Variables)
		}
	}
}

// A step that is on record keeps its first result, and takes those beside it out of their batch: they are written one by one.
func TestABatchWithARecordedStepWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	ids, claims := make([]string, 2), make([]int64, 2)
	for i := range ids {
		ids[i] = pending(t, pool)
		claims[i] = mustClaim(t, pool, ids[i], w)
	}
	exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim, output) values (@id, 'step', 1, '"earlier"')`, postgres.Strict{"id": ids[1]})
	before := everything(t, pool, ids[0]) + everything(t, pool, ids[1])
	got, err := recordAll(t.Context(), pool, ids, claims, []string{"step", "step"}, []*string{new(`{"x": 2}`), nil})
	if !postgres.IsCode(err, "23505") {
		t.Errorf("%s were kept: %v", got, err)
	}
	if after := everything(t, pool, ids[0]) + everything(t, pool, ids[1]); after != before {
		t.Errorf("before %s\nafter  %s", before, after)
	}
}

// A claim is not taken away under a write that it fences: who takes it waits for the write, although the lock of the fence lets others
// write beside it.
func TestAClaimIsNotTakenUnderAFencedWrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := pending(t, pool)
	claim := mustClaim(t, pool, id, worker(t, pool))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select fence_agent_execution(@id, @claim)`, postgres.Strict{"id": id, "claim": claim})
	exec(t, pool, `update agent_executions set progress_seconds = 9 where id = @id`, postgres.Strict{"id": id})
	_, err = pool.Exec(t.Context(), `
		with briefly as materialized (select set_config('lock_timeout', '100ms', true))
		update agent_executions x set claim = x.claim + 1 from briefly where x.id = @id`, postgres.Strict{"id": id})
	if !postgres.IsCode(err, "55P03") {
		t.Errorf("the claim was taken: %v", err)
	}
}

// One whose claim is not live is told from its neighbour also where every row could be locked, in the order of the batch.
func TestOneOfABatchInOrderIsNotLive(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"live", "stale", "ahead", "dead", "cancelled", "parked", "pending", "nobody's"} {
		for _, ends := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", ends"}[ends], func(t *testing.T) {
				t.Parallel()
				pool := pgtest.DB(t)
				live, dead := worker(t, pool), worker(t, pool)
				ids, claims := []string{pending(t, pool), pending(t, pool)}, make([]int64, 2)
				slices.Sort(ids)
				claims[0] = mustClaim(t, pool, ids[0], live)
				if name != "pending" {
					claims[1] = mustClaim(t, pool, ids[1], map[bool]string{true: dead, false: live}[name == "dead"])
				}
				args := postgres.Strict{"id": ids[1]}
				switch name {
				case "stale":
					claims[1]--
				case "ahead":
					claims[1]++
				case "dead":
					expire(t, pool, ids[1])
				case "cancelled":
					exec(t, pool, `select cancel_agent_execution(@id, 'test', 'test')`, args)
					claims[1]++
				case "parked":
					exec(t, pool, `select lanekeeper.wait_agent_execution(@id, 1, 'wait', 'event', 'k', '1 hour', null)`, args)
					claims[1]++
				case "nobody's":
					exec(t, pool, `update agent_executions set claimed_by = null where id = @id`, args)
				}
				before := everything(t, pool, ids[1])
				want, got := "1", ""
				if name == "live" {
					want = "1 2"
				}
				if ends {
					got = closeAll(t, pool, ids, claims, []*string{new("last"), new("last")}, "completed")
				} else {
					var err error
					if got, err = recordAll(t.Context(), pool, ids, claims, []string{"step", "step"}, make([]*string, 2)); err != nil {
						t.Fatal(err)
					}
				}
				if after := everything(t, pool, ids[1]); got != want || (after == before) == (name == "live") {
					t.Errorf("%s were written:\nbefore %s\nafter  %s", got, before, after)
				}
			})
		}
	}
}
