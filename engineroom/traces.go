package engineroom

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	tracesPerPage = 50
	// tracesSummed is how many rows of one trace the listing adds up; a sum of more says that it is at least that.
	tracesSummed = 2000
)

// traceAges is how far back the listing can be narrowed down to.
var traceAges = []traceAge{
	{"1h", "the last hour", time.Hour},
	{"24h", "the last day", 24 * time.Hour},
	{"7d", "the last 7 days", 7 * 24 * time.Hour},
	{"30d", "the last 30 days", 30 * 24 * time.Hour},
}

// traceAge is how far a listing goes back.
type traceAge struct {
	Value, Word string
	span        time.Duration
}

// tracesPage lists pieces of work, each rolled up to one line.
func (room *Room) tracesPage() page {
	return page{
		path: "/traces", name: "traces", nav: "Traces", title: "Traces", open: room.openTraces,
		parts: []part{{name: "list", every: 2 * time.Second, calm: true, load: room.listTraces}},
	}
}

// tracesWanted is what a listing is narrowed down to.
type tracesWanted struct {
	Surface, Status, Agent, Since, Before string
	span                                  time.Duration
}

// tracedWork is a trace in the listing.
type tracedWork struct {
	ExecutionID, TraceID, Surface, Flow, Summary, Status string
	Agent                                                string
	StartedAt                                            time.Time
	FinishedAt                                           *time.Time
	Tokens, Rows, Errors                                 int64
	CostUSD                                              float64
	More                                                 bool // the sums are of the first tracesSummed rows
}

// Took is how long the work took in few characters; empty while it goes on.
func (w tracedWork) Took() string {
	if ms := between(w.StartedAt, w.FinishedAt); ms != nil {
		return lastingMS(*ms)
	}
	return ""
}

// between is the milliseconds from a moment to another; nil when there is no other.
func between(from time.Time, to *time.Time) *int64 {
	if to == nil {
		return nil
	}
	return new(max(to.Sub(from).Milliseconds(), 0))
}

// openTraces reads the filters. A value that no filter has is refused, so that nobody takes the whole for a part.
func (room *Room) openTraces(_ context.Context, v *visit) (string, error) {
	q, err := filtersOf(v.Query, "surface", "status", "agent", "since", "before")
	if err != nil {
		return "", err
	}
	w := tracesWanted{Surface: q["surface"], Status: q["status"], Agent: q["agent"], Since: q["since"]}
	if w.Before, err = v.uuidFilter("before"); err != nil {
		return "", err
	}
	if err := oneOf("surface", w.Surface, surfaceNames()); err != nil {
		return "", err
	}
	if err := oneOf("status", w.Status, executionStatuses()); err != nil {
		return "", err
	}
	names := make([]string, len(traceAges))
	for i, a := range traceAges {
		names[i] = a.Value
		if a.Value == w.Since {
			w.span = a.span
		}
	}
	v.About = w
	return "Traces", oneOf("since", w.Since, names)
}

// oneOf refuses a filter's value that is not in its list; empty is no filter.
func oneOf(name, value string, allowed []string) error {
	if value == "" || slices.Contains(allowed, value) {
		return nil
	}
	return problem.New(http.StatusBadRequest, "filter %s is one of %s, not %.60q", name, strings.Join(allowed, ", "), value)
}

