package memory_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func save(t *testing.T, pool *pgxpool.Pool, n memory.Note) memory.Entry {
	t.Helper()
	e, err := memory.Save(t.Context(), pool, n)
	require.NoError(t, err)
	return e
}

// expire makes an entry expire.
func expire(t *testing.T, pool *pgxpool.Pool, key string) {
	t.Helper()
	pgtest.Exec(t, pool, `update agent_memory set expires_at = clock_timestamp() - interval '1 s' where key = $1`, key)
}

func keys(entries []memory.Entry) string {
	list := make([]string, 0, len(entries))
	for _, e := range entries {
		list = append(list, e.Key)
	}
	return strings.Join(list, " ")
}

func TestSaveReplacesAndCounts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := save(t, pool, memory.Note{Key: "size", Value: map[string]int{"mb": 1}, TTL: time.Hour, TraceID: "hb_1"})
	second := save(t, pool, memory.Note{Key: "size", Value: 2, TraceID: "hb_2"})
	assert.Truef(t, first.Revision == 1 && first.ExpiresAt != nil && first.Category == "general" &&
		time.Until(*first.ExpiresAt) >= 50*time.Minute, "got %+v", first)
	assert.Truef(t, second.Revision == 2 && second.ID == first.ID && second.ExpiresAt == nil && second.TraceID == "hb_2" &&
		string(second.Value) == "2", "got %+v", second)
	other := save(t, pool, memory.Note{Category: "facts", Key: "size", Value: "x"})
	got, err := memory.Shared.Get(t.Context(), pool, "facts", "size")
	assert.Truef(t, err == nil && got.ID == other.ID, "got %+v, %v", got, err)
}

func TestConcurrentSavesAreAllCounted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			_, err := memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: i})
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	e, err := memory.Shared.Get(t.Context(), pool, "general", "n")
	assert.Truef(t, err == nil && e.Revision == 20, "revision %d, %v; want 20", e.Revision, err)
}

func TestSaveRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, test := range map[string]struct {
		note memory.Note
		want []string
	}{
		"all at once": {
			memory.Note{Category: " ", TTL: -1, Value: make(chan int)},
			[]string{"category: ", "key: ", "ttl: ", "value: "},
		},
		"long key":     {memory.Note{Key: strings.Repeat("k", 256)}, []string{"key: "}},
		"NUL in key":   {memory.Note{Key: "a\x00"}, []string{"key: "}},
		"line break":   {memory.Note{Key: "a\nb"}, []string{`key: "a\nb" has control`}},
		"tab":          {memory.Note{Category: "a\tb", Key: "k"}, []string{`category: "a\tb" has control`}},
		"escape":       {memory.Note{Key: "\x1b[2J"}, []string{"key: "}},
		"C1 control":   {memory.Note{Key: "a\u009b"}, []string{"key: "}},
		"no UTF-8":     {memory.Note{Key: "a\xff"}, []string{"key: "}},
		"NUL in value": {memory.Note{Key: "a", Value: "b\x00"}, []string{"value: "}},
		"half a pair":  {memory.Note{Key: "a", Value: json.RawMessage(`"\ud83d"`)}, []string{"value: "}},
		"huge number":  {memory.Note{Key: "a", Value: json.RawMessage(`1e400000`)}, []string{"value: "}},
		"long numbers": {
			memory.Note{Key: "a", Value: json.RawMessage("[" + strings.Repeat("1e9999,", 20) + "0]")}, []string{"value: "},
		},
		"a large value": {memory.Note{Key: "a", Value: strings.Repeat("v", 70000)}, []string{"value: "}},
	} {
		_, err := memory.Save(t.Context(), pool, test.note)
		for _, want := range test.want {
			assert.Truef(t, errors.Is(err, memory.ErrInvalid) && strings.Contains(err.Error(), want),
				"%s: got %v, want %q", name, err, want)
		}
	}
	save(t, pool, memory.Note{Key: "text about NUL", Value: `a \u0000 written out`})
}

