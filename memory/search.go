package memory

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Search returns the entries that match query, best first. The query has the syntax of a web search: words, "a
// phrase", or, -not. If no entry has all words, it returns entries with any of them, unless the query excludes or
// quotes something. A query without words is [Recent].
func (o Owner) Search(ctx context.Context, db postgres.DB, query string, limit int) ([]Entry, error) {
	form, err := parseQuery(ctx, db, query)
	if err != nil {
		return nil, err
	}
	return o.search(ctx, db, query, form, limit)
}

// queryForm is what PostgreSQL finds in a query.
type queryForm struct {
	words        int
	plain        bool    // only words: no phrase, no or, no exclusion
	vectorSchema *string // of the extension vector, quoted; nil if the database lacks it
}

func parseQuery(ctx context.Context, db postgres.DB, query string) (f queryForm, err error) {
	err = db.QueryRow(ctx, `
		select numnode(websearch_to_tsquery('simple', @query)),
		       websearch_to_tsquery('simple', @query) = plainto_tsquery('simple', @query),
		       (select quote_ident(n.nspname) from pg_extension x join pg_namespace n on n.oid = x.extnamespace
		         where x.extname = 'vector')`,
		pgx.StrictNamedArgs{"query": query}).Scan(&f.words, &f.plain, &f.vectorSchema)
	if err != nil {
		return f, fmt.Errorf("search memory: %w", err)
	}
	return f, nil
}

// search returns the entries that match a query by words.
func (o Owner) search(ctx context.Context, db postgres.DB, query string, form queryForm, limit int) ([]Entry, error) {
	if form.words == 0 {
		return o.Recent(ctx, db, "", limit)
	}
	found, err := o.matching(ctx, db, query, false, limit)
	if err == nil && len(found) == 0 && form.plain {
		found, err = o.matching(ctx, db, query, true, limit)
	}
	return found, err
}

func (o Owner) matching(ctx context.Context, db postgres.DB, query string, anyWord bool, limit int) ([]Entry, error) {
	return postgres.Rows[Entry](ctx, db, "search memory", `
		with q as (
		  select case when @any_word::boolean
		         then (select string_agg(quote_literal(lexeme), ' | ')::tsquery from unnest(to_tsvector('simple', @query)))
		         else websearch_to_tsquery('simple', @query) end as query)
		select m.id, m.owner, m.category, m.key, m.value, m.revision, m.trace_id, m.expires_at, m.created_at, m.updated_at
		  from agent_memory m, q
		 where m.owner = @owner and m.search @@ q.query and (m.expires_at is null or m.expires_at > clock_timestamp())
		 order by ts_rank(m.search, q.query, 1) desc, m.updated_at desc, m.id desc
		 limit @limit`, postgres.Strict{
		"owner": o, "query": query, "any_word": anyWord, "limit": postgres.PageSize(limit, defaultLimit, maxLimit),
	})
}

// Filter narrows [List]; the zero value lists the newest 20 of all owners.
type Filter struct {
	Owner    *Owner // owner of the memory; nil for all
	Category string
	Prefix   string     // prefix of the key
	TraceIDs []trace.ID // traces of the last write, as [trace.ParseAny] returns them for an id
	Before   string     // an id; returns only older entries
	Limit    int        // 20 when 0, at most 1000
}

// List returns entries, newest first by creation. It omits expired ones.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Entry, error) {
	return postgres.Rows[Entry](ctx, db, "list memory", `
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory
		 where (@owner::text is null or owner = @owner) and (@category = '' or category = @category)
		   and (@prefix = '' or starts_with(key, @prefix))
		   and (@trace_ids::text[] is null or trace_id = any (@trace_ids))
		   and (@before = '' or id < nullif(@before, '')::uuid)
		   and (expires_at is null or expires_at > clock_timestamp())
		 order by id desc limit @limit`,
		postgres.Strict{
			"owner": f.Owner, "category": f.Category, "prefix": f.Prefix, "trace_ids": f.TraceIDs, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, defaultLimit, maxLimit),
		})
}

// Recent returns the last written entries of a category, or of all when it is empty. limit is 20 when 0, at most
// 1000.
func (o Owner) Recent(ctx context.Context, db postgres.DB, category string, limit int) ([]Entry, error) {
	return postgres.Rows[Entry](ctx, db, "list memory", `
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory
		 where owner = @owner and (@category = '' or category = @category)
		   and (expires_at is null or expires_at > clock_timestamp())
		 order by updated_at desc, id desc limit @limit`,
		postgres.Strict{"owner": o, "category": category, "limit": postgres.PageSize(limit, defaultLimit, maxLimit)})
}

const (
	queryTimeout = 2 * time.Second  // for the embedding of a query
	retryPause   = 30 * time.Second // pause after a failed embedding
	minRanked    = 50               // matches to rank of each kind, even for a smaller limit
	rankConstant = 60               // of reciprocal rank fusion
	maxScanned   = 50_000           // newest entries whose vectors are compared
)

// Embedder computes vectors of texts. A [models.Client] is one.
type Embedder interface {
	Model() string
	Embed(ctx context.Context, texts []string) ([][]float32, error)
}

// Index searches by words and by meaning, and maintains the vectors. A nil Index searches by words alone. It is safe
// for concurrent use.
type Index struct {
	model Embedder
	log   *slog.Logger

	mu      sync.Mutex
	problem string    // why searches use words alone; empty if they use vectors
	retryAt time.Time // no query is embedded before
}

// NewIndex returns an Index over an embedding model. log may be nil.
func NewIndex(model Embedder, log *slog.Logger) *Index {
	return &Index{model: model, log: cmp.Or(log, slog.New(slog.DiscardHandler))}
}

// Search is [Owner.Search], fused with the entries nearest in meaning (reciprocal rank fusion). It uses words alone
// for a query that quotes or excludes something, without the extension vector, and while the embedding server fails.
// It logs that once.
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

// nearest returns the owner's entries nearest to a vector by cosine distance, nearest first. schema is that of the
// extension vector.
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
