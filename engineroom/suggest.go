package engineroom

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// maxSuggested bounds the cached values of a filter.
	maxSuggested = 300
	// maxSuggestedLength bounds the characters of a suggestion of distinctColumns. A longer value is not suggested.
	maxSuggestedLength = 200
	// maxSuggestedCount bounds the count beside a suggestion.
	maxSuggestedCount = 100
	// suggestionTTL is the cache time of suggestions.
	suggestionTTL = 15 * time.Second
	// maxNamesLike bounds the values that a filter by a part of a name expands to. Further matches are ignored, and the
	// chip of the filter says so.
	maxNamesLike = 20
)

// suggestion is a value that a filter can have.
type suggestion struct {
	Value string
	Count string // number of rows with the value, or of recent calls of a skill; empty if no index counts them
}

// distinctSQL lists the values of a column with one index lookup each (a loose index scan). It counts the rows of each
// value up to a bound. Its arguments are the column, the table and the predicate of a partial index whose first
// column it is.
const distinctSQL = `
	with recursive v (value) as (
	  (select x.%[1]s from %[2]s x where %[3]s order by x.%[1]s limit 1)
	  union all
	  select (select x.%[1]s from %[2]s x where %[3]s and x.%[1]s > v.value order by x.%[1]s limit 1) from v
	   where v.value is not null)
	select v.value, (
	         select count(*) filter (where c.value = v.value) from (
	           select x.%[1]s as value from %[2]s x where %[3]s and x.%[1]s >= v.value
	            order by x.%[1]s limit @counted + 1) c) as count
	  from (select * from v where v.value is not null limit @limit) v
	 where length(v.value) <= @longest`

// distinctColumns maps a kind of filter to the arguments of distinctSQL.
var distinctColumns = map[string][3]string{
	"flow":     {"flow", "agent_executions", "x.claimed_by is null"},
	"owner":    {"owner", "agent_threads", "true"},
	"category": {"category", "agent_memory", "true"},
	"endpoint": {"endpoint", "agent_webhook_deliveries", "true"},
}

// suggested returns the first maxSuggested values that a filter can have, at most suggestionTTL old.
func (room *Room) suggested(ctx context.Context, kind string) ([]suggestion, error) {
	return room.suggestionCache.read(kind, suggestionTTL, func() ([]suggestion, error) {
		return room.readSuggestions(ctx, kind)
	})
}

// readSuggestions reads the first maxSuggested values of a kind of filter from the database.
func (room *Room) readSuggestions(ctx context.Context, kind string) ([]suggestion, error) {
	var list []suggestion
	switch kind {
	case "agent":
		all, err := room.Agents.List(ctx, room.Read)
		for _, a := range all[:min(len(all), maxSuggested)] {
			list = append(list, suggestion{Value: a.Name})
		}
		return list, err
	case "skill":
		sums, err := activity.CountedHealth(ctx, room.Read, activity.HealthFilter{})
		for _, h := range sums.Lines[:min(len(sums.Lines), maxSuggested)] {
			list = append(list, suggestion{h.Skill, human.Count(h.Calls) + " in 7 days"})
		}
		return list, err
	case "target":
		return postgres.Rows[suggestion](ctx, room.Read, "suggest targets", `
			select t.name as value, '' as count from agent_webhook_targets t order by t.name limit @limit`,
			postgres.Strict{"limit": maxSuggested})
	case "lane":
		return postgres.Rows[suggestion](ctx, room.Read, "suggest lanes", `
			select l.lane as value, '' as count from agent_locks l order by l.lane limit @limit`,
			postgres.Strict{"limit": maxSuggested})
	}
	source, ok := distinctColumns[kind]
	if !ok {
		return nil, fmt.Errorf("no suggestions of kind %q", kind)
	}
	type counted struct {
		Value string
		Count int64
	}
	rows, err := postgres.Rows[counted](ctx, room.Read, "suggest values",
		fmt.Sprintf(distinctSQL, source[0], source[1], source[2]), customPlan,
		postgres.Strict{"limit": maxSuggested, "longest": maxSuggestedLength, "counted": maxSuggestedCount})
	for _, r := range rows {
		if r.Value != "" {
			list = append(list, suggestion{r.Value, capped(r.Count, maxSuggestedCount)})
		}
	}
	return list, err
}

// namesLike returns the names of a kind that contain a text, ignoring case, for the request's filter of that name. If a
// name equals the text, namesLike returns only that name. It searches only the suggested names, and returns only the
// first maxNamesLike matches; it records in the request that there are more. Without a match it returns the text, which
// can be the full name of a value that is not among the suggestions.
func (room *Room) namesLike(ctx context.Context, req *pageRequest, kind, text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	all, err := room.suggested(ctx, kind)
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, s := range all {
		if s.Value == text {
			return []string{text}, nil
		}
		if strings.Contains(strings.ToLower(s.Value), strings.ToLower(text)) {
			names = append(names, s.Value)
		}
	}
	if len(names) == 0 {
		return []string{text}, nil
	}
	names, more := firstN(names, maxNamesLike)
	if more {
		req.cappedFilters = append(req.cappedFilters, kind)
	}
	return names, nil
}
