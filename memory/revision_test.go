package memory_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/memory"
)

// refused is the conflict of a write that has to be one.
func refused(t *testing.T, pool *pgxpool.Pool, n memory.Note) *memory.ConflictError {
	t.Helper()
	_, err := memory.Save(t.Context(), pool, n)
	conflict, ok := errors.AsType[*memory.ConflictError](err)
	if !ok || !errors.Is(err, memory.ErrConflict) {
		t.Fatalf("no conflict: %v", err)
	}
	return conflict
}

func TestAConflictHasBothValues(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "k", Value: "first"})
	save(t, pool, memory.Note{Key: "k", Value: "theirs", TraceID: "hb_1"})
	c := refused(t, pool, memory.Note{Key: "k", Value: "mine", Revision: 1})
	if string(c.Yours) != `"mine"` || c.Theirs == nil || string(c.Theirs.Value) != `"theirs"` || c.Theirs.Revision != 2 || c.Theirs.TraceID != "hb_1" {
		t.Errorf("got %+v", c)
	}
	if text := c.Error(); !strings.Contains(text, "mine") || !strings.Contains(text, "theirs") || !strings.Contains(text, "revision 1") {
		t.Errorf("the error says %s", text)
	}
	if c := refused(t, pool, memory.Note{Key: "none", Value: 1, Revision: 4}); c.Theirs != nil {
		t.Errorf("got %+v", c.Theirs)
	}
	if e, err := memory.Shared.Get(t.Context(), pool, "general", "k"); err != nil || e.Revision != 2 || string(e.Value) != `"theirs"` {
		t.Errorf("a conflict changed it: %+v, %v", e, err)
	}
}

func TestARevisionIsNeverUsedTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, begin := range map[string]func(key string){
		"forgotten": func(key string) {
			if ok, err := memory.Shared.Forget(t.Context(), pool, "general", key, 2); !ok || err != nil {
				t.Fatal(ok, err)
			}
		},
		"forgotten by id": func(key string) {
			e, err := memory.Shared.Get(t.Context(), pool, "general", key)
			if err == nil {
				_, err = memory.ForgetID(t.Context(), pool, e.ID, 2)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
		"deleted by hand": func(key string) {
			if _, err := pool.Exec(t.Context(), `delete from agent_memory where key = $1`, key); err != nil {
				t.Fatal(err)
			}
		},
		"expired": func(key string) { expire(t, pool, key) },
		"expired and swept": func(key string) {
			expire(t, pool, key)
			if _, err := memory.Expire(t.Context(), pool); err != nil {
				t.Fatal(err)
			}
		},
	} {
		save(t, pool, memory.Note{Key: name, Value: 1})
		save(t, pool, memory.Note{Key: name, Value: 2})
		begin(name)
		if e := save(t, pool, memory.Note{Key: name, Value: 3, Revision: memory.Absent}); e.Revision != 3 {
			t.Errorf("%s: kept anew at revision %d", name, e.Revision)
		}
		refused(t, pool, memory.Note{Key: name, Value: 4, Revision: 1})
		refused(t, pool, memory.Note{Key: name, Value: 4, Revision: 2})
	}
	if _, err := pool.Exec(t.Context(), `update agent_memory set value = '"by hand"' where key = 'expired'`); err != nil {
		t.Fatal(err)
	}
	refused(t, pool, memory.Note{Key: "expired", Value: 4, Revision: 3})
}

func TestAKeyThatIsDeletedWhileItIsKeptAnewGoesOnCounting(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	save(t, pool, memory.Note{Key: "k", Value: 1})
	save(t, pool, memory.Note{Key: "k", Value: 2})
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := memory.Shared.Forget(t.Context(), tx, "general", "k", 2); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		e, err := memory.Save(t.Context(), pool, memory.Note{Key: "k", Value: 3, Revision: memory.Absent})
		if err != nil || e.Revision != 3 {
			t.Errorf("the writer got revision %d, %v", e.Revision, err)
		}
	})
	pgtest.Eventually(t, patience, func() bool {
		var waits bool
		err := pool.QueryRow(t.Context(), `
			select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`).Scan(&waits)
		return err == nil && waits
	}, "the writer waits for the deletion")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if e, err := memory.Shared.Get(t.Context(), pool, "general", "k"); err != nil || e.Revision != 3 {
		t.Errorf("it is at revision %d, %v", e.Revision, err)
	}
}

func TestForgettingIsBasedOnWhatWasRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := save(t, pool, memory.Note{Key: "k", Value: 1})
	save(t, pool, memory.Note{Key: "k", Value: 2})
	for _, revision := range []int{1, memory.Absent} {
		if ok, err := memory.Shared.Forget(t.Context(), pool, "general", "k", revision); ok || !errors.Is(err, memory.ErrConflict) {
			t.Errorf("at %d: %v, %v", revision, ok, err)
		}
	}
	if _, err := memory.ForgetID(t.Context(), pool, e.ID, 1); !errors.Is(err, memory.ErrConflict) {
		t.Errorf("by id: %v", err)
	}
	for _, want := range []bool{true, false} {
		if ok, err := memory.Shared.Forget(t.Context(), pool, "general", "k", 2); ok != want || err != nil {
			t.Errorf("got %v, %v", ok, err)
		}
	}
}

