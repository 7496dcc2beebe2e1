package memory_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
)

// indexed is a memory with an embedding server.
type indexed struct {
	pool   *pgxpool.Pool
	server *modeltest.Embeddings
	log    *bytes.Buffer
	*memory.Index
}

// topics gives texts about one topic vectors of the same direction.
func topics(text string) []float32 {
	v := []float32{0.1, 0.1, 0.1}
	for axis, words := range []string{"invoice bill money pay", "dog puppy pet animal", "ship harbour sail boat"} {
		for word := range strings.FieldsSeq(words) {
			if strings.Contains(strings.ToLower(text), word) {
				v[axis]++
			}
		}
	}
	return v
}

func (x *indexed) index(t *testing.T, model string) *memory.Index {
	t.Helper()
	client, err := models.New(models.Config{BaseURL: x.server.URL(), APIKey: "embedding-key", Model: model})
	require.NoError(t, err)
	return memory.NewIndex(client, slog.New(slog.NewTextHandler(x.log, nil)))
}

// newIndexed needs no extension: the database only claims to have it. It stores vectors and does not compare them.
func newIndexed(t *testing.T) *indexed {
	t.Helper()
	x := &indexed{pool: pgtest.DB(t), server: modeltest.NewEmbeddings(t, topics), log: &bytes.Buffer{}}
	x.exec(t, `
		insert into pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
		values (999999, 'vector', current_user::regrole, 'public'::regnamespace, false, 'test')`)
	x.Index = x.index(t, "small")
	return x
}

// newVectors uses the real extension.
func newVectors(t *testing.T) *indexed {
	t.Helper()
	x := &indexed{pool: pgtest.DB(t), server: modeltest.NewEmbeddings(t, topics), log: &bytes.Buffer{}}
	offered := pgtest.Value[bool](t, x.pool, `select exists (select from pg_available_extensions where name = 'vector')`)
	if !offered {
		t.Skip("this server does not offer the extension vector (Debian: postgresql-NN-pgvector)")
	}
	x.exec(t, `create schema elsewhere; create extension vector schema elsewhere`)
	x.Index = x.index(t, "small")
	return x
}

func (x *indexed) exec(t *testing.T, sql string) {
	t.Helper()
	pgtest.Exec(t, x.pool, sql)
}

func (x *indexed) save(t *testing.T, owner memory.Owner, key, value string) {
	t.Helper()
	_, err := memory.Save(t.Context(), x.pool, memory.Note{Owner: owner, Key: key, Value: value})
	require.NoError(t, err)
}

// update runs one pass over all entries.
func (x *indexed) update(t *testing.T) int {
	t.Helper()
	n, err := x.Update(t.Context(), x.pool, time.Time{})
	require.NoError(t, err)
	return n
}

// rows lists the stored entries: key, model, revision, and whether there is a vector.
func (x *indexed) rows(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, x.pool, `
		select coalesce(string_agg(format('%s %s %s %s', m.key, e.model, e.revision, coalesce(e.vector[1]::text, '-')), ', '
		  order by m.key, e.model), '')
		  from agent_memory_embeddings e join agent_memory m on m.id = e.memory_id`)
}

func (x *indexed) expect(t *testing.T, want string) {
	t.Helper()
	assert.Equal(t, want, x.rows(t))
}

func (x *indexed) found(t *testing.T, owner memory.Owner, query string) string {
	t.Helper()
	list, err := x.Search(t.Context(), x.pool, owner, query, 10)
	require.NoError(t, err)
	found := make([]string, len(list))
	for i, e := range list {
		found[i] = e.Key
	}
	return strings.Join(found, " ")
}

func TestAnEntryIsEmbeddedOnceInEachRevision(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	x.save(t, "sales", "b", "a dog")
	assert.Equal(t, 2, x.update(t))
	if n := x.update(t); n != 0 || len(x.server.Requests()) != 1 {
		t.Errorf("embedded %d again, in %d requests", n, len(x.server.Requests()))
	}
	x.expect(t, "a small 1 1.1, b small 1 0.1")
	sent := x.server.Requests()[0]
	got := fmt.Sprintf("%q %s %s", sent.Texts, sent.Model, sent.Header.Get("Authorization"))
	assert.Equal(t, `["a: the invoice" "b: a dog"] small Bearer embedding-key`, got, "sent")
	x.save(t, memory.Shared, "a", "a ship")
	x.update(t)
	x.expect(t, "a small 2 0.1, b small 1 0.1")
	_, err := memory.Shared.Forget(t.Context(), x.pool, "general", "a", 0)
	require.NoError(t, err)
	x.expect(t, "b small 1 0.1")
}

