package threads_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

// fill makes a long thread among many, in one statement.
func fill(t *testing.T, db postgres.DB, turns int) {
	t.Helper()
	open(t, db, "long")
	pgtest.Exec(t, db, `insert into agent_threads (id, channel, owner) select 'other ' || n, 'chat', 'site' from generate_series(1, 200) n`)
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, tokens)
		select 'other ' || (n % 200 + 1), n, n, 'user', 'hello there', 'received', 8 from generate_series(1, 100000) n`)
	pgtest.Exec(t, db, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, tokens)
		select 'long', n, n - (n + 1) % 2, case n % 2 when 1 then 'user' else 'assistant' end, 'what was said ' || n, 'sent', 8
		  from generate_series(1, $1::int) n`, 2*turns)
	pgtest.Exec(t, db, `update agent_threads set next_seq = $1::int + 1 where id = 'long'`, 2*turns)
	pgtest.Exec(t, db, `analyze agent_messages`)
}

// touched is how many rows of messages the statements of fn have read, by index or not.
func touched(t *testing.T, db postgres.DB, fn func()) (rows, scans int) {
	t.Helper()
	read := func() (rows, scans int) {
		err := db.QueryRow(t.Context(), `
			select coalesce(idx_tup_fetch, 0) + seq_tup_read, seq_scan from pg_stat_xact_user_tables where relname = 'agent_messages'`).
			Scan(&rows, &scans)
		if err != nil {
			t.Fatal(err)
		}
		return rows, scans
	}
	rows0, scans0 := read()
	fn()
	rows1, scans1 := read()
	return rows1 - rows0, scans1 - scans0
}

func TestAWindowCostsTheSameHoweverLongTheThread(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	fill(t, pool, 20_000)
	tx, err := pool.Begin(t.Context()) // one connection, and its statistics
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	for name, fn := range map[string]func() error{
		"window": func() error {
			_, _, err := threads.Window(t.Context(), tx, "long", 0, 2000)
			return err
		},
		"window in the middle": func() error {
			_, _, err := threads.Window(t.Context(), tx, "long", 9001, 2000)
			return err
		},
		"backlog": func() error {
			_, err := threads.Backlog(t.Context(), tx, "long", 0, 2000, 1000, 2000)
			return err
		},
		"messages": func() error {
			_, err := threads.Messages(t.Context(), tx, threads.MessageFilter{ThreadID: "long", Before: 5000})
			return err
		},
	} {
		rows, scans := touched(t, tx, func() {
			if err := fn(); err != nil {
				t.Fatal(err)
			}
		})
		if rows > 1000 || scans > 0 {
			t.Errorf("%s read %d rows, %d times the whole table", name, rows, scans)
		}
	}
}
