package migrations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ClientRole is the role of other programs: it may call the functions and read the views of the contract, and nothing
// else. Grant it to the roles that they connect as.
const ClientRole = "agent_client"

// admitClient makes the role of other programs, where this user may, and gives it its rights. Who may not create
// roles finds the statement that does it by ClientMissing.
func (t text) admitClient(ctx context.Context, pool *pgxpool.Pool) error {
	there, err := clientThere(ctx, pool)
	if err != nil {
		return err
	}
	if !there {
		_, err := pool.Exec(ctx, `create role `+ClientRole+` nologin`)
		// not allowed; or another database's migration was first
		if err != nil && !postgres.IsCode(err, "42501", "42710", "23505") {
			return fmt.Errorf("create the role %s: %w", ClientRole, err)
		}
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, steadyPath); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, t.nouns[len(t.nouns)-1].code) // the access, by views that may have changed
		return err
	})
	if err != nil {
		return fmt.Errorf("grant the contract to %s: %w", ClientRole, err)
	}
	return nil
}

// ClientMissing returns the statement that a superuser has to run before other programs can use the contract, or
// nothing.
func ClientMissing(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	there, err := clientThere(ctx, pool)
	if err != nil || there {
		return "", err
	}
	return "create role " + ClientRole + " nologin;", nil
}

func clientThere(ctx context.Context, pool *pgxpool.Pool) (there bool, err error) {
	err = pool.QueryRow(ctx, `select exists (select from pg_roles where rolname = @role)`,
		postgres.Strict{"role": ClientRole}).Scan(&there)
	if err != nil {
		return false, fmt.Errorf("look for the role %s: %w", ClientRole, err)
	}
	return there, nil
}

// clientAdmitted reports whether the role exists and has its rights.
func clientAdmitted(ctx context.Context, pool *pgxpool.Pool) (admitted bool, err error) {
	err = pool.QueryRow(ctx, `
		select coalesce(has_function_privilege(r.oid, to_regprocedure('try_acquire_agent_lock(text, text, int)'), 'execute'),
		  false)
		  from (select) one left join pg_roles r on r.rolname = @role`, postgres.Strict{"role": ClientRole}).Scan(&admitted)
	if err != nil {
		return false, fmt.Errorf("look for the rights of %s: %w", ClientRole, err)
	}
	return admitted, nil
}
