package engineroom

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// maxBulk bounds the executions of a bulk action, like the API's bound.
const maxBulk = 200

// bulkAction is one action on several executions.
type bulkAction struct {
	Action, Label, About string
	IDs                  []string
	More                 bool // more than maxBulk executions match
}

// Count formats the number of executions.
func (b bulkAction) Count() string {
	switch {
	case b.More:
		return fmt.Sprintf("the newest %d", len(b.IDs))
	case len(b.IDs) == 1:
		return "this one"
	}
	return fmt.Sprintf("all %d", len(b.IDs))
}

// Lines are the ids, one a line.
func (b bulkAction) Lines() string { return strings.Join(b.IDs, "\n") }

func retryAction(ids []string) bulkAction {
	return bulkAction{
		Action: "retry", Label: "Retry", IDs: ids,
		About: "A new execution for each copies the recorded steps and repeats the failed part. " +
			"Executions retried before are left out.",
	}
}

// retryGroup returns the action on the failed executions of a group.
func retryGroup(ids []string) bulkAction {
	b := retryAction(ids)
	b.More = len(ids) == monitor.MaxRetry
	return b
}

// bulkActions offers to retry or cancel the matching executions. The page fixes their ids at its read. Without a filter
// the page offers no action.
func (room *Room) bulkActions(ctx context.Context, req *pageRequest) (any, error) {
	f, _ := req.Subject.(executionFilter)
	if f.View == "waiting" {
		f.View, f.Status = "", string(executions.Waiting)
	}
	if f.View != "" || f.Kind != "" || f.Sort != "" || !f.Narrowed() && f.Status == "" && !f.Failed {
		return nil, nil
	}
	f.Before = ""
	retry, cancel := retryAction(nil), bulkAction{
		Action: "cancel", Label: "Cancel",
		About: "Each ends at once: its claim is void, its lanes are free, and children that it waits for end with it.",
	}
	var offered []bulkAction
	for _, b := range []*bulkAction{&retry, &cancel} {
		args := f.args(maxRanked, maxBulk)
		delete(args, "by")
		delete(args, "searched_flow")
		args["retry"], args["unforkable"] = b.Action == "retry", slices.Collect(maps.Keys(room.Unforkable()))
		rows, err := room.Read.Query(ctx, `
			select w.id::text from (
			  (select x.* from unnest(array['failed', 'timeout', 'cancelled']) s (status) cross join lateral (
			    select `+candidateColumns+`
			     where @retry and x.status in ('failed', 'timeout', 'cancelled') and x.status = s.status
			       and x.id >= @from::uuid and x.id < @until::uuid order by x.id desc limit @searched) x)
			  union all
			  (select x.* from unnest(array['pending', 'running', 'waiting']) s (status) cross join lateral (
			    select `+candidateColumns+`
			     where not @retry and x.status in ('pending', 'running', 'waiting') and x.status = s.status
			       and x.id >= @from::uuid and x.id < @until::uuid order by x.id desc limit @searched) x)) w
			 where `+executionConditions+`
			   and (@traces::text[] is null or w.trace_id = any (@traces) or w.id = any (@ids::text[]::uuid[]))
			   and (not @retry or w.flow <> all (coalesce(@unforkable::text[], '{}'))
			        and not exists (select from agent_executions k where k.forked_from = w.id))
			 order by w.id desc limit @limit + 1`, customPlan, args)
		if b.IDs, err = postgres.Collect(rows, err, "find executions of a bulk action", pgx.RowTo[string]); err != nil {
			return nil, err
		}
		if b.IDs, b.More = firstN(b.IDs, maxBulk); len(b.IDs) > 0 {
			offered = append(offered, *b)
		}
	}
	return offered, nil
}
