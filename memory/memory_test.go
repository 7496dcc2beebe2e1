package memory_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
)

const patience = 60 * time.Second

func TestMain(m *testing.M) { pgtest.Main(m) }

func save(t *testing.T, pool *pgxpool.Pool, n memory.Note) memory.Entry {
	t.Helper()
	e, err := memory.Save(t.Context(), pool, n)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// expire makes an entry's time come.
func expire(t *testing.T, pool *pgxpool.Pool, key string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `update agent_memory set expires_at = clock_timestamp() - interval '1 s' where key = $1`, key); err != nil {
		t.Fatal(err)
	}
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
	if first.Revision != 1 || first.ExpiresAt == nil || first.Category != "general" || time.Until(*first.ExpiresAt) < 50*time.Minute {
		t.Errorf("got %+v", first)
	}
	if second.Revision != 2 || second.ID != first.ID || second.ExpiresAt != nil || second.TraceID != "hb_2" || string(second.Value) != "2" {
		t.Errorf("got %+v", second)
	}
	other := save(t, pool, memory.Note{Category: "facts", Key: "size", Value: "x"})
	if got, err := memory.Shared.Get(t.Context(), pool, "facts", "size"); err != nil || got.ID != other.ID {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestSaveAtARevisionLosesNoUpdate(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "n", Value: 0})
	var wins atomic.Int32
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			_, err := memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: i, Revision: 1})
			switch {
			case err == nil:
				wins.Add(1)
			case !errors.Is(err, memory.ErrConflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if wins.Load() != 1 {
		t.Errorf("%d writers won, want 1", wins.Load())
	}
	for _, key := range []string{"n", "absent"} {
		if _, err := memory.Save(t.Context(), pool, memory.Note{Key: key, Value: 1, Revision: 7}); !errors.Is(err, memory.ErrConflict) {
			t.Errorf("%s: got %v, want ErrConflict", key, err)
		}
	}
}

func TestConcurrentSavesAreAllCounted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if _, err := memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: i}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if e, err := memory.Shared.Get(t.Context(), pool, "general", "n"); err != nil || e.Revision != 20 {
		t.Errorf("revision %d, %v; want 20", e.Revision, err)
	}
}

func TestSaveRefuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, test := range map[string]struct {
		note memory.Note
		want []string
	}{
		"all at once":   {memory.Note{Category: " ", TTL: -1, Value: make(chan int)}, []string{"category: ", "key: ", "ttl: ", "value: "}},
		"long key":      {memory.Note{Key: strings.Repeat("k", 256)}, []string{"key: "}},
		"NUL in key":    {memory.Note{Key: "a\x00"}, []string{"key: "}},
		"no UTF-8":      {memory.Note{Key: "a\xff"}, []string{"key: "}},
		"NUL in value":  {memory.Note{Key: "a", Value: "b\x00"}, []string{"value: "}},
		"a large value": {memory.Note{Key: "a", Value: strings.Repeat("v", 70000)}, []string{"value: "}},
	} {
		_, err := memory.Save(t.Context(), pool, test.note)
		for _, want := range test.want {
			if !errors.Is(err, memory.ErrInvalid) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", name, err, want)
			}
		}
	}
	save(t, pool, memory.Note{Key: "text about NUL", Value: `a \u0000 written out`})
}

func TestExpiredEntriesAreGoneFromEveryRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "kept", Value: "word", TTL: time.Hour})
	save(t, pool, memory.Note{Key: "gone", Value: "word", TTL: time.Hour})
	expire(t, pool, "gone")
	if _, err := memory.Shared.Get(t.Context(), pool, "general", "gone"); !errors.Is(err, memory.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
	found, _ := memory.Shared.Search(t.Context(), pool, "word", 0)
	recent, _ := memory.Shared.Recent(t.Context(), pool, "", 0)
	if keys(found) != "kept" || keys(recent) != "kept" {
		t.Errorf("search %q, recent %q", keys(found), keys(recent))
	}
	if stats, err := memory.Stats(t.Context(), pool); err != nil || len(stats) != 1 || stats[0].Entries != 1 {
		t.Errorf("stats %+v, %v", stats, err)
	}
	if _, err := memory.Save(t.Context(), pool, memory.Note{Key: "gone", Value: 1, Revision: 1}); !errors.Is(err, memory.ErrConflict) {
		t.Errorf("save at the revision of an expired entry: %v", err)
	}
	if ok, err := memory.Shared.Forget(t.Context(), pool, "general", "gone", 0); ok || err != nil {
		t.Errorf("forgot what was gone: %v, %v", ok, err)
	}
	save(t, pool, memory.Note{Key: "again", Value: 1})
	save(t, pool, memory.Note{Key: "again", Value: 2})
	expire(t, pool, "again")
	if n, err := memory.Expire(t.Context(), pool); n != 1 || err != nil {
		t.Errorf("expired %d, %v", n, err)
	}
	save(t, pool, memory.Note{Key: "back", Value: 1})
	save(t, pool, memory.Note{Key: "back", Value: 2})
	expire(t, pool, "back")
	if e := save(t, pool, memory.Note{Key: "back", Value: 3, Revision: memory.Absent}); e.Revision != 3 || e.ExpiresAt != nil {
		t.Errorf("an expired entry is not new, or its revision is used twice: %+v", e)
	}
}

func TestForget(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "a", Value: 1})
	for _, want := range []bool{true, false} {
		if ok, err := memory.Shared.Forget(t.Context(), pool, "general", "a", 0); ok != want || err != nil {
			t.Errorf("got %v, %v; want %v", ok, err, want)
		}
	}
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
		if strings.Join(got, ",") != want {
			t.Errorf("%q: got %v, want %s", query, got, want)
		}
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
	if err != nil || len(stats) != 2 || stats[0].Category != "facts" || stats[0].Entries != 2 || stats[0].Expiring != 1 || stats[0].Bytes < 100 {
		t.Errorf("got %+v, %v", stats, err)
	}
	if recent, err := memory.Shared.Recent(t.Context(), pool, "facts", 0); err != nil || keys(recent) != "b a" {
		t.Errorf("got %q, %v", keys(recent), err)
	}
}
