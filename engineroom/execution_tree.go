package engineroom

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	treeDeep = 4   // levels below an execution
	treeWide = 50  // children of each
	treeMost = 100 // in all
	forksMax = 50
)

// relative is an execution of a family.
type relative struct {
	ID, Flow, Status string
	ParentID         *string
	CreatedAt        time.Time
	Level            int
	Here             bool // the one that the page is about
	Children         []*relative
}

// fork is an execution that began with what this one had recorded.
type fork struct {
	ID, Status, From string
	CreatedAt        time.Time
}

// executionFamily is where an execution stands.
type executionFamily struct {
	Root  *relative // the first ancestor; nil for one that has neither a parent nor children
	More  bool
	Forks []fork
}

// executionRelatives reads the ancestors, what was started below, and the forks.
func (room *Room) executionRelatives(ctx context.Context, v *visit) (any, error) {
	id := v.About.(executionVisit).ID
	above, err := room.ancestors(ctx, id)
	if err != nil {
		return nil, err
	}
	below, err := room.descendants(ctx, id)
	if err != nil {
		return nil, err
	}
	below, more := onPage(below, treeMost)
	family := executionFamily{More: more}
	if len(above) > 1 || len(below) > 0 {
		family.Root = treeOf(above, below, id)
	}
	family.Forks, err = room.forks(ctx, id)
	return family, err
}

// ancestors are the execution and what is above it, the nearest first.
func (room *Room) ancestors(ctx context.Context, id string) ([]relative, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive line (id, level) as (
		  select x.id, 0 from agent_executions x where x.id = @id
		  union all
		  select p.id, l.level + 1 from line l join agent_executions x on x.id = l.id
		    join agent_executions p on p.id = x.parent_id where l.level < @deepest)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, l.level
		  from line l join agent_executions x on x.id = l.id order by l.level`, freshPlan,
		postgres.Strict{"id": id, "deepest": executions.Deepest})
	if err != nil {
		return nil, fmt.Errorf("read the parents of the execution: %w", err)
	}
	list, err := collectRelatives(rows)
	if err != nil {
		return nil, fmt.Errorf("read the parents of the execution: %w", err)
	}
	return list, nil
}

// descendants are what it has started, level by level: about the oldest treeWide of each, treeMost and one more in all. They
// are read in the order of the index on the parent, some way on: with a condition on the parent and the order of the ids the
// planner may walk through the whole table by id.
func (room *Room) descendants(ctx context.Context, id string) ([]relative, error) {
	rows, err := room.Read.Query(ctx, `
		with recursive tree (id, level) as (
		  select @id::uuid, 0
		  union all
		  select c.id, t.level + 1 from tree t cross join lateral (
		    select y.id from (select x.id, x.parent_id from agent_executions x where x.parent_id >= t.id order by x.parent_id limit @near) y
		     where y.parent_id = t.id order by y.id limit @wide) c
		   where t.level < @deep)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, t.level
		  from (select id, level from tree limit @most + 2) t join agent_executions x on x.id = t.id
		 where t.level > 0 order by t.level, x.id`, freshPlan,
		postgres.Strict{"id": id, "wide": treeWide, "near": 4 * treeWide, "deep": treeDeep, "most": treeMost})
	if err != nil {
		return nil, fmt.Errorf("read the children of the execution: %w", err)
	}
	list, err := collectRelatives(rows)
	if err != nil {
		return nil, fmt.Errorf("read the children of the execution: %w", err)
	}
	return list, nil
}

func collectRelatives(rows pgx.Rows) ([]relative, error) {
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (r relative, err error) {
		return r, row.Scan(&r.ID, &r.Flow, &r.Status, &r.ParentID, &r.CreatedAt, &r.Level)
	})
}

// treeOf puts a family together, from the first ancestor down.
func treeOf(above, below []relative, id string) *relative {
	known := map[string]*relative{}
	var root *relative
	slices.Reverse(above)
	all := append(above, below...)
	for i := range all {
		r := &all[i]
		r.Here = r.ID == id
		known[r.ID] = r
		if root == nil {
			root = r
		} else if r.ParentID != nil && known[*r.ParentID] != nil {
			known[*r.ParentID].Children = append(known[*r.ParentID].Children, r)
		}
	}
	return root
}

// forks are the executions that began with what this one had recorded, newest first.
func (room *Room) forks(ctx context.Context, id string) ([]fork, error) {
	rows, err := room.Read.Query(ctx, `
		select x.id::text, x.status, left(coalesce(x.forked_step, ''), 600), x.created_at from (
		  select y.id, y.status, y.forked_step, y.created_at, y.forked_from from agent_executions y
		   where y.forked_from <= @id order by y.forked_from desc limit @near) x
		 where x.forked_from = @id order by x.id desc limit @most`, freshPlan, postgres.Strict{"id": id, "most": forksMax, "near": 4 * forksMax})
	if err != nil {
		return nil, fmt.Errorf("read the forks of the execution: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fork])
	if err != nil {
		return nil, fmt.Errorf("read the forks of the execution: %w", err)
	}
	for i := range list {
		list[i].From = strings.TrimSpace(redact.Text(list[i].From, maxValue))
	}
	return list, nil
}
