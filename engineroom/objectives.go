package engineroom

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/objectives"
)

const (
	maxSteps        = 200
	maxEvidence     = 500
	objectivesShown = 50
)

// objectiveRow is an objective in a list. An active objective is stale three days after its due time, if it and its
// steps have not changed for three days.
type objectiveRow struct {
	ID, Name, Goal, Status, Source, ProposedBy, Note string
	SuccessCriteria, DecidedBy, DecidedReason        string
	Priority, Round, Revision, IdleRuns              int
	Review                                           int64 // seconds between rounds; 0 for none
	DueAt, TouchedAt, CreatedAt                      time.Time
	DecidedAt                                        *time.Time
	LastTrace, ProposedTrace                         string
	Total, Done, Failed, Pending                     int64
	Stale                                            bool
}

// Bar returns the widths of done and failed in a bar of 100.
func (o objectiveRow) Bar() (b struct{ Done, Failed int64 }) {
	if o.Total > 0 {
		b.Done, b.Failed = o.Done*100/o.Total, o.Failed*100/o.Total
	}
	return b
}

// objectiveColumns selects an objectiveRow. LastTrace is the trace of the latest change of the objective or of a step.
const objectiveColumns = `
		select o.id::text, o.name, left(o.goal, 4000) as goal, o.status, left(o.source, 100) as source,
		       left(o.proposed_by, 100) as proposed_by, left(o.note, 4000) as note,
		       left(o.success_criteria, 4000) as success_criteria, left(o.decided_by, 100) as decided_by,
		       left(o.decided_reason, 1000) as decided_reason, o.priority, o.round, o.revision, o.idle_runs,
		       coalesce(extract(epoch from o.review_every), 0)::bigint as review, o.due_at,
		       greatest(o.updated_at, p.touched_at) as touched_at, o.created_at, o.decided_at,
		       left(case when p.touched_at > o.updated_at and p.trace_id <> '' then p.trace_id
		                 else coalesce(nullif(o.last_trace_id, ''), p.trace_id, '') end, 300) as last_trace,
		       left(o.proposed_trace, 300) as proposed_trace, p.total, p.done, p.failed, p.pending,
		       o.status = 'active' and o.due_at < clock_timestamp() - interval '3 days'
		         and greatest(o.updated_at, p.touched_at) < clock_timestamp() - interval '3 days' as stale
		  from agent_objectives o, lateral (
		       select count(*) filter (where s.status <> 'skipped') as total,
		              count(*) filter (where s.status = 'done') as done,
		              count(*) filter (where s.status = 'failed') as failed,
		              count(*) filter (where s.status = 'pending') as pending, max(s.updated_at) as touched_at,
		              (array_agg(s.trace_id order by s.updated_at desc))[1] as trace_id
		         from agent_objective_steps s where s.objective_id = o.id) p`

// activeObjectives reads the active objectives by priority.
func (room *Room) activeObjectives(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[objectiveRow](ctx, room.Read, "list objectives", objectiveColumns+`
		 where o.status = 'active' order by o.priority, o.due_at,
		   o.id limit @limit::int + 1`, postgres.Strict{"limit": maxOverviewObjectives})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxOverviewObjectives)
	all := int64(len(list))
	if more {
		err = room.Read.QueryRow(ctx, `select count(*) from (
			select from agent_objectives o where o.status = 'active' limit @count_limit) x`,
			postgres.Strict{"count_limit": countLimit}).Scan(&all)
	}
	return map[string]any{"Objectives": list, "More": more, "All": all}, err
}

// objectivesPage lists the objectives.
func (room *Room) objectivesPage() page {
	return page{
		path: "/objectives", name: "objectives", navLabel: "Objectives", title: "Objectives", open: openObjectives,
		parts: []part{
			room.filtersPart("/objectives"),
			{name: "list", interval: 3 * time.Second, load: room.listObjectives},
		},
	}
}

// objectiveFilter holds the filters.
type objectiveFilter struct {
	Status, Name, Before string
	States               []string
}

func openObjectives(_ context.Context, req *pageRequest) (string, error) {
	filter := objectiveFilter{States: objectives.Statuses()}
	var err error
	if filter.Status, err = req.oneOf("status", append([]string{""}, objectives.Statuses()...)...); err != nil {
		return "", err
	}
	if filter.Name, err = req.textFilter("name"); err != nil {
		return "", err
	}
	if filter.Before, err = req.uuidFilter("before"); err != nil {
		return "", err
	}
	req.Subject = filter
	return "", nil
}

func (room *Room) listObjectives(ctx context.Context, req *pageRequest) (any, error) {
	filter := req.Subject.(objectiveFilter)
	list, err := postgres.Rows[objectiveRow](ctx, room.Read, "list objectives", objectiveColumns+`
		 where (@status::text = '' or o.status = @status)
		   and (@name::text = '' or o.name ilike @name or left(o.goal, 4000) ilike @name)
		   and (@before::text = '' or o.id < nullif(@before, '')::uuid)
		 order by o.id desc limit @limit::int + 1`,
		customPlan, postgres.Strict{
			"status": filter.Status, "name": containsPattern(filter.Name), "before": filter.Before,
			"limit": objectivesShown,
		})
	if err != nil {
		return nil, err
	}
	list, links := paginate(req, list, objectivesShown, func(o objectiveRow) string { return o.ID })
	return map[string]any{"Asked": filter, "Objectives": list, "Links": links}, nil
}