// late keeps a conflict: revision 1 was read, and revision 2 is there.
func late(t *testing.T, pool *pgxpool.Pool, key string) string {
	t.Helper()
	save(t, pool, memory.Note{Key: key, Value: "first"})
	save(t, pool, memory.Note{Key: key, Value: "theirs", TraceID: "op_1"})
	note := memory.Note{Key: key, Value: "late", Revision: 1, TraceID: "hb_1"}
	id, err := memory.KeepConflict(t.Context(), pool, note, refused(t, pool, note), "")
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil || len(open) != 2 || open[0].Key != "kept" || string(open[0].Value) != `"late"` || string(open[0].FoundValue) != `"theirs"` ||
		open[0].Revision != 2 || open[0].IfRevision != 1 || open[0].TraceID != "hb_1" || open[0].FoundTraceID != "op_1" {
		t.Fatalf("got %+v, %v", open, err)
	}
	if c, err := decide(t, pool, taken, memory.Decision{Take: true, By: "ana", Reason: "newer", TraceID: "op_2"}); err != nil || c.Revision != 3 || c.Status != memory.ConflictTaken {
		t.Errorf("got %+v, %v", c, err)
	}
	if c, err := decide(t, pool, kept, memory.Decision{By: "ana", Reason: "older"}); err != nil || c.Revision != 2 || c.Status != memory.ConflictKept {
		t.Errorf("got %+v, %v", c, err)
	}
	if _, err := decide(t, pool, kept, memory.Decision{Take: true, By: "bea"}); !errors.Is(err, memory.ErrConflictDecided) {
		t.Errorf("decided twice: %v", err)
	}
	if _, err := decide(t, pool, "no id", memory.Decision{By: "bea"}); !errors.Is(err, memory.ErrConflictNotFound) {
		t.Errorf("got %v", err)
	}
	if open, err := memory.Conflicts(t.Context(), pool, memory.ConflictFilter{}); err != nil || len(open) != 0 {
		t.Errorf("still open: %+v, %v", open, err)
	}
	if all, err := memory.Conflicts(t.Context(), pool, memory.ConflictFilter{Status: "all", Key: "taken"}); err != nil || len(all) != 1 || all[0].DecidedBy != "ana" {
		t.Errorf("got %+v, %v", all, err)
	}
}

func TestALateValueReplacesOnlyWhatTheAdminSaw(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	save(t, pool, memory.Note{Key: "k", Value: "newer still"})
	_, err := decide(t, pool, id, memory.Decision{Take: true, By: "ana"})
	if c, ok := errors.AsType[*memory.ConflictError](err); !ok || c.Theirs == nil || string(c.Theirs.Value) != `"newer still"` {
		t.Fatalf("got %v", err)
	}
	if c, err := memory.GetConflict(t.Context(), pool, id); err != nil || c.Status != memory.ConflictOpen || c.Revision != 3 {
		t.Fatalf("got %+v, %v", c, err)
	}
	if c, err := decide(t, pool, id, memory.Decision{Take: true, By: "ana", IfRevision: 3}); err != nil || string(c.Current) != `"late"` || c.Revision != 4 {
		t.Errorf("got %+v, %v", c, err)
	}
}

func TestALateValueIsKeptOnceHoweverOftenItComes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	for _, value := range []string{"late", "later"} {
		note := memory.Note{Key: "k", Value: value, Revision: 1, TraceID: "hb_2"}
		again, err := memory.KeepConflict(t.Context(), pool, note, refused(t, pool, note), "")
		if err != nil || (again == id) != (value == "late") {
			t.Errorf("%s: %s after %s, %v", value, again, id, err)
		}
	}
}

func TestConflictsAreBoundedAndGoWithTime(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := late(t, pool, "k")
	if _, err := decide(t, pool, id, memory.Decision{By: "ana"}); err != nil {
		t.Fatal(err)
	}
	_, err := pool.Exec(t.Context(), `
		update agent_memory_conflicts set decided_at = clock_timestamp() - interval '91 days';
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision) select 'c', 'k' || n, '1', 0, 0 from generate_series(1, 999) n;
		insert into agent_memory_forgotten values ('c', 'old', 7, clock_timestamp() - interval '91 days'), ('c', 'new', 7, clock_timestamp())`)
	if err != nil {
		t.Fatal(err)
	}
	late(t, pool, "the thousandth")
	note := memory.Note{Key: "the thousandth", Value: "x", Revision: 1}
	if _, err := memory.KeepConflict(t.Context(), pool, note, refused(t, pool, note), ""); !errors.Is(err, memory.ErrConflictsFull) {
		t.Errorf("one too many: %v", err)
	}
	if _, err := memory.Expire(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if _, err := memory.GetConflict(t.Context(), pool, id); !errors.Is(err, memory.ErrConflictNotFound) {
		t.Errorf("an old one is there: %v", err)
	}
	var left string
	err = pool.QueryRow(t.Context(), `
		select (select count(*) from agent_memory_conflicts where status = 'open') || ' ' || (select string_agg(key, ',') from agent_memory_forgotten)`).Scan(&left)
	if err != nil || left != "1000 new" {
		t.Errorf("left are %s, %v", left, err)
	}
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
		for _, name := range []memory.Name{{Category: "c", Key: "a"}, {Category: "c", Key: "b"}, {Category: "general", Key: "t"}, {Category: "c", Key: "spoofed"}} {
			if revision := seen.Revision(name.Category, name.Key); revision != memory.Absent {
				got = append(got, name.Key+":"+string(rune('0'+revision)))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("of %d bytes: got %v, want %s", upto, got, want)
		}
	}
	for _, broken := range []string{"", "[", `{"memories"`, `{"memories":[{"key":`, `{"memories":7}`, `{"theirs":null}`, "null"} {
		if got := memory.SightsIn([]byte(broken), 1000); len(got) > 0 {
			t.Errorf("%s: %v", broken, got)
		}
	}
}
