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

// missing returns the parts of this text that a database lacks, in order.
func (t text) missing(ctx context.Context, pool *pgxpool.Pool) ([]step, error) {
	rows, err := pool.Query(ctx, `select m.version, m.name, m.hash from agent_migrations m order by m.version`)
	type row struct {
		Version    int
		Name, Hash string
	}
	applied, err := postgres.Collect(rows, err, "read agent_migrations", pgx.RowToStructByPos[row])
	if err != nil {
		return nil, err
	}
	var former, done int
	made := ""
	for _, a := range applied {
		switch {
		case a.Version < baseline:
			former = a.Version
			if hash := bridges[former]; hash != "" && a.Hash != hash {
				return nil, fmt.Errorf("migration %s: %w", a.Name, ErrChanged)
			}
		case a.Version == baseline:
			made = a.Hash
		case done == len(t.changes):
			return nil, fmt.Errorf("schema version %d: %w", a.Version, ErrNewer)
		case a.Hash != t.changes[done].hash:
			return nil, fmt.Errorf("migration %s: %w", a.Name, ErrChanged)
		default:
			done++
		}
	}
	switch {
	case made == "" && former > 0 && bridges[former] == "":
		return nil, fmt.Errorf("schema version %d: %w", former, ErrOld)
	case made == "" && former == 0:
		return t.begin(0), refuseEmptied(ctx, pool)
	case made == "":
		return t.begin(former), nil
	case made != digest(t.tables()):
		return nil, fmt.Errorf("schema version %d: %w", baseline, ErrChanged)
	}
	changed, err := t.changedCode(ctx, pool)
	if err != nil {
		return nil, err
	}
	return t.goOn(t.changes[done:], changed), nil
}

// firstTyped is the first version with the types of the first file.
const firstTyped = 200

var (
	creates     = regexp.MustCompile(`(?m)^create (?:unlogged )?(?:table|(?:unique )?index)\b`)
	createsType = regexp.MustCompile(`(?ms)^create type .*?;\n`)
)

// refuseEmptied returns an error if the tables exist without the record of their version.
func refuseEmptied(ctx context.Context, pool *pgxpool.Pool) error {
	var there bool
	err := pool.QueryRow(ctx, `select to_regclass('agent_executions') is not null`).Scan(&there)
	if err == nil && there {
		err = errors.New("the tables are there, and agent_migrations is empty: they were restored without their rows; restore " +
			"the whole dump, or migrate an empty database")
	}
	return err
}

// begin creates the baseline and everything after it, in an empty database or one of a former version.
func (t text) begin(former int) []step {
	first := step{version: baseline, hash: digest(t.tables()), code: t.nouns}
	types := t.nouns[0]
	rest := strings.TrimPrefix(t.tables(), types.tables)
	switch former {
	case 0:
		first.what, first.names = "the baseline", []string{"baseline"}
		first.sql = types.tables + types.code + rest // defaults and checks of tables call functions of types
	default:
		first.what, first.names = fmt.Sprintf("the bridge from version %d", former), []string{"bridge"}
		first.sql = t.bridges[former] + creates.ReplaceAllString(createsType.ReplaceAllString(rest, ""), "$0 if not exists")
		if former < firstTyped {
			first.sql = types.tables + first.sql
		}
	}
	return append([]step{first}, t.goOn(t.changes, nil)...)
}

// goOn returns the steps for changes. Changed code joins the last one. It gets a step of its own if there is no change,
// or if the last one runs outside a transaction.
func (t text) goOn(changes []change, code []noun) []step {
	var steps []step
	for _, c := range changes {
		steps = append(steps, step{
			what: "migration " + c.name, version: c.version, hash: c.hash, sql: c.sql,
			names: []string{c.name},
		})
	}
	if len(code) == 0 {
		return steps
	}
	if n := len(steps); n > 0 && !steps[n-1].outside() {
		steps[n-1].code = code
	} else {
		steps = append(steps, step{what: "the code", code: code})
	}
	last := &steps[len(steps)-1]
	for _, n := range code {
		last.names = append(last.names, "code of "+n.name)
	}
	return steps
}

// changedCode lists the files whose code differs from the database's.
func (t text) changedCode(ctx context.Context, pool *pgxpool.Pool) ([]noun, error) {
	rows, err := pool.Query(ctx, `select c.name, c.hash from agent_schema_code c`)
	if err != nil {
		return nil, fmt.Errorf("read agent_schema_code: %w", err)
	}
	var name, hash string
	has := map[string]string{}
	if _, err := pgx.ForEachRow(rows, []any{&name, &hash}, func() error { has[name] = hash; return nil }); err != nil {
		return nil, fmt.Errorf("read agent_schema_code: %w", err)
	}
	var changed []noun
	for _, n := range t.nouns {
		if has[n.name] != digest(n.code) {
			changed = append(changed, n)
		}
	}
	return changed, nil
}

var created = regexp.MustCompile(
	`(?im)^create\s+(?:or\s+replace\s+)?(?:table|view|function|domain|type)\s+(?:if\s+not\s+exists\s+)?([a-z0-9_]+)\b[^.]`)

// refuseStrangers returns an error, before anything is written, if a database without migrations has a table, view,
// function or type with a name of the files, or a foreign schema of such a name.
func refuseStrangers(ctx context.Context, pool *pgxpool.Pool, t text) error {
	var names []string
	for _, n := range t.nouns {
		for _, match := range created.FindAllStringSubmatch(n.tables+n.code, -1) {
			names = append(names, match[1])
		}
	}
	var met string
	err := pool.QueryRow(ctx, `
		with here as (select n.oid from pg_namespace n where n.nspname = current_schema())
		select coalesce(min(x.name), '')
		  from (select 'relation ' || c.relname from pg_class c join here on here.oid = c.relnamespace
		         where c.relname = any (@names)
		        union all
		        select 'function ' || p.proname from pg_proc p join here on here.oid = p.pronamespace
		         where p.proname = any (@names)
		        union all
		        select 'type ' || y.typname from pg_type y join here on here.oid = y.typnamespace
		         where y.typname = any (@names) and y.typrelid = 0
		        union all
		        select 'schema ' || n.nspname from pg_namespace n
		         where n.nspname = 'lanekeeper' or n.nspname = 'river' and not has_schema_privilege(n.oid, 'create')) x (name)
		 where to_regclass('agent_migrations') is null`,
		postgres.Strict{"names": names}).Scan(&met)
	if err != nil {
		return fmt.Errorf("look for another program's tables: %w", err)
	}
	if met != "" {
		return fmt.Errorf("the database has the %s of another program; %s", met, ownDatabase)
	}
	return nil
}

const ownDatabase = "give agent a database of its own: createdb agent, and name it in DATABASE_URL"
