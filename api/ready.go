package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// probeLimit is how long the database may take to answer a probe.
const probeLimit = time.Second

// health is all that /healthz says.
type health struct {
	Status string `json:"status"` // ok
}

// readiness says what each check found.
type readiness struct {
	Status string           `json:"status"` // ready or unready
	Checks map[string]check `json:"checks"` // database, schema, worker, draining
}

// check is one thing that has to be so for this process to do work.
type check struct {
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

func (s *server) healthz(request) (answer, error) {
	return answer{body: health{"ok"}}, nil
}

func (s *server) readyz(r request) (answer, error) {
	worker, draining := s.worker()
	if s.leaving() {
		draining = check{false, "this process is being stopped"}
	}
	got := readiness{"ready", map[string]check{"worker": worker, "draining": draining}}
	got.Checks["database"], got.Checks["schema"] = s.database(r.Context())
	for _, c := range got.Checks {
		if !c.OK {
			got.Status = "unready"
			return answer{status: http.StatusServiceUnavailable, body: got}, nil
		}
	}
	return answer{body: got}, nil
}

// leaving reports that this process was told to stop.
func (s *server) leaving() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

// database asks the database and looks at its schema. A probe is public, so the cause of an outage, which
// names hosts and users, goes to the log.
func (s *server) database(ctx context.Context) (database, schema check) {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	unknown := check{false, "not known while the database does not answer"}
	away := func(err error) check {
		s.log.WarnContext(ctx, "not ready: the database does not answer", "error", err)
		return check{false, "no answer within " + probeLimit.String()}
	}
	if err := s.pool.Ping(ctx); err != nil {
		return away(err), unknown
	}
	err := migrations.Check(ctx, s.pool)
	if errors.Is(err, migrations.ErrNewer) { // it came while this process served: an expansion, which it does not notice
		return check{true, "answers"}, check{true, "of a newer version: replace this process by one of that version"}
	}
	for _, known := range []error{migrations.ErrOutdated, migrations.ErrChanged} {
		if errors.Is(err, known) {
			return check{true, "answers"}, check{false, err.Error()}
		}
	}
	if err != nil {
		return away(err), unknown
	}
	return check{true, "answers"}, check{true, "as this version needs it"}
}

// worker says whether the engine runs and whether it is shutting down. The engine reports both as one
// error; that of a shutdown is the only one that is a way to end runs and not the loss of the lease.
func (s *server) worker() (worker, draining check) {
	err := s.engine.Live()
	switch {
	case err == nil:
		return check{true, "its lease is live"}, check{true, "no"}
	case executions.IsControl(err) && !errors.Is(err, executions.ErrLost):
		return check{false, "takes no more work"}, check{false, err.Error()}
	}
	return check{false, err.Error()}, check{true, "no"}
}
