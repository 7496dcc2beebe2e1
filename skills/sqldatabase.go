package skills

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Database is where the query of a sql: skill runs.
type Database struct {
	Pool   *pgxpool.Pool
	Writes bool   // skills may declare that they write
	Role   string // queries run as this role; empty for that of the connection
}

// Databases opens a named database. The error is a [*CallError]: [ClassConfiguration] when there is no such database or
// no setting for it, [ClassNetwork] when it cannot be reached. It may be called from many goroutines.
type Databases func(ctx context.Context, name string) (Database, error)

// Check asks the database whether queries can run as its role, and whether the ledger of effects is there where skills
// may write.
func (d Database) Check(ctx context.Context) error {
	tx, err := d.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // it has only read
	var ledger bool
	if err := tx.QueryRow(ctx, `select to_regclass('agent_effects') is not null`).Scan(&ledger); err != nil {
		return fmt.Errorf("look for the table agent_effects: %w", err)
	}
	if d.Writes && !ledger {
		return errors.New("the table agent_effects is missing, which writing skills need: agent apply makes it")
	}
	if d.Role != "" {
		if _, err := tx.Exec(ctx, d.asRole()[2:]); err != nil {
			return fmt.Errorf("take the role %s: %w", d.Role, err)
		}
	}
	return nil
}

// asRole is the statement that makes what follows in a transaction run as the database's role.
func (d Database) asRole() string {
	if d.Role == "" {
		return ""
	}
	return "; set local role " + pgx.Identifier{d.Role}.Sanitize()
}
