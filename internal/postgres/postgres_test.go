package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const secret = "s3cr3t-w0rd"

func TestOpenErrorsNameCauseAndHidePassword(t *testing.T) {
	t.Parallel()
	real, err := url.Parse(pgtest.EmptyURL(t))
	require.NoError(t, err)
	real.User = url.UserPassword(real.User.Username(), secret)
	noDatabase, oddDatabase, noUser, noParameter := *real, *real, *real, *real
	noDatabase.Path, oddDatabase.Path = "/no_such_database", "/No such 'db"
	noParameter.RawQuery += "&keepalives_idle=30"
	noUser.User = url.UserPassword("no_such_user", secret)
	stranger, noRight := *real, *real
	name := "Odd " + real.Path[1:]
	stranger.User, noRight.User = url.User(name), url.User(name)
	noRight.RawQuery += "&session_replication_role=replica"
	admin := openPool(t, pgtest.EmptyURL(t))
	pgtest.Exec(t, admin, "create role "+pgx.Identifier{name}.Sanitize()+" login")
	t.Cleanup(func() {
		_, err := admin.Exec(context.WithoutCancel(t.Context()), "drop role "+pgx.Identifier{name}.Sanitize())
		assert.NoError(t, err)
	})
	noRight.Path = "/" + admin.Config().ConnConfig.Database
	pgtest.Exec(t, admin, "revoke connect on database "+pgx.Identifier{real.Path[1:]}.Sanitize()+" from public")
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	for name, test := range map[string]struct {
		url  string
		want []string
	}{
		"no right to connect": {stranger.String(), []string{`to "` + name + `"`}},
		"no right to set":     {noRight.String(), []string{"session_replication_role", "remove or correct it"}},
		"nothing":             {"", []string{"DATABASE_URL"}},
		"not a URL": {
			"postgres://u:" + secret + "#x@h:port/db",
			[]string{"cannot read the connection string", "percent-encoded"},
		},
		"a bare @": {
			"postgres://u:p@" + secret + "/x@127.0.0.1:1/db", []string{"cannot read the connection string", "%40"},
		},
		"two of them": {"postgres://u:p@" + secret + "@127.0.0.1:1/db", []string{"cannot read the connection string", "%40"}},
		"a bare /":    {"postgres://u:1/" + secret + "@127.0.0.1:1/db", []string{"cannot read the connection string", "%2F"}},
		"a bare #": {
			"postgres://u:p@" + secret + "#x@127.0.0.1:1/db", []string{"cannot read the connection string", "%23"},
		},
		"a bare ?": {
			"postgresql://u:p@" + secret + "?x@127.0.0.1:1/db",
			[]string{"cannot read the connection string", "%3F"},
		},
		"bad setting": {
			"postgres://u:" + secret + "@h/db?pool_max_conns=0",
			[]string{"cannot read the connection string", "pool_max_conns from 1"},
		},
		"nobody listens": {
			"postgres://u:" + secret + "@127.0.0.1:1/db",
			[]string{"cannot reach the server", "127.0.0.1:1", "check host and port"},
		},
		"nobody answers": {
			"postgres://u:" + secret + "@" + silent.Addr().String() + "/db?connect_timeout=1",
			[]string{"cannot reach the server (no answer)"},
		},
		"no such socket": {"postgres://u:" + secret + "@/db?host=/nowhere", []string{"cannot reach the server", "/nowhere"}},
		"no such name": {
			"postgres://u:" + secret + "@no-such-host.invalid/db",
			[]string{"cannot reach the server", "no-such-host.invalid"},
		},
		"no such file": {
			"postgres://u:" + secret + "@h/db?sslmode=verify-full&sslrootcert=/nowhere/ca.crt",
			[]string{"open /nowhere/ca.crt: no such file"},
		},
		"no such service": {
			"postgres://u:" + secret + "@h/db?service=x&servicefile=/nowhere/services",
			[]string{"failed to read service file: /nowhere/services"},
		},
		"no parameter": {noParameter.String(), []string{`"keepalives_idle"`, "remove or correct it in DATABASE_URL"}},
		"two servers": {
			"postgres://u:" + secret + "@127.0.0.1:1,127.0.0.1:2/db",
			[]string{"none of its servers", "127.0.0.1:1", "127.0.0.1:2"},
		},
		"odd database": {oddDatabase.String(), []string{`createdb 'No such '\''db',`}},
		"no database":  {noDatabase.String(), []string{"no such database", "createdb no_such_database"}},
		"no user":      {noUser.String(), []string{"refuses user", "no_such_user"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, err := postgres.Open(t.Context(), test.url, postgres.Options{})
			if err == nil {
				pool.Close()
				t.Fatal("opened")
			}
			assert.Contains(t, err.Error(), test.want...)
			for e := err; e != nil; e = errors.Unwrap(e) {
				assert.Truef(t, !strings.Contains(e.Error(), secret), "error %q has the password", e)
			}
		})
	}
}

