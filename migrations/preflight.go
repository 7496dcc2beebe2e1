package migrations

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// quoted is a name that has another meaning without quotes; a file omits them.
var quoted = regexp.MustCompile(`[A-Z."\s]`)

// refusePlace returns an error, before anything is written, in two cases. The first existing schema of the search path
// does not admit the tables. Or the tables are in another schema. One with the role's own name, created later, precedes
// public: a second agent would begin in it, on the first one's queue.
func refusePlace(ctx context.Context, pool *pgxpool.Pool) error {
	var schema, user, database, elsewhere string
	var mayTable, maySchema bool
	err := pool.QueryRow(ctx, `
		with first as (select coalesce(current_schema(), '') as name),
		     has as (select n.nspname as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
		       where c.relname = 'agent_migrations')
		select f.name, current_user, current_database(),
		       coalesce((select min(h.name) from has h where not exists (select from has x where x.name = f.name)), ''),
		       coalesce((select has_schema_privilege(n.oid, 'create') from pg_namespace n where n.nspname = f.name), false),
		       has_database_privilege(current_database(), 'create')
		         or exists (select from pg_namespace n where n.nspname = 'river')
		  from first f`).Scan(&schema, &user, &database, &elsewhere, &mayTable, &maySchema)
	name := func(s string) string { return pgx.Identifier{s}.Sanitize() }
	switch {
	case err != nil:
		return fmt.Errorf("look where the tables go: %w", err)
	case schema == "":
		return errors.New("no schema of the search path is there; create it, or name one that is: add search_path=public to " +
			"DATABASE_URL")
	case elsewhere != "":
		return fmt.Errorf("agent's tables are in the schema %s of this database, and the search path begins with %s; "+
			"add search_path=%s to DATABASE_URL, or %s", name(elsewhere), name(schema), elsewhere, ownDatabase)
	case quoted.MatchString(schema):
		return fmt.Errorf("the schema %s has a name that needs quotes; rename it, or name another in the search path: of "+
			"small letters, digits and _", name(schema))
	case !mayTable || !maySchema:
		if err := refuseOther(ctx, pool); err != nil {
			return err
		}
		return fmt.Errorf("%s may not create tables in the schema %s, or schemas in the database; make it the owner: alter "+
			"database %s owner to %s",
			name(user), name(schema), name(database), name(user))
	}
	return nil
}

// Rights returns an error with the remedy if the user of pool lacks a right for serving, now or later. It cannot write,
// or another role owns the tables. A serving process creates new months of the activity log. A user without that right
// would fail only when the last month has passed. Months that a member of the owner creates belong to the member, and
// the owner's next migration would be refused. The tables' rows must not be hidden from the user, nor their triggers
// disabled. The schema must exist.
func Rights(ctx context.Context, pool *pgxpool.Pool) error {
	var owner, user, database string
	var readOnly bool
	err := pool.QueryRow(ctx, `
		select pg_get_userbyid(c.relowner), current_user, current_database(),
		       current_setting('transaction_read_only')::boolean
		  from pg_class c where c.oid = to_regclass('agent_activity')`).Scan(&owner, &user, &database, &readOnly)
	name := func(s string) string { return pgx.Identifier{s}.Sanitize() }
	switch {
	case err != nil:
		return fmt.Errorf("read the owner of the tables: %w", err)
	case readOnly:
		return errors.New("nothing can be written: it is a standby, or default_transaction_read_only is on; name the " +
			"primary in DATABASE_URL, or set that to off")
	case owner != user:
		return fmt.Errorf("the tables belong to %[1]s, and %[2]s cannot make the log's next months for it; name %[1]s in "+
			"DATABASE_URL, or run: "+
			"grant %[1]s to %[2]s; alter role %[2]s in database %[3]s set role to %[1]s", name(owner),
			name(user), name(database))
	}
	return untouched(ctx, pool)
}

// refuseOther returns an error if the tables belong to another role than the migrating one. New objects would belong to
// the migrating role, and the owner could not use them.
func refuseOther(ctx context.Context, pool *pgxpool.Pool) error {
	var owner, user string
	err := pool.QueryRow(ctx, `
		select pg_get_userbyid(c.relowner), current_user from pg_class c where c.oid = to_regclass('agent_migrations')`).
		Scan(&owner, &user)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err == nil && owner != user:
		return fmt.Errorf("the tables belong to %s; migrate as that user", pgx.Identifier{owner}.Sanitize())
	}
	return err
}

// explainDenied adds the error of [Rights] to an error of a user who may not read the tables.
func explainDenied(ctx context.Context, pool *pgxpool.Pool, err error) error {
	if !postgres.IsCode(err, "42501") {
		return err
	}
	if rights := Rights(ctx, pool); rights != nil {
		return fmt.Errorf("%w; %w", err, rights)
	}
	return err
}

// untouched returns an error if the tables have lost something that the program relies on. Row-level security that
// applies to the user hides rows silently, for example that of a pause. Without the triggers nothing ends, and stale
// claims are accepted.
func untouched(ctx context.Context, pool *pgxpool.Pool) error {
	var hidden, silent, role string
	err := pool.QueryRow(ctx, `
		with ours as (select c.oid from pg_class c
		               where c.relnamespace in (to_regnamespace('river'), (select a.relnamespace from pg_class a
		                 where a.oid = to_regclass('agent_activity')))
		                 and c.relkind in ('r', 'p') and c.relname ~ '^(agent|river)_')
		select coalesce((select min(o.oid::regclass::text) from ours o where row_security_active(o.oid)), ''),
		       coalesce((select min(o.oid::regclass::text) from ours o join pg_trigger t on t.tgrelid = o.oid
		         where t.tgenabled in ('D', 'R')), ''),
		       current_setting('session_replication_role')`).Scan(&hidden, &silent, &role)
	switch {
	case err != nil:
		return fmt.Errorf("look whether the tables are as they were made: %w", err)
	case hidden != "":
		return fmt.Errorf("row-level security hides rows of %[1]s, maybe of other tables too; run: alter table %[1]s "+
			"disable row level security", hidden)
	case silent != "":
		return fmt.Errorf("triggers of %[1]s are off, maybe of other tables too; run: alter table %[1]s enable trigger user",
			silent)
	case role != "origin":
		return fmt.Errorf("session_replication_role is %s, which keeps triggers off; reset it, for the role and for the "+
			"database", role)
	}
	return nil
}

// ClientRole is the role of other programs: it may call the functions and read the views of the contract, and nothing
// else. Grant it to the roles that they connect as.
const ClientRole = "agent_client"

// admitClient creates the role of other programs, if this user may, and grants it its rights. A user who may not create
// roles finds the statement for it by ClientMissing.
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

// ClientMissing returns the statement that a superuser must run before other programs can use the contract, or nothing.
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

// clientAdmitted reports whether the role exists and has its rights, and no other role has them. After a restore
// without privileges every role may call every function.
func clientAdmitted(ctx context.Context, pool *pgxpool.Pool) (admitted bool, err error) {
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
