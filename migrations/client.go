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

// createClient creates the role of other programs, if this user may, and grants it its rights. A user who may not
// create roles finds the statement for it by ClientMissing.
func (r release) createClient(ctx context.Context, pool *pgxpool.Pool) error {
	there, err := clientExists(ctx, pool)
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
		if _, err := tx.Exec(ctx, fixedSearchPath); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, r.files[len(r.files)-1].code) // the access, by views that may have changed
		return err
	})
	if err != nil {
		return fmt.Errorf("grant the contract to %s: %w", ClientRole, err)
	}
	return nil
}

// ClientMissing returns the statement that a superuser must run before other programs can use the contract, or nothing.
func ClientMissing(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	there, err := clientExists(ctx, pool)
	if err != nil || there {
		return "", err
	}
	return "create role " + ClientRole + " nologin;", nil
}

// CheckClient reports why other programs cannot use the contract, and the next step.
func CheckClient(ctx context.Context, pool *pgxpool.Pool) error {
	missing, err := ClientMissing(ctx, pool)
	if err != nil {
		return err
	}
	if missing != "" {
		return fmt.Errorf("the role %s is missing; run `%s` as a superuser, then `agent migrate`", ClientRole, missing)
	}
	admitted, err := clientHasRights(ctx, pool)
	if err == nil && !admitted {
		err = fmt.Errorf("the rights of %s differ from the contract's; run `agent migrate`", ClientRole)
	}
	return err
}

func clientExists(ctx context.Context, pool *pgxpool.Pool) (there bool, err error) {
	err = pool.QueryRow(ctx, `select exists (select from pg_roles where rolname = @role)`,
		postgres.Strict{"role": ClientRole}).Scan(&there)
	if err != nil {
		return false, fmt.Errorf("look for the role %s: %w", ClientRole, err)
	}
	return there, nil
}

// clientHasRights reports whether the role exists and has its rights, and not every role has those of admins. It checks
// a function and a view of the contract, and a function for admins. After a restore without privileges every role may
// call every function.
func clientHasRights(ctx context.Context, pool *pgxpool.Pool) (admitted bool, err error) {
	err = pool.QueryRow(ctx, `
		select coalesce(has_function_privilege(r.oid, to_regprocedure('try_acquire_agent_lock(text, text, int)'), 'execute')
		    and has_table_privilege(r.oid, to_regclass('agent_locks_live'), 'select')
		    and not has_function_privilege('public', to_regprocedure('void_agent_leases()'), 'execute'), false)
		  from (select) one left join pg_roles r on r.rolname = @role`, postgres.Strict{"role": ClientRole}).Scan(&admitted)
	if err != nil {
		return false, fmt.Errorf("look for the rights of %s: %w", ClientRole, err)
	}
	return admitted, nil
}
