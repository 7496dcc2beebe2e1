package threads_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/threads"
)

// A few threads of one agent among very many are found without reading those of the others.
func TestTheThreadsOfARareAgentAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	tx, err := pgtest.DB(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, sql := range []string{
		`set local session_replication_role = replica`,
		`insert into agent_threads (id, channel, agent) select 'thr_' || n, 'chat', case n when 7 then 'rare' else 'common' end from generate_series(1, 3000) n`,
		`analyze agent_threads`,
	} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	for range 7 { // a plan for all values would come with the sixth
		found, err := threads.List(t.Context(), tx, threads.Filter{Agent: "rare"})
		if err != nil || len(found) != 1 {
			t.Fatalf("found %d, %v", len(found), err)
		}
	}
	var scans int
	err = tx.QueryRow(t.Context(), `select pg_stat_get_xact_numscans('agent_threads_of_agent'::regclass)`).Scan(&scans)
	if err != nil || scans != 7 {
		t.Errorf("the index was read %d times, %v", scans, err)
	}
}
