package migrations

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// codeMark divides a file of schema/. The tables above it are created once. The code below it is applied again when it
// changes.
const codeMark = "\n-- Code\n"

var (
	// comments are the statements above the mark that are applied again, too.
	comments = regexp.MustCompile(`(?ms)^comment on .*?';\n`)
	// remarks are lines for readers. They may change after a release, so the baseline's hash leaves them out.
	remarks = regexp.MustCompile(`(?m)^\s*--.*\n`)
)

// noun is one file of schema/.
type noun struct {
	name   string // 030_executions
	tables string // without comments and remarks
	code   string // and comments
}

// change is one file of changes/.
type change struct {
	version int
	name    string
	sql     string
	hash    string
}

// text is the schema of one version of the program.
type text struct {
	nouns   []noun
	changes []change
	bridges map[int]string // by the version from which they lead
}

// embedded is the text of this binary.
var embedded = sync.OnceValues(func() (text, error) { return load(files) })

func load(version fs.FS) (text, error) {
	var t text
	err := each(version, "schema/*.sql", func(name, sql string) error {
		tables, code, _ := strings.Cut(sql, codeMark)
		about := strings.Join(comments.FindAllString(tables, -1), "")
		tables = remarks.ReplaceAllString(comments.ReplaceAllString(tables, ""), "")
		t.nouns = append(t.nouns, noun{strings.TrimSuffix(name, ".sql"), tables, about + code})
		return nil
	})
	if err != nil {
		return t, err
	}
	err = each(version, "changes/*.sql", func(name, sql string) error {
		digits, _, _ := strings.Cut(name, "_")
		number, err := strconv.Atoi(digits)
		if err != nil || number <= baseline {
			return fmt.Errorf("change %s has no number above %d", name, baseline)
		}
		t.changes = append(t.changes, change{number, name, sql, digest(sql)})
		return nil
	})
	if err != nil {
		return t, err
	}
	t.bridges = map[int]string{}
	return t, each(version, "bridges/*.sql", func(name, sql string) error {
		former, err := strconv.Atoi(strings.TrimSuffix(name, ".sql"))
		t.bridges[former] = sql
		return err
	})
}

// each calls f with the files of a pattern in the order of their names.
func each(version fs.FS, pattern string, f func(name, sql string) error) error {
	paths, err := fs.Glob(version, pattern)
	if err != nil {
		return fmt.Errorf("list %s: %w", pattern, err)
	}
	for _, p := range paths {
		sql, err := fs.ReadFile(version, p)
		if err != nil {
			return fmt.Errorf("read %s: %w", p, err)
		}
		if err := f(path.Base(p), string(sql)); err != nil {
			return err
		}
	}
	return nil
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// tables is the text of the baseline.
func (t text) tables() string {
	var all strings.Builder
	for _, n := range t.nouns {
		all.WriteString(n.tables)
	}
	return all.String()
}

// version is the number of the newest change, or of the baseline.
func (t text) version() int {
	if len(t.changes) == 0 {
		return baseline
	}
	return t.changes[len(t.changes)-1].version
}

// hash identifies the text. It excludes remarks and the bridge.
func (t text) hash() string {
	var all strings.Builder
	all.WriteString(t.tables())
	for _, n := range t.nouns {
		all.WriteString(n.code)
	}
	for _, c := range t.changes {
		all.WriteString(c.hash)
	}
	return digest(all.String())
}

// MonthsAhead is the number of monthly partitions of the activity log that exist ahead of time.
const MonthsAhead = 3

// EnsureMonths creates the missing monthly partitions of the activity log, from the month before a moment to some
// months after it, and returns their number. Without a moment it uses the database's clock. Months begin and end in
// UTC. It finds gaps by the ranges of the partitions, not by their names. Concurrent calls are safe.
func EnsureMonths(ctx context.Context, db postgres.Beginner, at *time.Time, ahead int) (made int, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('activity partitions', 0))`); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			select to_char(m.month, '"agent_activity_"YYYY_MM') as name, s.id::text as lower, least(m.upper_id, (
			         select p.lower_id from agent_activity_partitions p where p.lower_id > s.id
			           order by p.lower_id limit 1))::text as upper
			  from (select t.month, lanekeeper.agent_uuid7_floor(t.month at time zone 'UTC') as lower_id,
			               lanekeeper.agent_uuid7_floor((t.month + interval '1 month') at time zone 'UTC') as upper_id
			          from date_trunc('month', coalesce(@at::timestamptz, clock_timestamp()) at time zone 'UTC') this,
			               generate_series(this - interval '1 month', this + make_interval(months => @ahead),
			                 interval '1 month') t (month)) m
			 cross join lateral (
			   select m.lower_id
			   union
			   select p.upper_id from agent_activity_partitions p where p.upper_id > m.lower_id
			     and p.upper_id < m.upper_id) s (id)
			 where not exists (select from agent_activity_partitions p where p.lower_id <= s.id and s.id < p.upper_id)
			 order by s.id`, postgres.Strict{"at": at, "ahead": ahead})
		if err != nil {
			return err
		}
		missing, err := pgx.CollectRows(rows, pgx.RowToStructByName[month])
		for _, m := range missing {
			if err := m.attach(ctx, tx); err != nil {
				return err
			}
		}
		made = len(missing)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("make partitions of the activity log: %w", err)
	}
	return made, nil
}

// month is a partition to create, with its range of ids.
type month struct{ Name, Lower, Upper string }

// attach creates the table under the first free name, then attaches it. The clause `partition of` would wait for every
// reader of the log and block every writer.
func (m month) attach(ctx context.Context, tx pgx.Tx) error {
	var name string
	err := tx.QueryRow(ctx, `
		select n.name from generate_series(1, 1000) i, lateral (select @name || case when i > 1 then '_' || i
		  else '' end as name) n
		 where to_regclass(n.name) is null order by i limit 1`, postgres.Strict{"name": m.Name}).Scan(&name)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, fmt.Sprintf(`
		create table %[1]s (like agent_activity including all) with (fillfactor = 80);
		alter table agent_activity attach partition %[1]s for values from ('%[2]s') to ('%[3]s')`, name, m.Lower, m.Upper))
	return err
}
