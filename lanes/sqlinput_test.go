package lanes_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
)

func TestBadInputIsRefusedAndChangesNothing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	mustTry(t, db, "held", "a", 60)
	bad := map[string]any{
		"null": nil, "empty": "", "blank": "   ", "too long": strings.Repeat("x", 256), "newline": "a\nb", "tab": "a\tb", "escape": "a\x1bb", "delete": "a\x7fb",
		"no-break space": "\u00a0", "zero width": "\u200b", "a hidden character": "oper\u200bate", "right to left": "prices\u202ecod.sh",
		"isolate": "a\u2066b\u2069", "soft hyphen": "oper\u00adate", "ideographic blank": "\u3000", "tag": "a\U000e0041", "variation": "a\ufe0f",
		"decomposed": "cafe\u0301",
	}
	statements := map[string]string{
		"try lane":      `select try_acquire_agent_lock($1, 'a', 60)`,
		"try owner":     `select try_acquire_agent_lock('x', $1, 60)`,
		"acquire lane":  `select acquire_agent_lock($1, 'a', 60)`,
		"acquire owner": `select acquire_agent_lock('x', $1, 60)`,
		"await lane":    `select await_agent_lock($1, 'a', 60)`,
		"await owner":   `select await_agent_lock('x', $1, 60)`,
		"renew lane":    `select renew_agent_lock($1, 'a', 1, 60)`,
		"renew owner":   `select renew_agent_lock('x', $1, 1, 60)`,
		"release lane":  `select release_agent_lock($1, 'a')`,
		"release owner": `select release_agent_lock('x', $1)`,
		"break lane":    `select break_agent_lock($1, 'reason')`,
	}
	for what, value := range bad {
		for where, query := range statements {
			t.Run(where+" "+what, func(t *testing.T) {
				_, err := db.Exec(t.Context(), query, value)
				wantCode(t, err, "22023")
			})
		}
	}
	for what, ttl := range map[string]any{"null": nil, "zero": 0, "negative": -1, "over 30 days": 30*86400 + 1} {
		for where, query := range map[string]string{
			"try":        `select try_acquire_agent_lock('x', 'a', $1)`,
			"refresh":    `select try_acquire_agent_lock('held', 'a', $1)`,
			"acquire":    `select acquire_agent_lock('x', 'a', $1)`,
			"await":      `select await_agent_lock('x', 'a', $1)`,
			"renew":      `select renew_agent_lock('held', 'a', (select fencing_token from agent_locks), $1)`,
			"renew many": `select lanekeeper.renew_agent_locks(array['held'], array['a'], array[(select fencing_token from agent_locks)], array[$1::int])`,
		} {
			t.Run(where+" ttl "+what, func(t *testing.T) {
				_, err := db.Exec(t.Context(), query, ttl)
				wantCode(t, err, "22023")
			})
		}
	}
	for what, query := range map[string]string{
		"no place in the queue":    `select await_agent_lock('held', 'b', 60, null)`,
		"a place for 0 seconds":    `select await_agent_lock('held', 'b', 60, 0)`,
		"a place for over 30 days": `select await_agent_lock('held', 'b', 60, 2592001)`,
		"fewer ttls than lanes":    `select lanekeeper.renew_agent_locks(array['held', 'x'], array['a', 'a'], array[1, 1], array[60])`,
		"no ttls":                  `select lanekeeper.renew_agent_locks(array['held'], array['a'], (select array_agg(fencing_token) from agent_locks), null)`,
		"fewer owners than lanes":  `select lanekeeper.renew_agent_locks(array['held'], '{}', array[1], array[60])`,
	} {
		t.Run(what, func(t *testing.T) {
			_, err := db.Exec(t.Context(), query)
			wantCode(t, err, "22023")
		})
	}
	if err := lanes.Prune(t.Context(), db, -30*24*time.Hour); !errors.Is(err, lanes.ErrInvalid) {
		t.Errorf("a prune of what is held: %v", err)
	}
	for _, reason := range []any{nil, "", "  "} {
		_, err := db.Exec(t.Context(), `select break_agent_lock('held', $1)`, reason)
		wantCode(t, err, "22023")
	}
	got := get[string](t, db, `select string_agg(lane || ' ' || locked_by || ' ' || (expires_at > clock_timestamp() + interval '30 seconds'), ', ') ||
		(select count(*) from agent_lock_waiters) || (select count(*) from agent_activity) from agent_locks`)
	if got != "held a true00" {
		t.Errorf("bad input left %s", got)
	}
}

func TestGoodInput(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for _, lane := range []string{
		"x", strings.Repeat("ñ", 255), "consolidate:{dataset}:2024:11", "with space", "::", "línea · 車道", "caf\u00e9 🚚", "'; drop table agent_locks; --",
	} {
		mustTry(t, db, lane, lane, 1)
		mustTry(t, db, lane, lane, 30*86400)
	}
}

// The program and the database have the same names.
func TestANameIsValidInTheProgramAndInTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	names := []string{
		"", " ", "  ", "x", "with space", "cafe\u0301", "caf\u00e9", "\u1112\u1161\u11ab", "한", "🚚", strings.Repeat("ñ", 255), strings.Repeat("ñ", 256), "नमस्ते", "שלום",
	}
	for _, span := range [][2]rune{{1, 0x3200}, {0xfb00, 0xffff}, {0x1d100, 0x1d200}, {0xdfff0, 0xe1010}} {
		for r := span[0]; r < span[1]; r++ {
			names = append(names, "x"+string(r))
		}
	}
	rows, err := db.Query(t.Context(), `select lanekeeper.agent_name_fault(n) is null from unnest($1::text[]) with ordinality u (n, i) order by i`, names)
	if err != nil {
		t.Fatal(err)
	}
	fits, err := pgx.CollectRows(rows, pgx.RowTo[bool])
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		if got := lanes.ValidName(name); got != fits[i] {
			t.Errorf("%.20q is valid in the program: %t, in the database: %t", name, got, fits[i])
		}
	}
}
