package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// maxWorkers bounds the processes on the page, and also the external workers.
	maxWorkers = 50
	// maxLocks bounds the locks of external workers to read.
	maxLocks = 2000
	// unseenAfter is the wait for an external worker after which the page reports that no worker claims the execution.
	unseenAfter = 15 * time.Second
)

// worker is a process, or an external worker with its locks.
type worker struct {
	ID, Name, Kind                string
	Flows                         []string
	StartedAt, SeenAt, LeaseUntil time.Time
	Live                          bool
	Running                       int64
}

// Count formats Running.
func (w worker) Count() string { return capped(w.Running, maxCount) }

// workers reads processes and external workers. A process has a valid lease, or a lease that ended in the last 10
// minutes before any sweep. An external worker has a lock or waits for one.
func (room *Room) workers(ctx context.Context, _ *pageRequest) (any, error) {
	processes, err := postgres.Rows[worker](ctx, room.Read, "list processes", `
		select w.id::text, left(w.name, 200) as name, w.kind, w.go_flows[1:200] as flows, w.started_at,
		       least(w.expires_at - make_interval(secs => w.ttl_seconds), clock_timestamp()) as seen_at,
		       w.expires_at as lease_until, w.expires_at > clock_timestamp() as live,
		       (select count(*) from (select from agent_executions x where x.claimed_by = w.id and x.claimed_by is not null
		         limit @counted + 1) c) as running
		  from (select * from agent_workers p
		         where p.kind = 'process' and p.expires_at > clock_timestamp() - interval '10 minutes'
		         order by p.expires_at desc limit @limit + 1) w
		 order by live desc, w.started_at desc, w.id`, customPlan, postgres.Strict{"limit": maxWorkers, "counted": maxCount})
	if err != nil {
		return nil, err
	}
	external, err := postgres.Rows[worker](ctx, room.Read, "list workers outside", `
		select '' as id, left(w.owner, 200) as name, 'outside' as kind,
		       (array_agg(distinct left(x.flow, 200)) filter (where x.flow is not null))[1:200] as flows,
		       min(w.started_at) as started_at,
		       least(max(w.expires_at - make_interval(secs => w.ttl_seconds)), clock_timestamp()) as seen_at,
		       max(w.expires_at) as lease_until, true as live, count(*) as running
		  from (select * from agent_workers p where p.kind = 'outside' and p.expires_at > clock_timestamp()
		         order by p.expires_at desc limit @locks) w
		  left join agent_executions x on x.id = w.execution_id
		 group by w.owner order by min(w.started_at) desc, w.owner limit @limit + 1`, customPlan,
		postgres.Strict{"limit": maxWorkers, "locks": maxLocks})
	if err != nil {
		return nil, err
	}
	idle, err := postgres.Rows[worker](ctx, room.Read, "list idle workers outside", `
		select '' as id, left(i.owner, 200) as name, 'outside' as kind, i.flows[1:200] as flows, i.since as started_at,
		       i.seen_at, i.expires_at as lease_until, true as live, 0::bigint as running
		  from agent_idle_workers i where i.expires_at > clock_timestamp() and not exists (
		    select from agent_workers w where w.kind = 'outside' and w.owner = i.owner and w.expires_at > clock_timestamp())
		 order by i.since desc, i.owner limit @limit + 1`, customPlan, postgres.Strict{"limit": maxWorkers})
	if err != nil {
		return nil, err
	}
	processes, more := firstN(processes, maxWorkers)
	external, moreOutside := firstN(append(external, idle...), maxWorkers)
	return map[string]any{"Workers": append(processes, external...), "More": more || moreOutside}, nil
}

// Builtin is the number of the worker's flows that only the program itself starts.
func (w worker) Builtin() int { return len(w.Flows) - len(w.Own()) }

// Own returns all other flows of the worker.
func (w worker) Own() []string {
	flows := make([]string, 0, len(w.Flows))
	for _, flow := range w.Flows {
		if !executions.IsReserved(flow) {
			flows = append(flows, flow)
		}
	}
	return flows
}

// Kinds of flows.
const (
	flowOfYAML   = "YAML"
	flowInGo     = "Go"
	flowExternal = "external"
	flowBuiltIn  = "built in"
)

// missingWorker reports that no process or external worker runs a flow.
type missingWorker struct {
	Flow, Kind string
	Seen       *time.Time // start of the newest execution that an external worker locked; nil for none
}

// missingWorkerOf reports a flow without a process or worker; nil if one exists.
func (room *Room) missingWorkerOf(ctx context.Context, flow string) (*missingWorker, error) {
	m := missingWorker{Flow: flow, Kind: flowInGo}
	if executions.IsExternal(flow) {
		m.Kind = flowExternal
		var live bool
		err := room.Read.QueryRow(ctx, `
			select exists (select from (
			         select p.execution_id from agent_workers p
			          where p.kind = 'outside' and p.expires_at > clock_timestamp()
			          order by p.expires_at desc limit @locks) w
			        join agent_executions x on x.id = w.execution_id where x.flow = @flow)
			       or exists (select from agent_idle_workers i
			                   where i.expires_at > clock_timestamp() and i.flows @> array[@flow::text]),
			       (select max(n.started_at) from (
			         select x.started_at from agent_executions x where x.flow = @flow and x.claimed_by is null
			          order by x.id desc limit @limit) n)`, customPlan,
			postgres.Strict{"flow": flow, "locks": maxLocks, "limit": maxCount}).Scan(&live, &m.Seen)
		if err != nil {
			return nil, fmt.Errorf("find a worker of flow %s: %w", flow, err)
		}
		return missingUnless(live, &m), nil
	}
	var isData, hasProcess, named bool
	err := room.Read.QueryRow(ctx, `
		select exists (select from agent_flows f where f.name = @flow and f.current), count(*) > 0,
		       coalesce(bool_or(w.go_flows @> array[@flow::text]), false)
		  from (select p.go_flows from agent_workers p where p.kind = 'process' and p.expires_at > clock_timestamp()
		         order by p.expires_at desc limit @limit) w`, customPlan,
		postgres.Strict{"flow": flow, "limit": maxCount}).Scan(&isData, &hasProcess, &named)
	if err != nil {
		return nil, fmt.Errorf("find a process of flow %s: %w", flow, err)
	}
	if isData {
		m.Kind = flowOfYAML
	}
	return missingUnless(named || isData && hasProcess, &m), nil
}

func missingUnless(live bool, m *missingWorker) *missingWorker {
	if live {
		return nil
	}
	return m
}
