package postgres_test

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A text that was sent before is rewritten as it was the first time, with the values of now; what is missing or left
// over is refused each time.
func TestNamesMeanTheSameEveryTime(t *testing.T) {
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

// A connection forgets texts before there are too many, and they work all the same.
func TestTextsAreForgottenBeforeThereAreTooMany(t *testing.T) {
	t.Parallel()
	conn, err := pgx.Connect(t.Context(), pgtest.EmptyURL(t))
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	for round := range 2 {
		for i := range postgres.TextsMost + 10 {
			sql, args, err := postgres.Strict{"a": i}.RewriteQuery(t.Context(), conn, fmt.Sprintf("select @a, %d", i), nil)
			require.Truef(t, err == nil && sql == fmt.Sprintf("select $1, %d", i) && len(args) == 1 && args[0] == i,
				"round %d: %q, %v, %v", round, sql, args, err)
			n := postgres.Texts(conn)
			require.Truef(t, n <= postgres.TextsMost, "%d texts are kept", n)
		}
	}
	sql, _, err := (postgres.Strict{"a": 1}).RewriteQuery(t.Context(), nil, "select @a", nil)
	assert.Truef(t, err == nil && sql == "select $1", "without a connection: %q, %v", sql, err)
}
