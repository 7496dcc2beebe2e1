package skills

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// effectsDDL creates the ledger of effects in a writable database. The transaction of a write adds a row under the
// call's idempotency key.
const effectsDDL = `
create table if not exists agent_effects (
  key         text primary key,
  skill       text not null,
  fingerprint text not null,
  result      jsonb,
  created_at  timestamptz not null default clock_timestamp()
);
comment on table agent_effects is
  'What writing skills of the agent did here, by the key of their step. A step that is repeated gets the result.'`

// undefinedTable is the SQLSTATE of a table that does not exist.
const undefinedTable = "42P01"

// PrepareEffects creates the ledger of effects in a writable database, if it is missing.
func PrepareEffects(ctx context.Context, db Database) error {
	return postgres.InTx(ctx, db.Pool, func(tx pgx.Tx) error {
		var exists bool
		err := tx.QueryRow(ctx, `
			select to_regclass('agent_effects') is not null
			  from (select pg_advisory_xact_lock(hashtextextended('lanekeeper effects', 0))) locked`).Scan(&exists)
		if err != nil || exists {
			return err
		}
		_, err = tx.Exec(ctx, effectsDDL)
		return err
	})
}

// runEffect runs a writing query and records its result under the call's key, in one transaction. A repeated call with
// the same key returns the recorded result and does not write, even after a crash.
func (h sqlHandler) runEffect(
	ctx context.Context, db Database, c Call, timeout time.Duration, args map[string]any,
) (any, error) {
	entry := ledgerEntry{key: c.IdempotencyKey, skill: c.Skill.Name}
	if entry.key == "" {
		entry.key = rand.Text()
	}
	text, err := json.Marshal(args)
	if err != nil {
		return nil, newCallError(ClassHandler, "the arguments cannot be written: %s", err)
	}
	sum := sha256.Sum256(append([]byte(c.Skill.Name+"\x00"), text...))
	entry.fingerprint = hex.EncodeToString(sum[:16])
	result, err := executions.RetryTransient(ctx, func(ctx context.Context) (json.RawMessage, error) {
		result, err := h.runOnce(ctx, db, entry, timeout, args)
		if postgres.IsCode(err, undefinedTable) && !errors.As(err, new(queryError)) {
			if err = PrepareEffects(ctx, db); err == nil {
				result, err = h.runOnce(ctx, db, entry, timeout, args)
			}
		}
		if postgres.IsCode(err, queryCanceled) {
			err = classifySQLError(timeout, err) // the skill's own timeout is not transient
		}
		return result, err
	})
	if err != nil {
		return nil, classifySQLError(timeout, err)
	}
	return result, nil
}

// ledgerEntry is a row of the ledger.
type ledgerEntry struct{ key, skill, fingerprint string }

// runOnce runs the query unless the ledger has the key. It inserts the key first, so a concurrent call with this key
// waits.
func (h sqlHandler) runOnce(
	ctx context.Context, db Database, e ledgerEntry, timeout time.Duration, args map[string]any,
) (result json.RawMessage, err error) {
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_ = tx.Rollback(closing) // a no-op after the commit
	}()
	if _, err := tx.Exec(ctx, transactionSettings(timeout)); err != nil {
		return nil, err
	}
	tag, err := tx.Exec(ctx, `
		insert into agent_effects (key, skill, fingerprint) values (@key, @skill, @fingerprint)
		on conflict (key) do nothing`,
		postgres.Strict{"key": e.key, "skill": e.skill, "fingerprint": e.fingerprint})
	if err != nil {
		return nil, err
	}
	if tag.RowsAffected() == 0 {
		return e.recordedResult(ctx, tx)
	}
	if result, err = h.write(ctx, tx, db, args); err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, `update agent_effects set result = @result where key = @key`,
		postgres.Strict{"key": e.key, "result": result})
	if err != nil {
		return nil, err
	}
	return result, tx.Commit(ctx)
}

// recordedResult returns the result of an earlier call with the same key.
func (e ledgerEntry) recordedResult(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
	var fingerprint string
	var result json.RawMessage
	err := tx.QueryRow(ctx, `select fingerprint, result from agent_effects where key = @key`,
		postgres.Strict{"key": e.key}).Scan(&fingerprint, &result)
	if err == nil && fingerprint != e.fingerprint {
		err = newCallError(ClassRefused, "the key %s was used for another call", e.key)
	}
	return result, err
}

// queryError is an error of the skill's query. Other errors are those of the ledger.
type queryError struct{ error }

func (e queryError) Unwrap() error { return e.error }

// write runs the query as the database's role and resets the session's state.
func (h sqlHandler) write(ctx context.Context, tx pgx.Tx, db Database, args map[string]any) (json.RawMessage, error) {
	if _, err := tx.Exec(ctx, "savepoint lanekeeper_query; "+db.setRole()); err != nil {
		return nil, err
	}
	result, err := h.runWrite(ctx, tx.Conn(), args)
	if err != nil {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_, undoErr := tx.Exec(closing, `rollback to savepoint lanekeeper_query; select pg_advisory_unlock_all()`)
		if undoErr != nil {
			_ = tx.Conn().Close(closing) // the connection is unusable
		}
		return nil, queryError{err}
	}
	if _, err := tx.Exec(ctx, `set local role to default; select pg_advisory_unlock_all()`); err != nil {
		return nil, err
	}
	return encodeResult(result)
}

// runWrite runs a statement and returns its rows, or its number of rows.
func (h sqlHandler) runWrite(ctx context.Context, conn *pgx.Conn, args map[string]any) (sqlResult, error) {
	plain, values, err := h.bind(ctx, h.query, args)
	if err != nil {
		return sqlResult{}, err
	}
	statement, err := conn.PgConn().Prepare(ctx, "", plain, nil)
	if err != nil {
		return sqlResult{}, err
	}
	if len(statement.Fields) > 0 {
		query, values, err := h.bind(ctx, h.wrapReturning(), args)
		if err != nil {
			return sqlResult{}, err
		}
		return h.run(ctx, conn, query, values)
	}
	texts, err := parameterTexts(values, statement.ParamOIDs)
	if err != nil {
		return sqlResult{}, err
	}
	tag, err := conn.PgConn().ExecPrepared(ctx, "", texts, nil, nil).Close()
	return sqlResult{Rows: []json.RawMessage{}, RowCount: int(tag.RowsAffected())}, err
}

// wrapReturning wraps the query in a statement that reads its rows. It has no row limit, because a function in a select
// must act on every row.
func (h sqlHandler) wrapReturning() string {
	return "with lanekeeper_effect as (\n" + h.query + "\n) " + withSizeLimit("lanekeeper_effect lanekeeper_row")
}