func TestExpiredEntriesAreGoneFromEveryRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "kept", Value: "word", TTL: time.Hour})
	gone := save(t, pool, memory.Note{Key: "gone", Value: "word", TTL: time.Hour})
	expire(t, pool, "gone")
	_, err := memory.GetID(t.Context(), pool, gone.ID)
	assert.ErrorIs(t, err, memory.ErrNotFound, "get by id")
	_, err = memory.ForgetID(t.Context(), pool, gone.ID, 0)
	assert.ErrorIs(t, err, memory.ErrNotFound, "forget by id")
	named, err := memory.Shared.Named(t.Context(), pool,
		memory.Name{Category: "general", Key: "gone"}, memory.Name{Category: "general", Key: "kept"})
	assert.Truef(t, err == nil && keys(named) == "kept", "named %q, %v", keys(named), err)
	_, err = memory.Shared.Get(t.Context(), pool, "general", "gone")
	assert.ErrorIs(t, err, memory.ErrNotFound, "get")
	found, _ := memory.Shared.Search(t.Context(), pool, "word", 0)
	recent, _ := memory.Shared.Recent(t.Context(), pool, "", 0)
	if keys(found) != "kept" || keys(recent) != "kept" {
		t.Errorf("search %q, recent %q", keys(found), keys(recent))
	}
	stats, err := memory.Stats(t.Context(), pool)
	assert.Truef(t, err == nil && len(stats) == 1 && stats[0].Entries == 1, "stats %+v, %v", stats, err)
	_, err = memory.Save(t.Context(), pool, memory.Note{Key: "gone", Value: 1, Revision: 1})
	assert.ErrorIs(t, err, memory.ErrConflict, "save at the revision of an expired entry")
	ok, err := memory.Shared.Forget(t.Context(), pool, "general", "gone", 0)
	assert.Truef(t, !ok && err == nil, "deleted a missing entry: %v, %v", ok, err)
	save(t, pool, memory.Note{Key: "again", Value: 1})
	save(t, pool, memory.Note{Key: "again", Value: 2})
	expire(t, pool, "again")
	n, err := memory.Expire(t.Context(), pool)
	assert.Truef(t, n == 1 && err == nil, "expired %d, %v", n, err)
	save(t, pool, memory.Note{Key: "back", Value: 1})
	save(t, pool, memory.Note{Key: "back", Value: 2})
	expire(t, pool, "back")
	e := save(t, pool, memory.Note{Key: "back", Value: 3, Revision: memory.Absent})
	assert.Truef(t, e.Revision == 3 && e.ExpiresAt == nil,
		"an expired entry is not new, or its revision is used twice: %+v", e)
}

func TestSearch(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "orders table", Value: "grew by ten percent"})
	save(t, pool, memory.Note{Key: "users", Value: map[string]string{"note": "the orders table is joined here"}})
	save(t, pool, memory.Note{Key: "weather", Value: "rain"})
	for query, want := range map[string]string{
		"orders table":            "orders table,users", // a key weighs more
		"orders -joined":          "orders table",
		`"ten percent"`:           "orders table",
		"rain or percent":         "orders table,weather",
		"what about the rain now": "users,weather", // not all words: any
		"zebra":                   "",
		"rain -rain":              "",
		"":                        "orders table,users,weather",
		" ?! ":                    "orders table,users,weather",
		"'; drop table x; --":     "orders table,users",
		"a & | ! ( :*":            "",
	} {
		found, err := memory.Shared.Search(t.Context(), pool, query, 0)
		if err != nil {
			t.Errorf("%q: %v", query, err)
			continue
		}
		got := make([]string, 0, len(found))
		for _, e := range found {
			got = append(got, e.Key)
		}
		if query != "orders table" {
			slices.Sort(got)
		}
		assert.Equal(t, want, strings.Join(got, ","), query, got)
	}
	if found, err := memory.Shared.Search(t.Context(), pool, "", 2); err != nil || keys(found) != "weather users" {
		t.Errorf("recent: %q, %v", keys(found), err)
	}
}