// objectivePage shows one objective.
func (room *Room) objectivePage() page {
	return page{
		path: "/objectives/{name}", name: "objective", title: "Objective", open: room.openObjective,
		parts: []part{
			{name: "progress", interval: 3 * time.Second, load: room.progress},
			{name: "steps", interval: 3 * time.Second, load: room.objectiveSteps},
			{name: "traces", interval: 10 * time.Second, refreshOnActivity: true, load: room.objectiveTraces},
		},
	}
}

// openObjective finds the objective by name or id.
func (room *Room) openObjective(ctx context.Context, req *pageRequest) (string, error) {
	key := req.path("name")
	if strings.ContainsRune(key, 0) {
		return "", objectives.ErrNotFound
	}
	var id, name string
	err := room.Read.QueryRow(ctx, `
		select o.id::text, o.name from agent_objectives o where o.name = @key or o.id = lanekeeper.agent_uuid(@key)
		 order by o.name = @key desc limit 1`, postgres.Strict{"key": key}).Scan(&id, &name)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", notFound("there is no objective %.60q", key)
	}
	if err != nil {
		return "", fmt.Errorf("find objective: %w", err)
	}
	req.Subject = id
	return cut(80, name), nil
}

func (room *Room) progress(ctx context.Context, req *pageRequest) (any, error) {
	return postgres.RowOr[objectiveRow](ctx, room.Read, notFound("%s", objectives.ErrNotFound), "read objective",
		objectiveColumns+` where o.id = @id`, postgres.Strict{"id": req.Subject})
}

// stepRow is a step with its evidence.
type stepRow struct {
	ID, Title, Status, Result, TraceID string
	Position, Attempts                 int
	UpdatedAt                          time.Time
	Evidence                           []evidenceRow `db:"-"`
}

// evidenceRow is the evidence of a step.
type evidenceRow struct {
	StepID, SkillName, TraceID, GivenBy, Reason string
	ActivityID                                  *string
	CreatedAt                                   time.Time
}

// objectiveSteps reads the steps and this round's evidence.
func (room *Room) objectiveSteps(ctx context.Context, req *pageRequest) (any, error) {
	steps, err := postgres.Rows[stepRow](ctx, room.Read, "list steps", `
		select s.id::text, left(s.title, 500) as title, s.status, left(s.result, 4000) as result,
		       left(s.trace_id, 300) as trace_id, s.position, s.attempts, s.updated_at
		  from agent_objective_steps s where s.objective_id = @id order by s.position limit @limit::int + 1`,
		postgres.Strict{"id": req.Subject, "limit": maxSteps})
	if err != nil {
		return nil, err
	}
	evidence, err := postgres.Rows[evidenceRow](ctx, room.Read, "list evidence", `
		select e.step_id::text, left(e.skill_name, 200) as skill_name, left(e.trace_id, 300) as trace_id,
		       left(e.given_by, 100) as given_by, left(e.reason, 1000) as reason, e.activity_id::text, e.created_at
		  from agent_objective_steps s
		  cross join lateral (select * from agent_objective_evidence x
		    where x.step_id = s.id and x.created_at >= s.started_at order by x.created_at limit 10) e
		 where s.objective_id = @id order by s.position,
		   e.id limit @limit`, postgres.Strict{"id": req.Subject, "limit": maxEvidence})
	if err != nil {
		return nil, err
	}
	steps, more := firstN(steps, maxSteps)
	for i := range steps {
		for _, e := range evidence {
			if e.StepID == steps[i].ID {
				steps[i].Evidence = append(steps[i].Evidence, e)
			}
		}
	}
	return map[string]any{"Steps": steps, "More": more}, nil
}

// objectiveTraces reads the traces that worked on the objective, latest first.
func (room *Room) objectiveTraces(ctx context.Context, req *pageRequest) (any, error) {
	type touched struct {
		TraceID string
		At      time.Time
		Did     []string
	}
	list, err := postgres.Rows[touched](ctx, room.Read, "list traces of an objective", `
		select left(x.trace_id, 300) as trace_id, max(x.at) as at, array_agg(distinct x.did order by x.did) as did
		  from (select o.last_trace_id, o.updated_at, 'worked on it last' from agent_objectives o where o.id = @id
		        union all select o.proposed_trace, o.created_at, 'proposed it' from agent_objectives o where o.id = @id
		        union all
		        (select s.trace_id, s.updated_at, 'worked on a step' from agent_objective_steps s where s.objective_id = @id
		          order by s.updated_at desc limit @limit)
		        union all
		        (select e.trace_id, e.created_at, 'gave evidence' from agent_objective_steps s
		           join agent_objective_evidence e on e.step_id = s.id where s.objective_id = @id
		             order by e.created_at desc limit @limit)
		       ) x (trace_id, at, did)
		 where x.trace_id <> '' group by x.trace_id order by max(x.at) desc limit 50`,
		postgres.Strict{"id": req.Subject, "limit": maxEvidence})
	return map[string]any{"Traces": list}, err
}