func TestAValueThatChangesWhileItIsEmbeddedIsEmbeddedAnew(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	x.server.Refuse(func(texts []string) int {
		if strings.Contains(texts[0], "invoice") {
			x.save(t, memory.Shared, "a", "a ship")
		}
		return 0
	})
	x.update(t)
	x.expect(t, "a small 2 0.1")
}

func TestTwoProcessesDoNotEmbedTheSameEntry(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	x.server.Refuse(func([]string) int {
		n, err := x.index(t, "small").Update(t.Context(), x.pool, time.Time{})
		assert.Truef(t, n == 0 && err == nil, "another process embedded %d: %v", n, err)
		return 0
	})
	n := x.update(t)
	assert.Truef(t, n == 1 && len(x.server.Requests()) == 1, "embedded %d in %d requests", n, len(x.server.Requests()))
}

func TestAClaimOfADeadProcessIsDueAgain(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	x.exec(t, `insert into agent_memory_embeddings (memory_id, model, revision, due_at)
		select id, 'small', 1, clock_timestamp() + interval '1 hour' from agent_memory`)
	assert.Equal(t, 0, x.update(t))
	x.exec(t, `update agent_memory_embeddings set due_at = clock_timestamp()`)
	assert.Equal(t, 1, x.update(t))
}

func TestAFailingServerLosesNoEntryAndDelaysNoWriter(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.server.Refuse(func([]string) int { return http.StatusServiceUnavailable })
	x.save(t, memory.Shared, "a", "the invoice")
	_, err := x.Update(t.Context(), x.pool, time.Time{})
	assert.Truef(t, err != nil && !strings.Contains(err.Error(), "embedding-key"), "got %v", err)
	x.expect(t, "a small 1 -")
	x.server.Refuse(nil)
	assert.Equal(t, 1, x.update(t))
}

func TestARefusedTextKeepsNoOtherFromBeingEmbedded(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.server.Refuse(func(texts []string) int {
		for _, text := range texts {
			switch {
			case strings.HasPrefix(text, "bad"):
				return http.StatusBadRequest
			case len(text) > 3000:
				return http.StatusInternalServerError
			}
		}
		return 0
	})
	x.save(t, memory.Shared, "a", "the invoice")
	x.save(t, memory.Shared, "bad", "a dog")
	x.save(t, memory.Shared, "long", "a ship "+strings.Repeat("ü", 5000))
	assert.Equal(t, 2, x.update(t))
	x.expect(t, "a small 1 1.1, bad small 1 -, long small 1 0.1")
	var attempts int
	var later bool
	err := x.pool.QueryRow(t.Context(), `
		select attempts, due_at > clock_timestamp() + interval '4 minutes' from agent_memory_embeddings
		  where due_at is not null`).Scan(&attempts, &later)
	assert.Truef(t, err == nil && attempts == 1 && later, "attempts %d, later %t: %v", attempts, later, err)
	x.save(t, memory.Shared, "bad", "a dog")
	x.exec(t, `update agent_memory set key = 'good' where key = 'bad'`)
	assert.Equal(t, 1, x.update(t))
}

func TestAServerThatRefusesEverythingIsNotAskedForTheWholeMemory(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.server.Refuse(func([]string) int { return http.StatusBadRequest })
	x.exec(t, `insert into agent_memory (key, value) select 'k' || n, '"x"' from generate_series(1, 70) n`)
	_, err := x.Update(t.Context(), x.pool, time.Time{})
	assert.Error(t, err)
	n := len(x.server.Requests())
	assert.Truef(t, n <= 1+2*32, "%d requests in one pass", n)
}

func TestEntriesAreEmbeddedBesideOtherWork(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	asked, ended := make(chan struct{}, 1), make(chan error, 1)
	x.server.Refuse(func([]string) int {
		select {
		case asked <- struct{}{}:
		default:
		}
		return 0
	})
	go func() { ended <- x.Run(ctx, x.pool) }()
	<-asked
	stop()
	assert.NoError(t, <-ended)
	var none *memory.Index
	assert.NoError(t, none.Run(t.Context(), x.pool))
}

