//go:build unix

package pgserver

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// giveAway makes config.Owner and gives it the database, with what the superuser made in it in an earlier version.
func (s *Server) giveAway(ctx context.Context, config Config) error {
	if config.Owner == "" {
		return nil
	}
	conn, err := pgx.Connect(ctx, connString(s.layout, superuser, config.Database))
	if err != nil {
		return fmt.Errorf("give the database to %s: %w", config.Owner, err)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		var owned bool
		err := tx.QueryRow(ctx, `
			select pg_get_userbyid(datdba) = @owner from pg_database, pg_advisory_xact_lock(hashtext('lanekeeper owner'))
			 where datname = current_database()`, postgres.Strict{"owner": config.Owner}).Scan(&owned)
		if err != nil || owned {
			return err
		}
		if _, err := tx.Exec(ctx, `select set_config('lanekeeper.owner', @owner, true)`,
			postgres.Strict{"owner": config.Owner}); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, changeOwner)
		return err
	})
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return fmt.Errorf("give the database to %s: %w", config.Owner, err)
	}
	return nil
}

// changeOwner gives the database and all that is in it to a role. Indexes, sequences of columns and row types follow
// their tables.
const changeOwner = `
do $$
declare
  new_owner text := current_setting('lanekeeper.owner');
  change    text;
begin
  if not exists (select from pg_roles where rolname = new_owner) then
    execute format('create role %I login', new_owner);
  end if;
  for change in
    select 'database ' || quote_ident(current_database())
    union all
    select format('schema %I', nspname) from pg_namespace
     where nspname !~ '^pg_' and nspname <> 'information_schema'
    union all
    select format('table %s', c.oid::regclass) from pg_class c
      join pg_namespace n on n.oid = c.relnamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema' and c.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
       and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i', 'e')
             and (c.relkind = 'S' or d.deptype = 'e'))
    union all
    select format('routine %s', p.oid::regprocedure) from pg_proc p
      join pg_namespace n on n.oid = p.pronamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema'
       and not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e')
    union all
    select format('type %s', t.oid::regtype) from pg_type t
      join pg_namespace n on n.oid = t.typnamespace
     where n.nspname !~ '^pg_' and n.nspname <> 'information_schema' and t.typtype in ('e', 'd', 'r')
       and not exists (select from pg_depend d where d.classid = 'pg_type'::regclass and d.objid = t.oid and d.deptype = 'e')
  loop
    execute format('alter %s owner to %I', change, new_owner);
  end loop;
end
$$`