func TestOpenAdaptsToPooler(t *testing.T) {
	t.Parallel()
	direct := pgtest.EmptyURL(t)
	pooler := throughPooler(t, direct)
	for name, test := range map[string]struct {
		url  string
		want pgx.QueryExecMode
	}{
		"direct":                 {direct, pgx.QueryExecModeCacheStatement},
		"direct, told otherwise": {direct + "&default_query_exec_mode=exec", pgx.QueryExecModeExec},
		"pooler":                 {pooler, pgx.QueryExecModeCacheDescribe},
		"pooler, told otherwise": {pooler + "&default_query_exec_mode=cache_statement", pgx.QueryExecModeCacheStatement},
	} {
		pool, err := postgres.Open(t.Context(), test.url, postgres.Options{})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		assert.Equal(t, test.want, pool.Config().ConnConfig.DefaultQueryExecMode, name)
		var sum int
		err = pool.QueryRow(t.Context(), "select @a::int + 1", postgres.Strict{"a": 41}).Scan(&sum)
		assert.Truef(t, err == nil && sum == 42, "%s: 41 + 1 = %d, %v", name, sum, err)
		pool.Close()
	}
	_, err := postgres.Open(t.Context(), pooler+"&foo=bar", postgres.Options{})
	assert.Truef(t, postgres.WrongParameter(err), "a parameter that the pooler does not know: %v", err)
}

func TestInTxIsReadCommitted(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin, err := postgres.Open(t.Context(), at, postgres.Options{})
	require.NoError(t, err)
	defer admin.Close()
	name := pgx.Identifier{admin.Config().ConnConfig.Database}.Sanitize()
	pgtest.Exec(t, admin, "alter database "+name+" set default_transaction_isolation = 'serializable'")
	pool, err := postgres.Open(t.Context(), at, postgres.Options{})
	require.NoError(t, err)
	defer pool.Close()
	const level = "select current_setting('transaction_isolation')"
	var alone, before, within string
	require.NoError(t, pool.QueryRow(t.Context(), level).Scan(&alone))
	admin.Reset() // connections of a pool opened earlier keep the old default
	require.NoError(t, admin.QueryRow(t.Context(), level).Scan(&before))
	// A connection opened by hand keeps the default; InTx does not.
	conn, err := pgx.Connect(t.Context(), at)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	err = postgres.InTx(t.Context(), conn, func(tx pgx.Tx) error { return tx.QueryRow(t.Context(), level).Scan(&within) })
	require.NoError(t, err)
	assert.Truef(t, alone == "read committed" && before == "read committed" && within == "read committed",
		"isolation of a statement %q, of one of a pool from before %q, of InTx %q", alone, before, within)
	_, err = postgres.Open(t.Context(), throughPooler(t, at), postgres.Options{})
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "alter database"),
		"behind a pooler, where it cannot be set: %v", err)
}

func TestInTxCommitsOrRollsBack(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	pgtest.Exec(t, db, "create table numbers (n int primary key)")
	insert := func(b postgres.Beginner, n int, then error) error {
		return postgres.InTx(t.Context(), b, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), "insert into numbers values ($1)", n); err != nil {
				return err
			}
			return then
		})
	}
	refused := errors.New("refused")
	require.NoError(t, insert(db, 1, nil))
	assert.ErrorIs(t, insert(db, 2, refused), refused)
	err := postgres.InTx(t.Context(), db, func(tx pgx.Tx) error {
		if err := insert(tx, 1, nil); !postgres.IsCode(err, "23505") || postgres.Constraint(err) != "numbers_pkey" {
			t.Errorf("a double key is %v", err)
		}
		return insert(tx, 3, nil) // the savepoint kept the transaction usable
	})
	require.NoError(t, err)
	assert.Equal(t, "1 3", pgtest.Value[string](t, db, "select string_agg(n::text, ' ' order by n) from numbers"))
}

func TestIsCodeOfOtherErrors(t *testing.T) {
	t.Parallel()
	assert.True(t, !postgres.IsCode(nil, "") && !postgres.IsCode(errors.New("x"), "") &&
		!postgres.IsCode(pgx.ErrNoRows, "LK001"), "an error that no server sent has a code")
}