func TestStatsAndRecentByCategory(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Category: "facts", Key: "a", Value: 1})
	save(t, pool, memory.Note{Category: "facts", Key: "b", Value: strings.Repeat("x", 100), TTL: time.Hour})
	save(t, pool, memory.Note{Category: "lessons", Key: "c", Value: 1})
	stats, err := memory.Stats(t.Context(), pool)
	assert.Truef(t, err == nil && len(stats) == 2 && stats[0].Category == "facts" && stats[0].Entries == 2 &&
		stats[0].Expiring == 1 && stats[0].Bytes >= 100, "got %+v, %v", stats, err)
	if recent, err := memory.Shared.Recent(t.Context(), pool, "facts", 0); err != nil || keys(recent) != "b a" {
		t.Errorf("got %q, %v", keys(recent), err)
	}
}

func TestSecretsAreNotKept(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, note := range map[string]memory.Note{
		"by key":      {Key: "github_token", Value: "abc"},
		"by field":    {Key: "service", Value: map[string]any{"url": "https://x", "password": "hunter2"}},
		"by look":     {Key: "found", Value: "Authorization: Bearer abcdefghijklmnopqrstuvwxyz012345"},
		"in a URL":    {Key: "database", Value: "postgres://app:hunter2@db/app"},
		"deep inside": {Key: "config", Value: []any{map[string]any{"env": map[string]any{"api_key": "sk-abcdefghijklmnop"}}}},
	} {
		_, err := memory.Save(t.Context(), pool, note)
		assert.Truef(t, errors.Is(err, memory.ErrSecret) && !strings.Contains(err.Error(), "hunter2"), "%s: %v", name, err)
		assert.Equal(t, err.Error(), redact.Text(err.Error(), 0), name)
	}
	for name, note := range map[string]memory.Note{
		"counts":     {Key: "token_usage", Value: map[string]any{"total_tokens": 42}},
		"a report":   {Key: "report", Value: "the table of passwords has 3 rows more"},
		"redacted":   {Key: "seen", Value: "header was [redacted]"},
		"a long one": {Key: "long", Value: strings.Repeat("a table grew, ", 4000)},
	} {
		_, err := memory.Save(t.Context(), pool, note)
		assert.NoError(t, err, name)
	}
}

func TestAFullCategoryTakesNoNewKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_memory (category, key, value) select 'full', 'k' || n, '1' from generate_series(1, 5000) n`)
	_, err := memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "new", Value: 1})
	assert.ErrorIs(t, err, memory.ErrFull)
	_, err = memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "k7", Value: 2})
	assert.NoError(t, err, "a key that is there cannot be replaced")
	_, err = memory.Save(t.Context(), pool, memory.Note{Category: "other", Key: "new", Value: 1})
	assert.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_memory set expires_at = clock_timestamp() where key = 'k1'`)
	_, err = memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "new", Value: 1})
	assert.NoError(t, err, "an expired entry takes room")
	_, err = memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "k1", Value: 1})
	assert.ErrorIs(t, err, memory.ErrFull)
}

