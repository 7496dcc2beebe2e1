package memory

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Index searches by words and by meaning, and maintains the vectors. It is safe for concurrent use. The searches of a
// nil Index use words alone.
type Index struct {
	model Embedder
	log   *slog.Logger

	mu       sync.Mutex
	fallback string    // why searches use words alone; empty if they use vectors
	retryAt  time.Time // earliest time of the next embedding of a query
}

// Embedder computes vectors of texts. A [models.Client] is one.
type Embedder interface {
	Model() string
	Embed(ctx context.Context, texts []string) ([][]float32, error)
}

// NewIndex returns an Index over an embedding model. log may be nil.
func NewIndex(model Embedder, log *slog.Logger) *Index {
	return &Index{model: model, log: cmp.Or(log, slog.New(slog.DiscardHandler))}
}

const (
	queryTimeout = 2 * time.Second  // for the embedding of a query
	retryPause   = 30 * time.Second // pause after a failed embedding
	minRanked    = 50               // text matches, and vector matches, to fuse at least
	rankConstant = 60               // of reciprocal rank fusion
	maxScanned   = 50_000           // newest entries whose vectors are compared
)

// Search is [Owner.Search], fused with the entries nearest in meaning (reciprocal rank fusion). Of those it compares
// the newest 50,000 of the owner. It uses words alone for a query with a phrase, or or an exclusion, without the
// extension vector, and while the embedding server fails. It logs the start and the end of the last two.
func (x *Index) Search(ctx context.Context, db postgres.DB, o Owner, query string, limit int) ([]Entry, error) {
	return x.SearchIn(ctx, db, o, "", query, limit)
}

// SearchIn is [Index.Search] in a category, or in all when it is empty.
func (x *Index) SearchIn(
	ctx context.Context, db postgres.DB, o Owner, category, query string, limit int,
) ([]Entry, error) {
	parsed, err := parseQuery(ctx, db, query)
	if err != nil {
		return nil, err
	}
	var vector []float32
	if x != nil && parsed.nodes > 0 && parsed.onlyWords {
		vector = x.queryVector(ctx, parsed, query)
	}
	if vector == nil {
		return o.search(ctx, db, category, query, parsed, limit)
	}
	limit = postgres.PageSize(limit, defaultLimit, maxLimit)
	depth := max(limit, minRanked)
	byWords, err := o.search(ctx, db, category, query, parsed, depth)
	if err != nil {
		return nil, err
	}
	byVector, err := x.vectorSearch(ctx, db, o, category, vector, depth, *parsed.vectorSchema)
	if err != nil {
		return nil, err
	}
	found := fuse(byWords, byVector)
	return found[:min(len(found), limit)], nil
}

// queryVector returns the vector of a query; nil if none is available.
func (x *Index) queryVector(ctx context.Context, parsed parsedQuery, query string) []float32 {
	if parsed.vectorSchema == nil {
		x.setFallback(ctx, "the database has no extension vector", nil)
		return nil
	}
	if x.paused() {
		return nil
	}
	embedCtx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	vectors, err := x.model.Embed(embedCtx, []string{truncateBytes(query, maxEmbedded)})
	if err != nil {
		if ctx.Err() == nil {
			x.setFallback(ctx, "the query was not embedded", err)
		}
		return nil
	}
	x.setFallback(ctx, "", nil)
	return vectors[0]
}

func (x *Index) paused() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Now().Before(x.retryAt)
}

// setFallback stores the reason and logs its change; "" means that searches use vectors again. After an error, searches
// use words alone until retryAt.
func (x *Index) setFallback(ctx context.Context, reason string, err error) {
	x.mu.Lock()
	before := x.fallback
	x.fallback = reason
	if err != nil {
		x.retryAt = time.Now().Add(retryPause)
	}
	x.mu.Unlock()
	switch reason {
	case before:
	case "":
		x.log.InfoContext(ctx, "semantic memory search resumed", "model", x.model.Model())
	default:
		x.log.WarnContext(ctx, "memory search uses words alone; run agent doctor",
			"reason", reason, "model", x.model.Model(), "error", err)
	}
}

// vectorSearch returns the owner's entries nearest to a vector by cosine distance, nearest first. schema is the quoted
// schema of the extension vector, which need not be in the search path.
func (x *Index) vectorSearch(
	ctx context.Context, db postgres.DB, o Owner, category string, vector []float32, limit int, schema string,
) ([]Entry, error) {
	query := `
		select ` + entryColumns + `
		  from (select n.* from agent_memory n
		         where n.owner = @owner and (n.expires_at is null or n.expires_at > clock_timestamp())
		           and (@category = '' or n.category = @category)
		         order by n.updated_at desc limit @scan_limit) m
		  join agent_memory_embeddings e on e.memory_id = m.id and e.revision = m.revision
		 where e.model = @model and e.dimensions = cardinality(@vector::real[])
		 order by e.vector::` + schema + `.vector operator(` + schema + `.<=>) @vector::real[]::` + schema + `.vector, m.id
		 limit @limit`
	return postgres.Rows[Entry](ctx, db, "search memory by meaning", query,
		postgres.Strict{
			"owner": o, "category": category, "model": x.model.Model(), "vector": vector, "scan_limit": maxScanned,
			"limit": limit,
		})
}

// fuse merges ranked lists: an entry scores 1 / (rankConstant + rank) in each, with ranks from 1. The first list wins
// ties.
func fuse(lists ...[]Entry) []Entry {
	scores := map[string]float64{}
	var all []Entry
	for _, list := range lists {
		for rank, e := range list {
			if scores[e.ID] == 0 {
				all = append(all, e)
			}
			scores[e.ID] += 1 / float64(rankConstant+rank+1)
		}
	}
	slices.SortStableFunc(all, func(a, b Entry) int { return cmp.Compare(scores[b.ID], scores[a.ID]) })
	return all
}

// EmbeddingState is the state of an [Index].
type EmbeddingState struct {
	Extension string // version of the extension vector; empty if the database has none
	Available bool   // the server offers the extension
	Server    int    // major version of PostgreSQL
	Entries   int
	Embedded  int // current revisions embedded by the model
}

// State returns the progress of the embedding.
func (x *Index) State(ctx context.Context, db postgres.DB) (s EmbeddingState, err error) {
	err = db.QueryRow(ctx, `
		select coalesce(`+vectorVersion+`, ''), exists (select from pg_available_extensions where name = 'vector'),
		       current_setting('server_version_num')::int / 10000,
		       count(*), count(*) filter (where e.dimensions is not null)
		  from agent_memory m
		  left join agent_memory_embeddings e on e.memory_id = m.id and e.model = @model and e.revision = m.revision
		 where m.expires_at is null or m.expires_at > clock_timestamp()`,
		postgres.Strict{"model": x.model.Model()}).Scan(&s.Extension, &s.Available, &s.Server, &s.Entries, &s.Embedded)
	if err != nil {
		return s, fmt.Errorf("count embeddings of memories: %w", err)
	}
	return s, nil
}

// Check embeds a word, to test the server, and returns the length of the vector.
func (x *Index) Check(ctx context.Context) (dimensions int, err error) {
	vectors, err := x.model.Embed(ctx, []string{"ping"})
	if err != nil {
		return 0, err
	}
	return len(vectors[0]), nil
}