// A process that pauses in a transaction keeps its locks. After a while the server ends its session.
func TestIdleTransactionEnds(t *testing.T) {
	t.Parallel()
	database := pgtest.EmptyURL(t)
	usual := pgtest.Pool(t, database, postgres.Options{})
	// the test server has it off, too
	pgtest.Equal(t, usual, "off by client", `select setting || ' by ' || source from pg_settings where name = 'jit'`)
	pgtest.Equal(t, usual, "1min", `show idle_in_transaction_session_timeout`)
	hasty := pgtest.Pool(t, database, postgres.Options{IdleTransaction: 5 * time.Second})
	pgtest.Equal(t, hasty, "5s", `show idle_in_transaction_session_timeout`)
	u, err := url.Parse(database)
	require.NoError(t, err)
	q := u.Query()
	q.Set("idle_in_transaction_session_timeout", "100ms")
	u.RawQuery = q.Encode()
	short := pgtest.Pool(t, u.String(), postgres.Options{})
	tx := pgtest.Begin(t, short) // its session has ended
	pgtest.Exec(t, tx, `select pg_advisory_xact_lock(1)`)
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	_, err = usual.Exec(ctx, `select pg_advisory_xact_lock(1)`)
	assert.NoError(t, err, "the lock of a paused process")
}

// TestUnchanged: after a commit, a caller may get the server's shutdown error, and must not repeat a write that would
// count twice.
func TestUnchanged(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{
		"23505": true, "40001": true, "LK003": true, "57014": true, "53300": true, "": false,
		"57P01": false, "57P02": false, "57P03": false, "08006": false,
	} {
		err := fmt.Errorf("insert: %w", &pgconn.PgError{Code: code})
		assert.Equal(t, want, postgres.Unchanged(err), code)
	}
	assert.True(t, !postgres.Unchanged(io.ErrUnexpectedEOF),
		"after a broken connection the write counts as unchanged, want unknown")
}

// An error code of the server may have different remedies.
func TestDiagnoseNamesRemedy(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]*pgconn.PgError{
		"max_locks_per_transaction": {Code: "53200", Hint: "You might need to increase max_locks_per_transaction."},
		"work_mem":                  {Code: "53200"},
		"vacuum the database":       {Code: "54000", Routine: "GetNewTransactionId"},
		"agent migrate":             {Code: "23514", TableName: "agent_activity"},
		"":                          {Code: "23514", TableName: "agent_activity", ConstraintName: "agent_activity_check"},
	} {
		_, todo := postgres.Diagnose(fmt.Errorf("insert: %w", err))
		assert.Truef(t, strings.Contains(todo, want) && (want != "" || todo == ""), "%v: %q", err, todo)
	}
}

func TestErrorNamesUnstorableText(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	for want, arguments := range map[string]postgres.Strict{
		`remove \u0000 from {"name": "a\u0000`: {"json": json.RawMessage(`{"name": "a\u0000b", "x": 1}`), "text": ""},
		`remove \u0000 from the text`:          {"json": json.RawMessage(`{}`), "text": "a\x00b"},
	} {
		const query = `select @json::jsonb, @text::text`
		_, err := db.Exec(t.Context(), query, arguments)
		assert.Truef(t, err != nil && strings.Contains(err.Error(), want), "got %v, want %s", err, want)
		b := &pgx.Batch{}
		b.Queue(query, arguments)
		err = db.SendBatch(t.Context(), b).Close()
		assert.Truef(t, err != nil && strings.Contains(err.Error(), want), "in a batch: got %v, want %s", err, want)
	}
}

// A lock timeout that PostgreSQL reports as a cancel counts as a lock timeout; any other cancel does not.
func TestLockTimeoutReportedAsCancel(t *testing.T) {
	t.Parallel()
	const cancel, limit = "canceling statement due to user request", "canceling statement due to statement timeout"
	const waited = "while locking tuple (0,3) in relation \"agent_locks\"\nSQL statement \"select 1\""
	for _, test := range []struct {
		message, where string
		locked         bool
	}{
		{cancel, waited, true}, {cancel, "", false}, {cancel, "SQL statement \"select 1\"", false}, {limit, waited, false},
	} {
		err := fmt.Errorf("send: %w", &pgconn.PgError{Code: "57014", Message: test.message, Where: test.where})
		assert.Equal(t, test.locked, postgres.Locked(err), test.message, test.where)
		assert.Equal(t, test.locked, postgres.Transient(err), test.message, test.where)
	}
}

