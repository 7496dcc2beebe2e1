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

// Index searches by words and by meaning, and maintains the vectors. A nil Index searches by words alone. It is safe
// for concurrent use.
type Index struct {
	model Embedder
	log   *slog.Logger

	mu      sync.Mutex
	problem string    // why searches use words alone; empty if they use vectors
	retryAt time.Time // no query is embedded before
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
	minRanked    = 50               // matches to rank of each kind, even for a smaller limit
	rankConstant = 60               // of reciprocal rank fusion
	maxScanned   = 50_000           // newest entries whose vectors are compared
)

// Search is [Owner.Search], fused with the entries nearest in meaning (reciprocal rank fusion). Of those it compares
// the newest 50,000 of the owner. It uses words alone for a query with a phrase, or or an exclusion, without the
// extension vector, and while the embedding server fails. It logs the start and the end of the last two.
func (x *Index) Search(ctx context.Context, db postgres.DB, o Owner, query string, limit int) ([]Entry, error) {
	form, err := parseQuery(ctx, db, query)
	if err != nil {
		return nil, err
	}
	var vector []float32
	if x != nil && form.words > 0 && form.plain {
		vector = x.queryVector(ctx, form, query)
	}
	if vector == nil {
		return o.search(ctx, db, query, form, limit)
	}
	limit = postgres.PageSize(limit, defaultLimit, maxLimit)
	depth := max(limit, minRanked)
	byWords, err := o.search(ctx, db, query, form, depth)
	if err != nil {
		return nil, err
	}
	byMeaning, err := x.nearest(ctx, db, o, vector, depth, *form.vectorSchema)
	if err != nil {
		return nil, err
	}
	found := fuse(byWords, byMeaning)
	return found[:min(len(found), limit)], nil
}

// queryVector returns the vector of a query; nil if none is available.
func (x *Index) queryVector(ctx context.Context, form queryForm, query string) []float32 {
	if form.vectorSchema == nil {
		x.report(ctx, "the database has no extension vector", nil)
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
			x.report(ctx, "the embedding server does not answer", err)
		}
		return nil
	}
	x.report(ctx, "", nil)
	return vectors[0]
}

func (x *Index) paused() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Now().Before(x.retryAt)
}

// report logs a new problem, or the end of one (""). After an error, searches use words alone until retryAt.
func (x *Index) report(ctx context.Context, problem string, err error) {
	x.mu.Lock()
	before := x.problem
	x.problem = problem
	if err != nil {
		x.retryAt = time.Now().Add(retryPause)
	}
	x.mu.Unlock()
	switch problem {
	case before:
	case "":
		x.log.InfoContext(ctx, "semantic memory search resumed", "model", x.model.Model())
	default:
		x.log.WarnContext(ctx, "memory search uses words alone; run agent doctor",
			"reason", problem, "model", x.model.Model(), "error", err)
	}
}

// nearest returns the owner's entries nearest to a vector by cosine distance, nearest first. schema is the quoted
// schema of the extension vector, which need not be in the search path.
func (x *Index) nearest(
	ctx context.Context, db postgres.DB, o Owner, vector []float32, limit int, schema string,
) ([]Entry, error) {
	query := `
		select m.id, m.owner, m.category, m.key, m.value, m.revision, m.trace_id, m.expires_at, m.created_at, m.updated_at
		  from (select n.* from agent_memory n
		         where n.owner = @owner and (n.expires_at is null or n.expires_at > clock_timestamp())
		         order by n.updated_at desc limit @most) m
		  join agent_memory_embeddings e on e.memory_id = m.id and e.revision = m.revision
		 where e.model = @model and e.dimensions = cardinality(@vector::real[])
		 order by e.vector::` + schema + `.vector operator(` + schema + `.<=>) @vector::real[]::` + schema + `.vector, m.id
		 limit @limit`
	return postgres.Rows[Entry](ctx, db, "search memory by meaning", query,
		postgres.Strict{"owner": o, "model": x.model.Model(), "vector": vector, "most": maxScanned, "limit": limit})
}

// fuse merges ranked lists: an entry scores 1 / (60 + rank) in each. The first list wins ties.
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