func TestAnotherModelEmbedsAnew(t *testing.T) {
	t.Parallel()
	x := newIndexed(t)
	x.save(t, memory.Shared, "a", "the invoice")
	x.update(t)
	large := x.index(t, "large")
	if n, err := large.Update(t.Context(), x.pool, time.Time{}); n != 1 || err != nil {
		t.Fatalf("embedded %d: %v", n, err)
	}
	x.expect(t, "a large 1 1.1, a small 1 1.1")
	x.exec(t, `update agent_memory_embeddings set updated_at = clock_timestamp() - interval '25 hours'`)
	_, err := large.Update(t.Context(), x.pool, time.Time{})
	require.NoError(t, err)
	x.expect(t, "a large 1 1.1")
}

func TestWithoutTheExtensionMemoryIsSearchedByWordsAndNothingIsSent(t *testing.T) {
	t.Parallel()
	x := &indexed{pool: pgtest.DB(t), server: modeltest.NewEmbeddings(t, topics), log: &bytes.Buffer{}}
	x.Index = x.index(t, "small")
	x.save(t, memory.Shared, "a", "the invoice")
	assert.Equal(t, 0, x.update(t))
	for _, want := range []string{"a", "a"} {
		assert.Equal(t, want, x.found(t, memory.Shared, "invoice"))
	}
	assert.Equal(t, 0, len(x.server.Requests()))
	assert.Equal(t, 1, strings.Count(x.log.String(), "has no extension vector"), x.log)
	var none *memory.Index
	found, err := none.Search(t.Context(), x.pool, memory.Shared, "invoice", 10)
	assert.Truef(t, err == nil && len(found) == 1, "without an index: %v, %v", found, err)
}

func TestEntriesAreFoundByMeaning(t *testing.T) {
	t.Parallel()
	x := newVectors(t)
	x.save(t, memory.Shared, "rule", "invoice over 500 needs two signatures")
	x.save(t, memory.Shared, "animals", "the dog stays outside")
	x.save(t, memory.Shared, "berth", "the boat lies in the harbour")
	assert.Equal(t, "", x.found(t, memory.Shared, "bill"))
	x.update(t)
	for query, want := range map[string]string{
		"bill":             "rule",
		"puppy":            "animals",
		"sail":             "berth",
		"outside":          "animals",
		`"a bill"`:         "", // a quoted phrase must match exactly
		"bill -signatures": "",
	} {
		got, _, _ := strings.Cut(x.found(t, memory.Shared, query), " ")
		assert.Truef(t, got == want, "%s: found %q first, want %q", query, got, want)
	}
	x.exec(t, `update agent_memory set expires_at = clock_timestamp() where key = 'rule'`)
	got := x.found(t, memory.Shared, "bill")
	assert.Truef(t, !strings.Contains(got, "rule"), "an expired entry is found: %q", got)
	x.save(t, memory.Shared, "berth", "the puppy has moved")
	got = x.found(t, memory.Shared, "sail")
	assert.Truef(t, !strings.Contains(got, "berth"), "an entry is found by a value that it has no more: %q", got)
}

func TestAnOwnMemoryIsNotFoundByTheMeaningOfAnother(t *testing.T) {
	t.Parallel()
	x := newVectors(t)
	x.save(t, "sales", "own", "the invoice")
	x.save(t, memory.Shared, "shared", "the bill")
	x.update(t)
	for owner, want := range map[memory.Owner]string{"sales": "own", memory.Shared: "shared", "billing": ""} {
		assert.Equal(t, want, x.found(t, owner, "money"), owner)
	}
}

func TestFailingServerDelaysOnlyOneSearch(t *testing.T) {
	t.Parallel()
	for name, status := range map[string]int{"no response": -1, "invalid key": http.StatusUnauthorized} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newIndexed(t)
			x.save(t, memory.Shared, "rule", "the invoice")
			x.update(t)
			x.server.Refuse(func([]string) int { return status })
			before := len(x.server.Requests())
			for range 3 {
				assert.Equal(t, "rule", x.found(t, memory.Shared, "invoice"))
			}
			assert.Equal(t, 1, len(x.server.Requests())-before)
			assert.Equal(t, 1, strings.Count(x.log.String(), "uses words alone"), x.log)
			assert.Contains(t, x.log.String(), `reason="the query was not embedded"`)
		})
	}
}

func TestVectorsOfAnotherLengthAreLeftOut(t *testing.T) {
	t.Parallel()
	x := newVectors(t)
	x.save(t, memory.Shared, "rule", "the invoice")
	x.update(t)
	x.exec(t, `update agent_memory_embeddings set vector = '{1,2}', dimensions = 2`)
	assert.Equal(t, "", x.found(t, memory.Shared, "bill"))
}