func TestRowsGeneric(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.DirectURL(t, pgtest.EmptyURL(t)))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close(context.WithoutCancel(t.Context()))) })
	type row struct{ N int }
	for n := range 3 {
		list, err := postgres.RowsGeneric[row](t.Context(), conn, "read numbers",
			`select g.n from generate_series(1, @most::int) g (n) where g.n > @least`, postgres.Strict{"most": 5, "least": n})
		require.NoError(t, err)
		assert.Equal(t, 5-n, len(list))
	}
	var generic, custom int
	var mode, scans string
	require.NoError(t, conn.QueryRow(t.Context(), `
		select p.generic_plans, p.custom_plans, current_setting('plan_cache_mode'), current_setting('enable_seqscan')
		  from pg_prepared_statements p where p.statement like 'select g.n%'`).Scan(&generic, &custom, &mode, &scans))
	assert.Equal(t, 3, generic, "generic plans")
	assert.Equal(t, 0, custom, "custom plans")
	assert.Equal(t, "auto", mode, "plan_cache_mode afterwards")
	assert.Equal(t, "on", scans, "enable_seqscan afterwards")
	if _, err := postgres.RowsGeneric[row](t.Context(), conn, "read numbers", `select 1 / 0 as n`); !postgres.IsCode(err, "22012") ||
		!strings.HasPrefix(err.Error(), "read numbers: ") {
		t.Errorf("the error is %v", err)
	}
}

// A cached query takes the current values. Each use rejects a missing or extra name.
func TestCachedQueryTakesCurrentValues(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.EmptyURL(t))
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	const text = `select @b::text || @a::text || @b::text || '@c' /* @c */`
	for i := range 3 {
		a, b := fmt.Sprint("a", i), fmt.Sprint("b", i)
		var got string
		err := conn.QueryRow(t.Context(), text, postgres.Strict{"a": a, "b": b}).Scan(&got)
		assert.Truef(t, err == nil && got == b+a+b+"@c", "round %d: %q, %v", i, got, err)
		for name, args := range map[string]postgres.Strict{
			"missing":       {"a": a},
			"left over":     {"a": a, "b": b, "c": ""},
			"another's":     {"a": a, "c": b},
			"there is none": {},
		} {
			err := conn.QueryRow(t.Context(), text, args).Scan(&got)
			assert.Error(t, err, "round", i, "a name that", name, "was let pass", got)
		}
		var batch pgx.Batch
		batch.Queue(text, postgres.Strict{"a": a, "b": b}).QueryRow(func(row pgx.Row) error { return row.Scan(&got) })
		err = conn.SendBatch(t.Context(), &batch).Close()
		assert.Truef(t, err == nil && got == b+a+b+"@c", "round %d, in a batch: %q, %v", i, got, err)
	}
}

// A connection drops its cached queries at the maximum. Dropped queries still work.
func TestCachedQueriesAreBounded(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.EmptyURL(t))
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	for round := range 2 {
		for i := range postgres.MaxCachedQueries + 10 {
			sql, args, err := postgres.Strict{"a": i}.RewriteQuery(t.Context(), conn, fmt.Sprintf("select @a, %d", i), nil)
			require.Truef(t, err == nil && sql == fmt.Sprintf("select $1, %d", i) && len(args) == 1 && args[0] == i,
				"round %d: %q, %v, %v", round, sql, args, err)
			n := postgres.CachedQueries(conn)
			require.Truef(t, n <= postgres.MaxCachedQueries, "%d texts are kept", n)
		}
	}
	sql, _, err := (postgres.Strict{"a": 1}).RewriteQuery(t.Context(), nil, "select @a", nil)
	assert.Truef(t, err == nil && sql == "select $1", "without a connection: %q, %v", sql, err)
}

func TestTextIsStorable(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"nothing":      {"", ""},
		"as it is":     {"día\n\u2028", "día\n\u2028"},
		"a NUL":        {"a\x00b\x00", "ab"},
		"no UTF-8":     {"a\xff\xfeb\xc3", "a\ufffdb\ufffd"},
		"one by a NUL": {"\xe2\x82\x00\xac", "\ufffd\ufffd"},
	}
	for name, test := range tests {
		assert.Equal(t, test.want, postgres.Text(test.text), name)
	}
}

