package memory

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Search returns the entries that match query, best first. The query has the syntax of a web search: words, "a
// phrase", or, -not. If the query consists of words only and no entry has all of them, it returns entries with any of
// them. A query without words is [Owner.Recent]. limit is 20 when 0, at most 1000.
func (o Owner) Search(ctx context.Context, db postgres.DB, query string, limit int) ([]Entry, error) {
	parsed, err := parseQuery(ctx, db, query)
	if err != nil {
		return nil, err
	}
	return o.search(ctx, db, "", query, parsed, limit)
}

// parsedQuery describes a query that websearch_to_tsquery has parsed.
type parsedQuery struct {
	nodes        int     // lexemes and operators; 0 for a query without words
	onlyWords    bool    // no phrase, no or, no exclusion
	vectorSchema *string // of the extension vector, quoted; nil if the database lacks it
}

func parseQuery(ctx context.Context, db postgres.DB, query string) (p parsedQuery, err error) {
	err = db.QueryRow(ctx, `
		select numnode(websearch_to_tsquery('simple', @query)),
		       websearch_to_tsquery('simple', @query) = plainto_tsquery('simple', @query),
		       (select quote_ident(n.nspname) from pg_extension x join pg_namespace n on n.oid = x.extnamespace
		         where x.extname = 'vector')`,
		pgx.StrictNamedArgs{"query": query}).Scan(&p.nodes, &p.onlyWords, &p.vectorSchema)
	if err != nil {
		return p, fmt.Errorf("search memory: %w", err)
	}
	return p, nil
}

// search is [Owner.Search] for a parsed query, in a category or in all when it is empty.
func (o Owner) search(
	ctx context.Context, db postgres.DB, category, query string, parsed parsedQuery, limit int,
) ([]Entry, error) {
	if parsed.nodes == 0 {
		return o.Recent(ctx, db, category, limit)
	}
	found, err := o.fullTextSearch(ctx, db, category, query, false, limit)
	if err == nil && len(found) == 0 && parsed.onlyWords {
		found, err = o.fullTextSearch(ctx, db, category, query, true, limit)
	}
	return found, err
}

// fullTextSearch returns the entries that match a query, or that have any word of it, best first.
func (o Owner) fullTextSearch(
	ctx context.Context, db postgres.DB, category, query string, anyWord bool, limit int,
) ([]Entry, error) {
	return postgres.Rows[Entry](ctx, db, "search memory", `
		with q as (
		  select case
		           when @any_word::boolean then (
		             select string_agg(quote_literal(lexeme), ' | ')::tsquery
		               from unnest(to_tsvector('simple', @query)))
		           else websearch_to_tsquery('simple', @query)
		         end as query)
		select `+entryColumns+`
		  from agent_memory m, q
		 where m.owner = @owner and m.search @@ q.query and (m.expires_at is null or m.expires_at > clock_timestamp())
		   and (@category = '' or m.category = @category)
		 order by ts_rank(m.search, q.query, 1) desc, m.updated_at desc, m.id desc
		 limit @limit`, postgres.Strict{
		"owner": o, "category": category, "query": query, "any_word": anyWord,
		"limit": postgres.PageSize(limit, defaultLimit, maxLimit),
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
		select `+entryColumns+`
		  from agent_memory m
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
		select `+entryColumns+`
		  from agent_memory m
		 where owner = @owner and (@category = '' or category = @category)
		   and (expires_at is null or expires_at > clock_timestamp())
		 order by updated_at desc, id desc limit @limit`,
		postgres.Strict{"owner": o, "category": category, "limit": postgres.PageSize(limit, defaultLimit, maxLimit)})
}

const (
	defaultLimit = 20
	maxLimit     = 1000
)
