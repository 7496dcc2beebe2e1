package migrations_test

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// The rule is in docs/upgrading.md. A release expands the schema in ways that the previous release does not notice. It
// drops objects only if no release that may still run uses them. breakingChanges compares the catalogue before and
// after a file; forbiddenStatements reads the statements that leave no mark in a catalogue. The list allowed has the
// exceptions, with the reason.

// catalogue lists the objects that the program of the previous release relies on, and the objects that take long to
// create.
const catalogue = `
	with ours as (
	  select c.oid, c.relname, c.relkind, c.relfilenode from pg_class c
	   where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p', 'v', 'm') and not c.relispartition
	     and c.relname <> 'agent_migrations'),
	functions as (
	  select p.oid,
	         case when p.pronamespace = 'lanekeeper'::regnamespace then 'lanekeeper.' else '' end || p.proname as proname,
	         pg_get_function_identity_arguments(p.oid) as identity, pg_get_function_result(p.oid) as result,
	         array(select t::regtype::text from unnest(p.proargtypes) with ordinality u(t, n) order by n) as types,
	         p.pronargs - p.pronargdefaults as needed
	    from pg_proc p where p.pronamespace in ('public'::regnamespace, 'lanekeeper'::regnamespace)
	      and p.prorettype <> 'trigger'::regtype and p.prokind = 'f')
	select 'relation' as kind, relname as name, '' as part, relkind::text as about, relfilenode::text as more, '{}'::text[]
	  as types, 0 as needed from ours
	union all
	select 'column', o.relname, a.attname, format_type(a.atttypid, a.atttypmod),
	       case when a.attnotnull and not a.atthasdef and a.attidentity = '' and a.attgenerated = '' then 'must be given'
	         when a.attnotnull then 'not null' else '' end, '{}', 0
	  from ours o join pg_attribute a on a.attrelid = o.oid and a.attnum > 0 and not a.attisdropped
	union all
	select 'index', o.relname, i.indexrelid::regclass::text, '', i.indrelid::regclass::text, '{}', 0 from ours o
	  join pg_index i on i.indrelid = o.oid
	union all
	select 'constraint', o.relname, n.conname, pg_get_constraintdef(n.oid), case when n.convalidated then 'validated'
	  else '' end, '{}', 0
	  from ours o join pg_constraint n on n.conrelid = o.oid and n.contype in ('c', 'f', 'u', 'x')
	union all
	select 'function', proname, identity, result, '', types, needed from functions`

// thing is a row of the catalogue.
type thing struct {
	Kind, Name, Part, About, More string
	Types                         []string
	Needed                        int
}

// schema is the catalogue by key.
type schema map[string]thing

func (s schema) has(kind, name, part string) bool {
	_, ok := s[kind+" "+name+" "+part]
	return ok
}

func readSchema(t *testing.T, db postgres.DB) schema {
	t.Helper()
	things := pgtest.Rows[thing](t, db, catalogue)
	s := schema{}
	for _, x := range things {
		s[x.Kind+" "+x.Name+" "+x.Part] = x
	}
	return s
}

// breakingChanges lists, in words, the schema changes of a file that break the previous release, or may block it.
func breakingChanges(before, after schema) []string {
	var found []string
	say := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	for key, old := range before {
		now, there := after[key]
		switch old.Kind {
		case "relation":
			if !there {
				say("drops %s", old.Name)
			} else if old.More != now.More && now.About == "r" {
				say("rewrites %s", old.Name)
			}
		case "column":
			if !after.has("relation", old.Name, "") {
				continue
			}
			switch {
			case !there:
				say("drops column %s.%s", old.Name, old.Part)
			case old.About != now.About:
				say("changes column %s.%s from %s to %s", old.Name, old.Part, old.About, now.About)
			case old.More == "" && now.More != "" || old.More == "not null" && now.More == "must be given":
				say("column %s.%s now %s", old.Name, old.Part, now.More)
			}
		case "function":
			if !there && !after.answers(old) {
				say("drops function %s(%s)", old.Name, strings.Join(old.Types, ", "))
			} else if there && old.About != now.About {
				say("function %s(%s) returns %s, not %s", old.Name, strings.Join(old.Types, ", "), now.About, old.About)
			}
		}
	}
	for key, now := range after {
		old, there := before[key]
		if !before.has("relation", now.Name, "") {
			continue // of a table that this file creates
		}
		switch {
		case now.Kind == "column" && !there && now.More == "must be given":
			say("new column %s.%s must be given", now.Name, now.Part)
		case now.Kind == "index" && !there:
			say("builds index %s on %s", now.Part, now.Name)
		case now.Kind == "constraint" && (!there || old.About != now.About):
			say("constraint %s on %s", now.Part, now.Name)
		}
	}
	slices.Sort(found)
	return found
}

