package lanes_test

import (
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// Who waits for the lane of a process that is dead looks at it again and again, also while that is swept.
func TestTheLaneOfADeadProcessIsFreedWhileSomebodyLooks(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	process := get[string](t, db, `insert into agent_workers (expires_at) values (clock_timestamp()) returning id::text`)
	mustTry(t, db, "x", "run/1@"+process, 60)
	look := begin(t, db)
	exec(t, look, `update agent_locks set waited_until = clock_timestamp() where lane = 'x'`)
	var under sync.WaitGroup
	under.Go(func() {
		if _, err := db.Exec(t.Context(), `select lanekeeper.lose_agent_claims(id) from agent_workers`); err != nil {
			t.Error(err)
		}
	})
	blocked(t, db, "lose_agent_claims")
	commit(t, look)
	under.Wait()
	if g := try(t, db, "x", "b", 60); !g.acquired {
		t.Errorf("%s still has the lane", g.holder)
	}
	if n := get[int](t, db, `select count(*) from agent_workers`); n != 0 {
		t.Error("the process is still there")
	}
}

// A transaction that keeps the row for long does not hold up the sweep.
func TestTheSweepDoesNotWaitForLong(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	process := get[string](t, db, `insert into agent_workers (expires_at) values (clock_timestamp()) returning id::text`)
	token := mustTry(t, db, "x", "run/1@"+process, 60)
	write := begin(t, db)
	exec(t, write, `select fence_agent_lock('x', $1)`, token)
	exec(t, db, `select lanekeeper.lose_agent_claims(id) from agent_workers`)
	if n := get[int](t, db, `select count(*) from agent_workers`); n != 0 {
		t.Error("the process is still there")
	}
	exec(t, write, `select fence_agent_lock('x', $1)`, token)
}