func TestNoUpdateIsLostUnder32Writers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: 0})
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for {
				e, err := memory.Shared.Get(t.Context(), pool, "general", "n")
				if err != nil {
					t.Error(err)
					return
				}
				var n int
				if _, err := fmt.Sscan(string(e.Value), &n); err != nil {
					t.Error(err)
					return
				}
				_, err = memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: n + 1, Revision: e.Revision})
				if err == nil {
					return
				}
				if !errors.Is(err, memory.ErrConflict) {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	e, err := memory.Shared.Get(t.Context(), pool, "general", "n")
	assert.Truef(t, err == nil && string(e.Value) == "32" && e.Revision == 33, "got %+v, %v", e, err)
	var created atomic.Int32
	for i := range 32 {
		wg.Go(func() {
			_, err := memory.Save(t.Context(), pool, memory.Note{Key: "first", Value: i, Revision: memory.Absent})
			switch {
			case err == nil:
				created.Add(1)
			case !errors.Is(err, memory.ErrConflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 1, created.Load())
}

func TestListGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i := range 5 {
		_, err := memory.Save(t.Context(), pool, memory.Note{
			Category: "c", Key: fmt.Sprint("k", i),
			Value: i, TraceID: "hb_1",
		})
		require.NoError(t, err)
	}
	pgtest.Exec(t, pool, `update agent_memory set expires_at = clock_timestamp() where key = 'k3'`)
	var keys []string
	f := memory.Filter{Category: "c", Prefix: "k", TraceIDs: []trace.ID{"hb_1"}, Limit: 2}
	for {
		page, err := memory.List(t.Context(), pool, f)
		require.NoError(t, err)
		for _, e := range page {
			keys = append(keys, e.Key)
			f.Before = e.ID
		}
		if len(page) < 2 {
			break
		}
	}
	assert.Equal(t, "k4 k2 k1 k0", strings.Join(keys, " "))
}

// refused returns the conflict of a write that must be rejected.
func refused(t *testing.T, pool *pgxpool.Pool, n memory.Note) *memory.ConflictError {
	t.Helper()
	_, err := memory.Save(t.Context(), pool, n)
	conflict, ok := errors.AsType[*memory.ConflictError](err)
	require.Truef(t, ok && errors.Is(err, memory.ErrConflict), "no conflict: %v", err)
	return conflict
}

func TestAConflictHasBothValues(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "k", Value: "first"})
	save(t, pool, memory.Note{Key: "k", Value: "theirs", TraceID: "hb_1"})
	c := refused(t, pool, memory.Note{Key: "k", Value: "mine", Revision: 1})
	assert.Truef(t, string(c.Yours) == `"mine"` && c.Theirs != nil && string(c.Theirs.Value) == `"theirs"` &&
		c.Theirs.Revision == 2 && c.Theirs.TraceID == "hb_1", "got %+v", c)
	text := c.Error()
	assert.Truef(t, strings.Contains(text, "mine") && strings.Contains(text, "theirs") &&
		strings.Contains(text, "revision 1"), "the error says %s", text)
	c = refused(t, pool, memory.Note{Key: "none", Value: 1, Revision: 4})
	assert.Truef(t, c.Theirs == nil, "got %+v", c.Theirs)
	e, err := memory.Shared.Get(t.Context(), pool, "general", "k")
	assert.Truef(t, err == nil && e.Revision == 2 && string(e.Value) == `"theirs"`,
		"a conflict changed it: %+v, %v", e, err)
}

func TestARevisionIsNeverUsedTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, begin := range map[string]func(key string){
		"forgotten": func(key string) {
			ok, err := memory.Shared.Forget(t.Context(), pool, "general", key, 2)
			require.True(t, ok && err == nil, ok, err)
		},
		"forgotten by id": func(key string) {
			e, err := memory.Shared.Get(t.Context(), pool, "general", key)
			if err == nil {
				_, err = memory.ForgetID(t.Context(), pool, e.ID, 2)
			}
			require.NoError(t, err)
		},
		"deleted by hand": func(key string) {
			pgtest.Exec(t, pool, `delete from agent_memory where key = $1`, key)
		},
		"expired": func(key string) { expire(t, pool, key) },
		"expired and swept": func(key string) {
			expire(t, pool, key)
			_, err := memory.Expire(t.Context(), pool)
			require.NoError(t, err)
		},
	} {
		save(t, pool, memory.Note{Key: name, Value: 1})
		save(t, pool, memory.Note{Key: name, Value: 2})
		begin(name)
		assert.Equal(t, 3, save(t, pool, memory.Note{Key: name, Value: 3, Revision: memory.Absent}).Revision, name)
		refused(t, pool, memory.Note{Key: name, Value: 4, Revision: 1})
		refused(t, pool, memory.Note{Key: name, Value: 4, Revision: 2})
	}
	pgtest.Exec(t, pool, `update agent_memory set value = '"by hand"' where key = 'expired'`)
	refused(t, pool, memory.Note{Key: "expired", Value: 4, Revision: 3})
}

func TestAKeyThatIsDeletedWhileItIsKeptAnewGoesOnCounting(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "k", Value: 1})
	save(t, pool, memory.Note{Key: "k", Value: 2})
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = memory.Shared.Forget(t.Context(), tx, "general", "k", 2)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		e, err := memory.Save(t.Context(), pool, memory.Note{Key: "k", Value: 3, Revision: memory.Absent})
		assert.Truef(t, err == nil && e.Revision == 3, "the writer got revision %d, %v", e.Revision, err)
	})
	pgtest.AwaitBlocked(t, pool, 1, "")
	require.NoError(t, tx.Commit(t.Context()))
	wg.Wait()
	e, err := memory.Shared.Get(t.Context(), pool, "general", "k")
	assert.Truef(t, err == nil && e.Revision == 3, "the entry is at revision %d, %v", e.Revision, err)
}

func TestForgettingIsBasedOnWhatWasRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := save(t, pool, memory.Note{Key: "k", Value: 1})
	save(t, pool, memory.Note{Key: "k", Value: 2})
	for _, revision := range []int{1, memory.Absent} {
		ok, err := memory.Shared.Forget(t.Context(), pool, "general", "k", revision)
		assert.Truef(t, !ok && errors.Is(err, memory.ErrConflict), "at %d: %v, %v", revision, ok, err)
	}
	_, err := memory.ForgetID(t.Context(), pool, e.ID, 1)
	assert.ErrorIs(t, err, memory.ErrConflict, "by id")
	for _, want := range []bool{true, false} {
		ok, err := memory.Shared.Forget(t.Context(), pool, "general", "k", 2)
		assert.Truef(t, ok == want && err == nil, "got %v, %v", ok, err)
	}
}

// late creates a conflict: the writer has read revision 1, and the entry is at revision 2.
func late(t *testing.T, pool *pgxpool.Pool, key string) string {
	t.Helper()
	save(t, pool, memory.Note{Key: key, Value: "first"})
	save(t, pool, memory.Note{Key: key, Value: "theirs", TraceID: "op_1"})
	note := memory.Note{Key: key, Value: "late", Revision: 1, TraceID: "hb_1"}
	id, err := memory.StoreConflict(t.Context(), pool, note, refused(t, pool, note), "")
	require.NoError(t, err)
	return id
}

func decide(t *testing.T, pool *pgxpool.Pool, id string, d memory.Decision) (c memory.Conflict, err error) {
	t.Helper()
	err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		c, err = memory.Decide(t.Context(), tx, id, d)
		return err
	})
	return c, err
}

func TestALateValueIsKeptUntilAnAdminDecides(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	taken, kept := late(t, pool, "taken"), late(t, pool, "kept")
	open, err := memory.Conflicts(t.Context(), pool, memory.ConflictFilter{})
	require.Truef(t, err == nil && len(open) == 2 && open[0].Key == "kept" && string(open[0].Value) == `"late"` &&
		string(open[0].FoundValue) == `"theirs"` && open[0].Revision == 2 && open[0].IfRevision == 1 &&
		open[0].TraceID == "hb_1" && open[0].FoundTraceID == "op_1", "got %+v, %v", open, err)
	c, err := decide(t, pool, taken, memory.Decision{
		Take: true, By: "ana", Reason: "newer",
		TraceID: "op_2",
	})
	assert.Truef(t, err == nil && c.Revision == 3 && c.Status == memory.ConflictTaken, "got %+v, %v", c, err)
	c, err = decide(t, pool, kept, memory.Decision{By: "ana", Reason: "older"})
	assert.Truef(t, err == nil && c.Revision == 2 && c.Status == memory.ConflictKept, "got %+v, %v", c, err)
	_, err = decide(t, pool, kept, memory.Decision{Take: true, By: "bea"})
	assert.ErrorIs(t, err, memory.ErrConflictDecided, "decided twice")
	_, err = decide(t, pool, "no id", memory.Decision{By: "bea"})
	assert.ErrorIs(t, err, memory.ErrConflictNotFound)
	open, err = memory.Conflicts(t.Context(), pool, memory.ConflictFilter{})
	assert.Truef(t, err == nil && len(open) == 0, "still open: %+v, %v", open, err)
	all, err := memory.Conflicts(t.Context(), pool, memory.ConflictFilter{Status: "all", Key: "taken"})
	assert.Truef(t, err == nil && len(all) == 1 && all[0].DecidedBy == "ana", "got %+v, %v", all, err)
}

