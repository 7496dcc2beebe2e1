package migrations

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Rights returns an error with the remedy if the user of pool lacks a right for serving, now or later. It cannot write,
// or another role owns the tables. A serving process creates new months of the activity log. A user without that right
// would fail only when the last month has passed. Months that a member of the owner creates belong to the member, and
// the owner's next migration would be refused. The tables' rows must not be hidden from the user, nor their triggers
// disabled. The schema must exist.
func Rights(ctx context.Context, pool *pgxpool.Pool) error {
	var owner, user, database string
	var super, readOnly bool
	err := pool.QueryRow(ctx, `
		select r.rolname, r.rolsuper, current_user, current_database(), current_setting('transaction_read_only')::boolean
		  from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = to_regclass('agent_activity')`).
		Scan(&owner, &super, &user, &database, &readOnly)
	name := func(s string) string { return pgx.Identifier{s}.Sanitize() }
	switch {
	case err != nil:
		return fmt.Errorf("read the owner of the tables: %w", err)
	case readOnly:
		return errors.New("nothing can be written: it is a standby, or default_transaction_read_only is on; name the " +
			"primary in DATABASE_URL, or set that to off")
	case owner != user && super: // a member of a superuser could do everything
		return fmt.Errorf("the tables belong to the superuser %[1]s, and %[2]s cannot make the log's next months for it; restore "+
			"the dump as %[2]s, with pg_restore --no-owner", name(owner), name(user))
	case owner != user:
		return fmt.Errorf("the tables belong to %[1]s, and %[2]s cannot make the log's next months for it; name %[1]s in "+
			"DATABASE_URL, or run: "+
			"grant %[1]s to %[2]s; alter role %[2]s in database %[3]s set role to %[1]s", name(owner),
			name(user), name(database))
	}
	return checkTables(ctx, pool)
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

// declared finds the objects that a file creates by name. Triggers that a file creates in a loop are not among them.
var declared = regexp.MustCompile(`(?im)^create\s+(?:or\s+replace\s+)?(?:unlogged\s+)?(?:unique\s+)?` +
	`(table|view|function|index|trigger)\s+(?:concurrently\s+)?(?:if\s+not\s+exists\s+)?([a-z0-9_.]+)`)

// CheckObjects returns an error with the remedy if the database lacks objects that this binary's files create. A
// restore that lost its last part has no indexes and triggers. The schema must be this binary's.
func CheckObjects(ctx context.Context, pool *pgxpool.Pool) error {
	r, err := embedded()
	if err != nil {
		return err
	}
	texts := []string{r.tables()}
	for _, f := range r.files {
		texts = append(texts, f.code)
	}
	for _, c := range r.changes {
		texts = append(texts, c.sql)
	}
	var kinds, names []string
	for _, match := range declared.FindAllStringSubmatch(strings.Join(texts, "\n"), -1) {
		kinds, names = append(kinds, match[1]), append(names, match[2])
	}
	var missing int
	var examples string
	err = pool.QueryRow(ctx, `
		with schemas as (select n.oid, case n.nspname when 'lanekeeper' then 'lanekeeper.' else '' end as prefix
		    from pg_namespace n where n.nspname in (current_schema(), 'lanekeeper')),
		  there (kind, name) as (
		    select case c.relkind when 'v' then 'view' when 'i' then 'index' when 'I' then 'index' else 'table' end,
		           s.prefix || c.relname
		      from pg_class c join schemas s on s.oid = c.relnamespace
		    union all
		    select 'function', s.prefix || p.proname from pg_proc p join schemas s on s.oid = p.pronamespace
		    union all
		    select 'trigger', t.tgname::text from pg_trigger t join pg_class c on c.oid = t.tgrelid
		      join schemas s on s.oid = c.relnamespace),
		  missing as (select * from unnest(@kinds::text[], @names::text[]) as d (kind, name)
		    except select t.kind, t.name from there t)
		select count(*), coalesce((select string_agg(x.kind || ' ' || x.name, ', ')
		    from (select m.kind, m.name from missing m order by m.kind desc, m.name limit 3) x), '')
		  from missing`, postgres.Strict{"kinds": kinds, "names": names}).Scan(&missing, &examples)
	if err != nil {
		return fmt.Errorf("look for the objects of the schema: %w", err)
	}
	if missing > 0 {
		return fmt.Errorf("the schema lacks %d of its objects: %s%s; restore the whole dump, or, if functions, views and "+
			"triggers alone are missing, run `delete from agent_schema_code` in psql and then `agent migrate`", missing, examples,
			map[bool]string{true: ", …"}[missing > 3])
	}
	return nil
}

// checkTables returns an error if the tables have lost something that the program relies on. Row-level security that
// applies to the user hides rows silently, for example that of a pause. Without the triggers nothing ends, and stale
// claims are accepted.
func checkTables(ctx context.Context, pool *pgxpool.Pool) error {
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

// CheckCreators returns an error with the remedy if a role that cannot act as the owner may create objects in a schema
// that the owner's sessions search. Such a role could make the sessions call its code: a function or operator whose
// parameters fit a call better than PostgreSQL's own.
func CheckCreators(ctx context.Context, pool *pgxpool.Pool) error {
	var schema, role, owner string
	err := pool.QueryRow(ctx, `
		select quote_ident(n.nspname), coalesce(quote_ident(r.rolname), 'public'), quote_ident(pg_get_userbyid(c.relowner))
		  from pg_class c
		  join pg_namespace n on n.nspname = any (current_schemas(false) || array['lanekeeper', 'river']::name[])
		 cross join aclexplode(n.nspacl) a
		  left join pg_roles r on r.oid = a.grantee
		 where c.oid = to_regclass('agent_activity') and a.privilege_type = 'CREATE' and a.grantee <> n.nspowner
		   and not coalesce(pg_has_role(r.oid, c.relowner, 'member'), false)
		 order by a.grantee, n.nspname limit 1`).Scan(&schema, &role, &owner)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("read who may create objects: %w", err)
	}
	who := "the role " + role
	if role == "public" {
		who = "every login"
	}
	return fmt.Errorf("%[1]s may create functions and operators in the schema %[2]s, which then run as %[3]s; run, as the "+
		"owner of the schema: grant create on schema %[2]s to %[3]s; revoke create on schema %[2]s from %[4]s",
		who, schema, owner, role)
}