// listTraces reads one page. The newest of each surface come from the index of the surface, and those that a worker
// has from the index of these, so the runs that other runs started, however many there are, are not looked at.
func (room *Room) listTraces(ctx context.Context, v *visit) (any, error) {
	w, _ := v.About.(tracesWanted)
	surfaces := surfaceNames()
	if w.Surface != "" {
		surfaces = []string{w.Surface}
	}
	rows, err := room.Read.Query(ctx, `
		select r.id::text as execution_id, r.trace_id, r.surface, r.agent, r.flow, r.summary, r.status, r.started_at,
		       r.completed_at as finished_at, t.tokens, t.cost_usd, t.rows, t.errors, t.rows > @most as more
		  from (select e.id, e.trace_id, s.surface, e.agent, e.flow, e.summary, e.status, e.started_at, e.completed_at
		          from unnest(@surfaces::text[]) s (surface)
		         cross join lateral (
		               select x.id, x.trace_id, left(x.agent, 200) as agent, left(x.flow, 200) as flow, x.status, x.completed_at,
		                      left(coalesce(nullif(x.error_message, ''), x.result_summary), 300) as summary,
		                      coalesce(x.started_at, x.created_at) as started_at
		                 from ((select w.id from (select k.id, k.agent from agent_executions k
		                         where k.surface = s.surface and k.parent_id is null and k.claimed_by is null
		                           and (@status::text = '' or k.status = @status)
		                           and (@span::interval is null or k.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - @span::interval))
		                           and (@before::text = '' or k.id < nullif(@before::text, '')::uuid)
		                         order by k.id desc limit case when @agent::text = '' then @limit::int + 1 else @looked::int end) w
                         where @agent::text = '' or w.agent = @agent order by w.id desc limit @limit::int + 1)
		                       union all
		                       (select w.id from (select k.id, k.agent from agent_executions k
		                         where k.surface = s.surface and k.parent_id is null and k.claimed_by is not null
		                           and (@status::text = '' or k.status = @status)
		                           and (@span::interval is null or k.id >= lanekeeper.agent_uuid7_floor(clock_timestamp() - @span::interval))
		                           and (@before::text = '' or k.id < nullif(@before::text, '')::uuid)
		                         order by k.id desc limit case when @agent::text = '' then @limit::int + 1 else @looked::int end) w
                         where @agent::text = '' or w.agent = @agent order by w.id desc limit @limit::int + 1)
		                       order by id desc limit @limit::int + 1) p
		                cross join lateral (select * from agent_executions i where i.id = p.id offset 0) x) e
		         order by e.id desc limit @limit::int + 1) r
		 cross join lateral (
		       select count(*) as rows, count(*) filter (where a.status = 'error') as errors,
		              coalesce(sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens')), 0)::bigint as tokens,
		              coalesce(sum(a.cost_usd), 0)::float8 as cost_usd
		         from (select y.status, y.token_usage, y.cost_usd from agent_activity y
		                where y.trace_id = r.trace_id order by y.created_at limit @most::int + 1) a) t
		 order by r.id desc`, freshPlan, postgres.Strict{
		"surfaces": surfaces, "status": w.Status, "agent": w.Agent, "span": traceSpan(w.span), "before": w.Before, "limit": tracesPerPage,
		"most": tracesSummed, "looked": lookedAt,
	})
	if err != nil {
		return nil, fmt.Errorf("list traces: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[tracedWork])
	if err != nil {
		return nil, fmt.Errorf("list traces: %w", err)
	}
	list, more := onPage(list, tracesPerPage)
	older := ""
	if more {
		older = v.at("before", list[len(list)-1].ExecutionID)
	}
	for i := range list {
		list[i].Summary = redact.Text(list[i].Summary, 1000)
	}
	return map[string]any{
		"Traces": list, "Older": older, "Newest": v.at("before", ""), "Wanted": w, "Most": int64(tracesSummed), "Window": int64(lookedAt),
		"Sampled": slices.ContainsFunc(list, func(w tracedWork) bool { return w.More }),
	}, nil
}

// Surfaces are those that the listing can be narrowed down to.
func (tracesWanted) Surfaces() []string { return surfaceNames() }

// States are those of a trace, which are its first run's.
func (tracesWanted) States() []string { return executionStatuses() }

// Ages are how far back it can go.
func (tracesWanted) Ages() []traceAge { return traceAges }

// Narrowed reports whether a filter is set.
func (w tracesWanted) Narrowed() bool {
	return w.Surface != "" || w.Status != "" || w.Agent != "" || w.Since != "" || w.Before != ""
}

// traceSpan is a duration for SQL: null for none.
func traceSpan(d time.Duration) any {
	if d == 0 {
		return nil
	}
	return d
}
