package migrations_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// statements is what a file runs: without comments, texts and the bodies of functions, in lower case with single
// spaces. The bodies of `do` are run, so they stay.
func statements(sql string) string {
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
				kept.WriteString(statements(body))
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

// after is the rest of a text behind a mark; nothing when the mark is not there.
func after(text, mark string) string {
	_, rest, _ := strings.Cut(text, mark)
	return rest
}

// against are words of statements that hold others up for as long as a table is large, or that undo what the program
// does so that nobody is held up for long.
var against = map[string]*regexp.Regexp{
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

// wordsAgainstTheRule lists such statements, but for those about tables that the file itself makes.
func wordsAgainstTheRule(sql string) []string {
	text := statements(sql)
	own := map[string]bool{}
	for _, m := range makes.FindAllStringSubmatch(text, -1) {
		own[m[1]] = true
	}
	var found []string
	for what, pattern := range against {
		for _, m := range pattern.FindAllStringSubmatch(text, -1) {
			if said := what + " " + m[1]; !own[m[1]] && !slices.Contains(found, said) {
				found = append(found, said)
			}
		}
	}
	slices.Sort(found)
	return found
}

// Each thing that the rule forbids is found, where it is done and only there.
func TestWhatTheRuleForbidsIsFound(t *testing.T) {
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
		assert.Equal(t, want, strings.Join(wordsAgainstTheRule(sql), ", "), sql)
	}
}
