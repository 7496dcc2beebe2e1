package why_test

import (
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// crowd lets two executions of other traces wait for one event, which a third raises, in one of the ways in which a process does.
func (s *scenario) crowd() bool {
	by := s.some(working)
	if by == nil {
		return false
	}
	e := &event{name: "EVENT_COMPLETED", key: s.name("crowd"), by: by.ref(), trace: by.trace}
	var waiting []*run
	for range 2 {
		r := s.start(executions.Spec{Flow: "waits", Surface: trace.Flow}, nil, cause{"outside", "outside", ""})
		s.claimed(r)
		s.want(r, s.park(r, "event", e.key), true)
		waiting = append(waiting, r)
	}
	if s.rng.IntN(2) == 0 {
		e.id = value[string](s.world, `
			with by as materialized (select set_config('lanekeeper.raised_by', $2, true) as raiser)
			select event_id::text from by cross join lateral lanekeeper.deliver_agent_event('EVENT_COMPLETED', case when by.raiser is not null then $1 end)`, e.key, e.by)
	} else {
		ctx := trace.With(s.ctx(), trace.Span{TraceID: trace.ID(by.trace), ExecutionID: by.id})
		s.tx(func(tx pgx.Tx) error {
			got, err := s.engine.Deliver(ctx, postgres.Beginner(tx), e.name, e.key, nil, "")
			e.id = got.EventID
			return err
		})
	}
	s.events = append(s.events, e)
	s.causes[e.ref()] = cause{"raised", e.by, e.trace}
	for _, r := range waiting {
		s.resumed(r, e, "waited", e.ref())
	}
	s.started(e)
	return true
}
