package postgres_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// opened is a pool of [postgres.Open], closed at the end.
func opened(t *testing.T, at string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, at, postgres.Options{MaxConns: 2})
	return pool
}

// A database, or a role, may be set up for others; what a session writes and reads is the same.
func TestTextsAreTheSameWhateverTheDatabaseSets(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := opened(t, at)
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
		  ('{1,null}'::int[])[2] is null, length(chr(8364) || $1),
		       current_setting('jit'))`
	var got string
	err := opened(t, at).QueryRow(t.Context(), texts, "€").Scan(&got)
	assert.Truef(t, err == nil && got == "2026-07-01 00:00:00+00 30 days 2 t 2 off", "got %q, %v", got, err)
	const zone = `select current_setting('TimeZone')`
	err = opened(t, at+"&TimeZone=Europe/Madrid").QueryRow(t.Context(), zone).Scan(&got)
	assert.Truef(t, err == nil && got == "Europe/Madrid",
		"with a zone in the connection string the zone is %q, %v", got, err)
}

// Sessions that listen are idle, and so are those of a pool at night: a database that ends such sessions ended both,
// again and again.
func TestAnIdleSessionIsKeptWhateverTheDatabaseSets(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := opened(t, at)
	name := pgx.Identifier{admin.Config().ConnConfig.Database}.Sanitize()
	pgtest.Exec(t, admin, "alter database "+name+" set idle_session_timeout = '50ms'")
	db := opened(t, at)
	var set string
	err := db.QueryRow(t.Context(), `select current_setting('idle_session_timeout')`).Scan(&set)
	assert.Truef(t, err == nil && set == "0", "a session of the pool is ended after %q: %v", set, err)
	listening, err := postgres.Dialer(db)(t.Context())
	require.NoError(t, err)
	defer listening.Close(context.WithoutCancel(t.Context()))
	waiting, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = listening.WaitForNotification(waiting)
	assert.Error(t, waiting.Err(), "a session that listens", err)
}

// A server that was made for the locale C has databases of no encoding at all, unless one says otherwise.
func TestADatabaseOfAnotherEncodingIsRefused(t *testing.T) {
	t.Parallel()
	at := pgtest.EmptyURL(t)
	admin := opened(t, at)
	name := admin.Config().ConnConfig.Database + "_ascii"
	pgtest.Exec(t, admin, "create database "+pgx.Identifier{name}.Sanitize()+
		" template template0 encoding 'SQL_ASCII' locale 'C'")
	t.Cleanup(func() {
		_, err := admin.Exec(context.WithoutCancel(t.Context()),
			"drop database "+pgx.Identifier{name}.Sanitize())
		assert.NoError(t, err)
	})
	_, err := postgres.Open(t.Context(), strings.Replace(at, admin.Config().ConnConfig.Database, name, 1),
		postgres.Options{})
	assert.Truef(t, err != nil && strings.Contains(err.Error(), `"SQL_ASCII"`) &&
		strings.Contains(err.Error(), "createdb --encoding=UTF8"), "got %v", err)
}