// Every time of PostgreSQL can be read in every query mode, and written as JSON.
func TestEveryTimeIsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	last, first := "9999-12-30T00:00:00Z", "0001-01-02T00:00:00Z"
	for given, want := range map[string]string{
		"infinity": last, "294276-12-31 00:00+00": last, "9999-12-31 23:59:59+00": last,
		"-infinity": first, "4713-01-01 00:00+00 BC": first, "0001-01-01 00:00+00": first,
		"2026-01-31 12:00+02": "2026-01-31T10:00:00Z",
	} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			var got time.Time
			var also, none *time.Time
			err := pool.QueryRow(t.Context(), "select $1::text::timestamptz, $1::text::timestamptz, null::timestamptz", mode,
				given).
				Scan(&got, &also, &none)
			if err != nil {
				t.Errorf("%s, %s: %v", given, mode, err)
				continue
			}
			text, err := json.Marshal(got)
			assert.Truef(t, err == nil && string(text) == `"`+want+`"` && also != nil && also.Equal(got) && none == nil,
				"%s, %s: read as %s, %v and %v (%v), want %s", given, mode, text, also, none, err, want)
		}
	}
	var got time.Time
	assert.Error(t, pool.QueryRow(t.Context(), "select null::timestamptz").Scan(&got), "null was read as", got)
}

// openPool returns a pool of [postgres.Open]. The end of the test closes it.
func openPool(t *testing.T, at string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, at, postgres.Options{MaxConns: 2})
	return pool
}

// A database or a role may have other defaults. Sessions write and read the same values.
func TestValuesAreIndependentOfDatabaseSettings(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := openPool(t, at)
	name := pgx.Identifier{admin.Config().ConnConfig.Database}.Sanitize()
	for _, setting := range []string{
		"timezone = 'Asia/Kolkata'", "datestyle = 'German, DMY'", "intervalstyle = 'sql_standard'",
		"client_encoding = 'latin1'",
		"standard_conforming_strings = off", "array_nulls = off", "jit = on",
	} {
		pgtest.Exec(t, admin, "alter database "+name+" set "+setting)
	}
	const texts = `
		select concat_ws(' ', timestamptz '2026-07-01 00:00:00+00', interval '30 days', length('\n'),
		                 ('{1,null}'::int[])[2] is null, length(chr(8364) || $1), current_setting('jit'))`
	const tracked = `select concat_ws(' ', timestamptz '2026-07-01 00:00:00+00', length('\n'), length($1))`
	pgtest.Equal(t, openPool(t, throughPooler(t, at)), "2026-07-01 00:00:00+00 2 1", tracked, "€")
	pgtest.Equal(t, openPool(t, at), "2026-07-01 00:00:00+00 30 days 2 t 2 off", texts, "€")
	pgtest.Equal(t, openPool(t, at+"&TimeZone=Europe/Madrid"), "Europe/Madrid", `select current_setting('TimeZone')`)
}

// Listening sessions and idle pool sessions stay open, even if the database ends idle sessions.
func TestIdleSessionTimeoutIsOff(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := openPool(t, at)
	name := pgx.Identifier{admin.Config().ConnConfig.Database}.Sanitize()
	pgtest.Exec(t, admin, "alter database "+name+" set idle_session_timeout = '50ms'")
	db := openPool(t, at)
	pgtest.Equal(t, db, "0", `select current_setting('idle_session_timeout')`)
	listening, err := postgres.Dialer(db)(t.Context())
	require.NoError(t, err)
	defer listening.Close(context.WithoutCancel(t.Context()))
	waiting, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = listening.WaitForNotification(waiting)
	assert.Error(t, waiting.Err(), "a session that listens", err)
}

// By default, a server with the locale C creates databases without an encoding.
func TestOtherEncodingIsRejected(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := openPool(t, at)
	name := admin.Config().ConnConfig.Database + "_ascii"
	pgtest.Exec(t, admin, "create database "+pgx.Identifier{name}.Sanitize()+
		" template template0 encoding 'SQL_ASCII' locale 'C'")
	t.Cleanup(func() {
		_, err := admin.Exec(context.WithoutCancel(t.Context()), "drop database "+pgx.Identifier{name}.Sanitize())
		assert.NoError(t, err)
	})
	_, err := postgres.Open(t.Context(), strings.Replace(at, admin.Config().ConnConfig.Database, name, 1),
		postgres.Options{})
	assert.Truef(t, err != nil && strings.Contains(err.Error(), `"SQL_ASCII"`) &&
		strings.Contains(err.Error(), "createdb --encoding=UTF8"), "got %v", err)
}

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }
