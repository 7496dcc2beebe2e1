package engineroom

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	maxTreeDepth = 4   // levels below the execution of the page
	maxTreeWidth = 50  // children of one execution
	maxTree      = 100 // descendants in all
	maxForks     = 50
)

// relative is an execution of a family.
type relative struct {
	ID, Flow, Status string
	ParentID         *string
	CreatedAt        time.Time
	Level            int
	Here             bool        `db:"-"` // the execution of the page
	Children         []*relative `db:"-"`
}

// fork is an execution forked from this one.
type fork struct {
	ID, Status, From string
	CreatedAt        time.Time
}

// executionFamily has the relatives of an execution.
type executionFamily struct {
	Root  *relative // the first ancestor; nil without parent and children
	More  bool      // there are more than maxTree descendants
	Forks []fork
}

// executionRelatives reads the ancestors, descendants and forks.
func (room *Room) executionRelatives(ctx context.Context, req *pageRequest) (any, error) {
	id := req.Subject.(executionSubject).ID
	ancestors, err := room.ancestors(ctx, id)
	if err != nil {
		return nil, err
	}
	descendants, err := room.descendants(ctx, id)
	if err != nil {
		return nil, err
	}
	descendants, more := firstN(descendants, maxTree)
	family := executionFamily{More: more}
	if len(ancestors) > 1 || len(descendants) > 0 {
		family.Root = buildTree(ancestors, descendants, id)
	}
	family.Forks, err = room.forks(ctx, id)
	return family, err
}

// ancestors returns the execution and its ancestors, nearest first.
func (room *Room) ancestors(ctx context.Context, id string) ([]relative, error) {
	return postgres.Rows[relative](ctx, room.Read, "read the parents of the execution", `
		with recursive line (id, level) as (
		  select x.id, 0
		    from agent_executions x
		   where x.id = @id
		  union all
		  select p.id, l.level + 1
		    from line l
		    join agent_executions x on x.id = l.id
		    join agent_executions p on p.id = x.parent_id
		   where l.level < @deepest)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, l.level
		  from line l
		  join agent_executions x on x.id = l.id
		 order by l.level`, customPlan,
		postgres.Strict{"id": id, "deepest": executions.MaxDepth})
}

// descendants reads the descendants by level: at most maxTreeWidth children of each parent, and maxTree + 1 in all. The
// inner query reads the children in the order of the index on the parent, and bounds them before the order by id. With
// an order by id alone, the planner may scan the whole table by its primary key.
func (room *Room) descendants(ctx context.Context, id string) ([]relative, error) {
	return postgres.Rows[relative](ctx, room.Read, "read the children of the execution", `
		with recursive tree (id, level) as (
		  select @id::uuid, 0
		  union all
		  select c.id, t.level + 1
		    from tree t
		   cross join lateral (
		    select y.id
		      from (select x.id, x.parent_id
		              from agent_executions x
		             where x.parent_id >= t.id
		             order by x.parent_id limit @near) y
		     where y.parent_id = t.id
		     order by y.id limit @wide) c
		   where t.level < @deep)
		select x.id::text, left(x.flow, 100) as flow, x.status, x.parent_id::text, x.created_at, t.level
		  from (select id, level from tree limit @limit + 2) t
		  join agent_executions x on x.id = t.id
		 where t.level > 0
		 order by t.level, x.id`, customPlan,
		postgres.Strict{"id": id, "wide": maxTreeWidth, "near": 4 * maxTreeWidth, "deep": maxTreeDepth, "limit": maxTree})
}

// buildTree builds the tree of the ancestors and descendants, and returns its root.
func buildTree(ancestors, descendants []relative, id string) *relative {
	slices.Reverse(ancestors) // parents come before their children
	family := append(ancestors, descendants...)
	byID := map[string]*relative{}
	for i := range family {
		r := &family[i]
		r.Here = r.ID == id
		if r.ParentID != nil && byID[*r.ParentID] != nil {
			parent := byID[*r.ParentID]
			parent.Children = append(parent.Children, r)
		}
		byID[r.ID] = r
	}
	return &family[0]
}

// forks returns the executions forked from this one, newest first.
func (room *Room) forks(ctx context.Context, id string) ([]fork, error) {
	rows, err := room.Read.Query(ctx, `
		select x.id::text, x.status, left(coalesce(x.forked_step, ''), 600), x.created_at from (
		  select y.id, y.status, y.forked_step, y.created_at, y.forked_from from agent_executions y
		   where y.forked_from <= @id order by y.forked_from desc limit @near) x
		 where x.forked_from = @id order by x.id desc limit @limit`,
		customPlan, postgres.Strict{"id": id, "limit": maxForks, "near": 4 * maxForks})
	list, err := postgres.Collect(rows, err, "read the forks of the execution", pgx.RowToStructByPos[fork])
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].From = strings.TrimSpace(redact.Text(list[i].From, maxValue))
	}
	return list, nil
}
