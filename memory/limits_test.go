package memory_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

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
		if _, err := memory.Save(t.Context(), pool, note); !errors.Is(err, memory.ErrSecret) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, note := range map[string]memory.Note{
		"counts":     {Key: "token_usage", Value: map[string]any{"total_tokens": 42}},
		"a report":   {Key: "report", Value: "the table of passwords has 3 rows more"},
		"redacted":   {Key: "seen", Value: "header was [redacted]"},
		"a long one": {Key: "long", Value: strings.Repeat("a table grew, ", 4000)},
	} {
		if _, err := memory.Save(t.Context(), pool, note); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAFullCategoryTakesNoNewKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := pool.Exec(t.Context(), `
		insert into agent_memory (category, key, value) select 'full', 'k' || n, '1' from generate_series(1, 5000) n`)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "new", Value: 1}); !errors.Is(err, memory.ErrFull) {
		t.Errorf("got %v", err)
	}
	if _, err := memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "k7", Value: 2}); err != nil {
		t.Errorf("a key that is there cannot be replaced: %v", err)
	}
	if _, err := memory.Save(t.Context(), pool, memory.Note{Category: "other", Key: "new", Value: 1}); err != nil {
		t.Error(err)
	}
	if _, err := pool.Exec(t.Context(), `update agent_memory set expires_at = clock_timestamp() where key = 'k1'`); err != nil {
		t.Fatal(err)
	}
	if _, err := memory.Save(t.Context(), pool, memory.Note{Category: "full", Key: "new", Value: 1}); err != nil {
		t.Errorf("an expired entry takes room: %v", err)
	}
}

func TestNoUpdateIsLostUnder32Writers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	if _, err := memory.Save(t.Context(), pool, memory.Note{Key: "n", Value: 0}); err != nil {
		t.Fatal(err)
	}
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
	if e, err := memory.Shared.Get(t.Context(), pool, "general", "n"); err != nil || string(e.Value) != "32" || e.Revision != 33 {
		t.Errorf("got %+v, %v", e, err)
	}
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
	if created.Load() != 1 {
		t.Errorf("%d writers created it", created.Load())
	}
}

func TestListGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for i := range 5 {
		if _, err := memory.Save(t.Context(), pool, memory.Note{Category: "c", Key: fmt.Sprint("k", i), Value: i, TraceID: "hb_1"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := pool.Exec(t.Context(), `update agent_memory set expires_at = clock_timestamp() where key = 'k3'`); err != nil {
		t.Fatal(err)
	}
	var keys []string
	f := memory.Filter{Category: "c", Prefix: "k", TraceIDs: []trace.ID{"hb_1"}, Limit: 2}
	for {
		page, err := memory.List(t.Context(), pool, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page {
			keys = append(keys, e.Key)
			f.Before = e.ID
		}
		if len(page) < 2 {
			break
		}
	}
	if got := strings.Join(keys, " "); got != "k4 k2 k1 k0" {
		t.Errorf("got %s", got)
	}
}