func TestALateValueReplacesOnlyWhatTheAdminSaw(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	save(t, pool, memory.Note{Key: "k", Value: "newer still"})
	_, err := decide(t, pool, id, memory.Decision{Take: true, By: "ana"})
	c, ok := errors.AsType[*memory.ConflictError](err)
	require.Truef(t, ok && c.Theirs != nil && string(c.Theirs.Value) == `"newer still"`, "got %v", err)
	if c, err := memory.GetConflict(t.Context(), pool, id); err != nil || c.Status != memory.ConflictOpen ||
		c.Revision != 3 {
		t.Fatalf("got %+v, %v", c, err)
	}
	if c, err := decide(t, pool, id, memory.Decision{Take: true, By: "ana", IfRevision: 3}); err != nil ||
		string(c.Current) != `"late"` || c.Revision != 4 {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestALateValueIsKeptOnceHoweverOftenItComes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	for _, value := range []string{"late", "later"} {
		note := memory.Note{Key: "k", Value: value, Revision: 1, TraceID: "hb_2"}
		again, err := memory.StoreConflict(t.Context(), pool, note, refused(t, pool, note), "")
		assert.Truef(t, err == nil && (again == id) == (value == "late"), "%s: %s after %s, %v", value, again, id, err)
	}
}

func TestConflictsAreBoundedAndGoWithTime(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	_, err := decide(t, pool, id, memory.Decision{By: "ana"})
	require.NoError(t, err)
	pgtest.Exec(t, pool, `
		update agent_memory_conflicts set decided_at = clock_timestamp() - interval '91 days';
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision) select 'c', 'k' || n, '1', 0, 0
		  from generate_series(1, 999) n;
		insert into agent_memory_forgotten values ('c', 'old', 7, clock_timestamp() - interval '91 days'),
		  ('c', 'new', 7, clock_timestamp())`)
	late(t, pool, "the thousandth")
	note := memory.Note{Key: "the thousandth", Value: "x", Revision: 1}
	_, err = memory.StoreConflict(t.Context(), pool, note, refused(t, pool, note), "")
	assert.ErrorIs(t, err, memory.ErrConflictsFull, "one too many")
	_, err = memory.Expire(t.Context(), pool)
	require.NoError(t, err)
	_, err = memory.GetConflict(t.Context(), pool, id)
	assert.ErrorIs(t, err, memory.ErrConflictNotFound, "an old one is there")
	pgtest.Equal(t, pool, "1000 new", `
		select (select count(*) from agent_memory_conflicts where status = 'open') || ' ' || (select string_agg(key, ',')
		  from agent_memory_forgotten)`)
}

func TestOnlyEntriesThatWereShownWholeAreSeen(t *testing.T) {
	t.Parallel()
	answer := `{"left_out":1,"memories":[{"category":"c","key":"a","revision":3,"value":{"memories":[{"category":"c","key":"spoofed","revision":9}]}},` +
		`{"category":"c","key":"b","revision":4,"value":"long"}],"theirs":{"category":"general","key":"t","revision":5,"value":1}}`
	for upto, want := range map[int]string{
		len(answer):                            "a:3 b:4 t:5",
		strings.Index(answer, `"theirs"`):      "a:3 b:4",
		strings.Index(answer, `,"value":"lon`): "a:3",
		20:                                     "",
	} {
		seen := memory.Seen{}
		seen.Add(memory.SightsIn([]byte(answer), upto)...)
		var got []string
		for _, name := range []memory.Name{
			{Category: "c", Key: "a"},
			{Category: "c", Key: "b"},
			{Category: "general", Key: "t"},
			{Category: "c", Key: "spoofed"},
		} {
			if revision := seen.Revision(name.Category, name.Key); revision != memory.Absent {
				got = append(got, name.Key+":"+string(rune('0'+revision)))
			}
		}
		assert.Equal(t, want, strings.Join(got, " "), upto, got)
	}
	for _, broken := range []string{
		"", "[", `{"memories"`, `{"memories":[{"key":`, `{"memories":7}`,
		`{"theirs":null}`, "null",
	} {
		got := memory.SightsIn([]byte(broken), 1000)
		assert.Truef(t, len(got) == 0, "%s: %v", broken, got)
	}
}
