package engineroom

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

const (
	// maxBulk bounds the executions of a bulk action. It equals the limit of POST /v1/executions/bulk.
	maxBulk = 200
	// maxBulkSearched bounds the executions of each status that a bulk action's filter is compared with.
	maxBulkSearched = 10_000
)

// bulkAction is one action on several executions.
type bulkAction struct {
	Action, Label, Description string
	IDs                        []string // the newest first
	Truncated                  bool     // IDs is full, so older executions may match too
	Partial                    bool     // the search reached maxBulkSearched, so older executions may match too
}

// CountLabel completes the button's label: "all 3", "this one", "the newest 200" or "the 3 found".
func (a bulkAction) CountLabel() string {
	switch {
	case a.Truncated:
		return fmt.Sprintf("the newest %d", len(a.IDs))
	case a.Partial:
		return fmt.Sprintf("the %d found", len(a.IDs))
	case len(a.IDs) == 1:
		return "this one"
	}
	return fmt.Sprintf("all %d", len(a.IDs))
}

// IDLines returns the ids, one per line.
func (a bulkAction) IDLines() string { return strings.Join(a.IDs, "\n") }

func retryAction(ids []string) bulkAction {
	return bulkAction{
		Action: "retry", Label: "Retry", IDs: ids,
		Description: "A new execution for each copies the recorded steps and repeats the failed part. " +
			"Executions retried before and children of failed executions are left out.",
	}
}

// retryGroup returns the action that retries the failed executions of a group of the overview ([monitor.Group.Retry]).
func retryGroup(ids []string) bulkAction {
	action := retryAction(ids)
	action.Truncated = len(ids) == monitor.MaxRetry
	return action
}

// bulkActions returns the retry and cancel actions on the executions that the filter matches. The form of an action
// carries the ids, so executions that match later are not affected.
func (room *Room) bulkActions(ctx context.Context, req *pageRequest) (any, error) {
	filter, _ := req.Subject.(executionFilter)
	if filter.View == "waiting" {
		filter.View, filter.Status = "", string(executions.Waiting)
	}
	if !filter.allowsBulk() {
		return nil, nil
	}
	filter.Before = ""
	retry, cancel := retryAction(nil), bulkAction{
		Action: "cancel", Label: "Cancel",
		Description: "Each ends at once: its claim is void, its lanes are free, and children that it waits for end with it.",
	}
	failed := []executions.Status{executions.Failed, executions.Timeout, executions.Cancelled}
	if err := room.findMatches(ctx, filter, &retry, failed); err != nil {
		return nil, err
	}
	open := []executions.Status{executions.Pending, executions.Running, executions.Waiting}
	if err := room.findMatches(ctx, filter, &cancel, open); err != nil {
		return nil, err
	}
	return slices.DeleteFunc([]bulkAction{retry, cancel}, func(a bulkAction) bool { return len(a.IDs) == 0 }), nil
}

// allowsBulk reports whether the page offers bulk actions: for a list in the order of time with a filter.
func (f executionFilter) allowsBulk() bool {
	hasFilter := f.Narrowed() || f.Status != "" || f.Failed
	return hasFilter && f.View == "" && f.Kind == "" && f.Sort == ""
}

// findMatches sets the newest executions of an action that the filter matches and that have one of the statuses. For
// the condition on any status, PostgreSQL uses the partial index of these statuses; it reads each status by itself, in
// the order of ids. A retry omits children of failed executions, because the retry of the parent starts them again.
func (room *Room) findMatches(
	ctx context.Context, filter executionFilter, action *bulkAction, statuses []executions.Status,
) error {
	args := filter.args(maxBulkSearched, maxBulk)
	for _, unused := range []string{"by", "searched_flow"} { // postgres.Strict refuses them
		delete(args, unused)
	}
	args["statuses"], args["retry"] = statuses, action.Action == "retry"
	args["unforkable"] = slices.Collect(maps.Keys(room.Unforkable()))
	rows, err := room.Read.Query(ctx, `
		with found as materialized (
		  select x.* from unnest(@statuses::text[]) s (status) cross join lateral (
		    select x.parent_id, `+candidateColumns+`
		     where x.status = any (@statuses) and x.status = s.status
		       and x.id >= @from::uuid and x.id < @until::uuid order by x.id desc limit @searched) x)
		select w.id::text, exists (select from found f group by f.status having count(*) = @searched)
		  from found w
		 where `+executionConditions+`
		   and (@traces::text[] is null or w.trace_id = any (@traces) or w.id = any (@ids::text[]::uuid[]))
		   and (not @retry or w.flow <> all (coalesce(@unforkable::text[], '{}'))
		        and not exists (select from agent_executions k where k.forked_from = w.id)
		        and not exists (
		          select from agent_executions p where p.id = w.parent_id and p.status in ('failed', 'timeout')))
		 order by w.id desc limit @limit + 1`, customPlan, args)
	type match struct {
		ID      string
		Partial bool
	}
	matches, err := postgres.Collect(rows, err, "find executions of a bulk action", pgx.RowToStructByPos[match])
	if err != nil {
		return err
	}
	matches, action.Truncated = firstN(matches, maxBulk)
	for _, m := range matches {
		action.IDs, action.Partial = append(action.IDs, m.ID), m.Partial
	}
	if action.Partial {
		action.Description += fmt.Sprintf(" The newest %s executions of each state were searched.",
			human.Count(maxBulkSearched))
	}
	return nil
}