// answers reports whether a call of an old function finds another function with the same parameters and results.
func (s schema) answers(old thing) bool {
	for _, f := range s {
		if f.Kind == "function" && f.Name == old.Name && f.About == old.About && f.Needed <= len(old.Types) &&
			len(f.Types) >= len(old.Types) && slices.Equal(f.Types[:len(old.Types)], old.Types) {
			return true
		}
	}
	return false
}

// TestEveryChangeExpandsOrStatesException applies the changes one after the other and compares the schemas before and
// after.
func TestEveryChangeExpandsOrStatesException(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	soFar := withChanges(t, nil)
	for _, path := range changeFiles(t) {
		delete(soFar, path)
	}
	_, err := migrations.UpWith(t.Context(), db, soFar)
	require.NoError(t, err)
	before := readSchema(t, db)
	for _, path := range changeFiles(t) {
		text := readFile(t, path)
		soFar[path] = &fstest.MapFile{Data: []byte(text)}
		_, err := migrations.UpWith(t.Context(), db, soFar)
		require.NoError(t, err)
		after := readSchema(t, db)
		found := append(breakingChanges(before, after), forbiddenStatements(text)...)
		if strings.HasPrefix(text, "-- outside a transaction\n") {
			found = slices.DeleteFunc(found, func(what string) bool { return strings.HasPrefix(what, "builds index ") })
		}
		assertAllowed(t, strings.TrimPrefix(path, "changes/"), found)
		before = after
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := fs.ReadFile(migrations.Files(), path)
	require.NoError(t, err)
	return string(text)
}

// assertAllowed compares the effects of a file against the rule with the listed exceptions.
func assertAllowed(t *testing.T, name string, found []string) {
	t.Helper()
	for _, what := range found {
		assert.Truef(t, allowed[name][what] != "",
			"%s %s. A process of the release before may be running: see docs/upgrading.md. If none minds, say why in "+
				"allowed_test.go", name, what)
	}
	for what := range allowed[name] {
		assert.Truef(t, slices.Contains(found, what), "%s does not do this: %s. Remove it from allowed_test.go", name, what)
	}
}

// The test reports each change that the previous release would notice, or that takes long, and no others.
func TestRuleFindsBreakingChanges(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		create table a (id int primary key, name text not null default '', size int not null, note text);
		create view v as select id, name from a;
		create function f(x int, y text) returns int language sql as 'select 1'`)
	for change, want := range map[string]string{
		`drop table a cascade`:                      "drops a; drops v",
		`drop view v`:                               "drops v",
		`alter table a rename to b`:                 "drops a",
		`alter table a drop column note`:            "drops column a.note",
		`alter table a rename column note to notes`: "drops column a.note",
		`alter table a alter column note type varchar(9)`: "changes column a.note from text to character " +
			"varying(9); rewrites a",
		`alter table a alter column size type bigint`:                  "changes column a.size from integer to bigint; " + "rewrites a",
		`alter table a alter column note set not null`:                 "column a.note now must be given",
		`alter table a alter column name drop default`:                 "column a.name now must be given",
		`alter table a add column more int not null`:                   "new column a.more must be given",
		`alter table a add column more uuid default gen_random_uuid()`: "rewrites a",
		`alter table a add check (size > 0)`:                           "constraint a_size_check on a",
		`alter table a add unique (size)`:                              "builds index a_size_key on a; constraint " + "a_size_key on a",
		`create index a_note on a (note)`:                              "builds index a_note on a",
		`drop function f(int, text)`:                                   "drops function f(integer, text)",
		`drop function f(int, text); create function f(x int, y text) returns text language sql as 'select ''a''::text'`: "function f(integer, text) returns text, not integer",
		`drop function f(int, text); create function f(x int, y text, z int) returns int language sql as 'select 1'`:     "drops function f(integer, text)",
		`drop view v; create view v as select id from a`:                                                                 "drops column v.name",

		`alter table a add column more int not null default 1`:                                                                 "",
		`alter table a add column more text`:                                                                                   "",
		`alter table a alter column name drop not null`:                                                                        "",
		`create table c (id int primary key, name text not null)`:                                                              "",
		`create or replace view v as select id, name, size from a`:                                                             "",
		`create or replace function f(x int, y text) returns int language sql as 'select 2'`:                                   "",
		`drop function f(int, text); create function f(x int, y text, z int default 0) returns int language sql as 'select 1'`: "",
	} {
		tx, err := db.Begin(t.Context())
		require.NoError(t, err)
		before := readSchema(t, tx)
		pgtest.Exec(t, tx, change)
		assert.Equal(t, want, strings.Join(breakingChanges(before, readSchema(t, tx)), "; "), change)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// The planner gives a very high cost to a scan that it should avoid. PostgreSQL compiles expensive queries, which takes
// a thousand times as long as the scan.
func TestWhatAvoidsScansIsNotCompiled(t *testing.T) {
	t.Parallel()
	compiled := pgtest.Column[string](t, pgtest.DB(t), `
		select p.oid::regprocedure::text from pg_proc p
		 where 'enable_seqscan=off' = any (p.proconfig) and not 'jit=off' = any (p.proconfig)`)
	assert.Truef(t, len(compiled) == 0, "these set enable_seqscan = off and not jit = off: %q", compiled)
}

// stripBodies returns the statements that a file runs: without comments, texts and function bodies, in lower case with
// single spaces. Bodies of `do` run, so they stay.
func stripBodies(sql string) string {
	var kept strings.Builder
	for sql != "" {
		at := strings.IndexAny(sql, "-/'$")
		if at < 0 {
			kept.WriteString(sql)
			break
		}
		kept.WriteString(sql[:at])
		sql = sql[at:]
		tag := dollar.FindString(sql)
		switch {
		case strings.HasPrefix(sql, "--"):
			sql = after(sql, "\n")
		case strings.HasPrefix(sql, "/*"):
			sql = after(sql, "*/")
		case sql[0] == '\'':
			sql = after(sql[1:], "'")
		case tag != "":
			body, rest, _ := strings.Cut(sql[len(tag):], tag)
			if runs.MatchString(kept.String()) {
				kept.WriteString(stripBodies(body))
			}
			sql = rest
		default:
			kept.WriteByte(sql[0])
			sql = sql[1:]
		}
		kept.WriteByte(' ')
	}
	return strings.Join(strings.Fields(strings.ToLower(kept.String())), " ")
}

var (
	dollar = regexp.MustCompile(`^\$[a-zA-Z_]*\$`)
	runs   = regexp.MustCompile(`(?i)(^|[;\s])do\s*(language\s+plpgsql\s*)?$`)
)

// after returns the text behind a mark, or "" without the mark.
func after(text, mark string) string {
	_, rest, _ := strings.Cut(text, mark)
	return rest
}

// forbiddenPatterns matches statements that block others for a time that grows with the table, or that disable the
// program's protection against long blocks.
var forbiddenPatterns = map[string]*regexp.Regexp{
	"writes all rows of": regexp.MustCompile(
		`(?:^|[;(] ?|\bthen |\bloop |\bbegin )(?:update|delete from|merge into)(?: only)? ([a-z0-9_.]+)`),
	"inserts what it reads into": regexp.MustCompile(`\binsert into ([a-z0-9_.]+)[^;]*\bselect\b`),
	"truncates":                  regexp.MustCompile(`\btruncate (?:table )?([a-z0-9_.]+)`),
	"locks":                      regexp.MustCompile(`\block (?:table )?([a-z0-9_.]+)`),
	"rebuilds": regexp.MustCompile(
		`\b(?:cluster|vacuum|reindex (?:table|index|schema|database)|refresh materialized view) ([a-z0-9_.]+)`),
	"sets": regexp.MustCompile(`(?:^|; )set (?:local |session )?((?:lock|statement)_timeout|session_replication_role)`),
}

var makes = regexp.MustCompile(`\bcreate (?:table|view)(?: if not exists)? ([a-z0-9_.]+)`)

// forbiddenStatements lists such statements, except those about tables created in the file.
func forbiddenStatements(sql string) []string {
	text := stripBodies(sql)
	own := map[string]bool{}
	for _, m := range makes.FindAllStringSubmatch(text, -1) {
		own[m[1]] = true
	}
	var found []string
	for what, pattern := range forbiddenPatterns {
		for _, m := range pattern.FindAllStringSubmatch(text, -1) {
			if name := what + " " + m[1]; !own[m[1]] && !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	}
	slices.Sort(found)
	return found
}

// The test reports each violation of the rule at its place, and no others.
func TestRuleFindsForbiddenStatements(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		`-- update agent_executions set x = 1;`:                                           "",
		`/* delete from a; */ comment on table a is 'update a set b; truncate a';`:        "",
		`create function f() returns void language sql as $$ delete from a $$;`:           "",
		`create table own (a int); update own set a = 1; lock table own;`:                 "",
		`create trigger x before insert or update on a for each row execute function f()`: "",
		`create table x (y uuid references z on delete cascade on update cascade)`:        "",
		"update\n  a set x = 1":                          "writes all rows of a",
		`select 1; delete from only a;`:                  "writes all rows of a",
		`do $$ begin update a set b = 1; end $$;`:        "writes all rows of a",
		`with x as (delete from a returning 1) select 1`: "writes all rows of a",
		`insert into a select * from b`:                  "inserts what it reads into a",
		`truncate table a`:                               "truncates a",
		`LOCK TABLE a IN SHARE MODE`:                     "locks a",
		`vacuum a; set lock_timeout = 0`:                 "rebuilds a, sets lock_timeout",
	} {
		assert.Equal(t, want, strings.Join(forbiddenStatements(sql), ", "), sql)
	}
}
