package api

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// probeLimit bounds a probe.
const probeLimit = time.Second

// After a refused write, probes try to write probeWriteSize bytes every probeWriteInterval.
const (
	probeWriteInterval = 2 * time.Second
	probeWriteSize     = 256 << 10
)

type health struct {
	Status string `json:"status" doc:"ok"`
}

type readiness struct {
	Status string           `json:"status" doc:"ready or unready"`
	Checks map[string]check `json:"checks" doc:"database, schema, writes, worker, draining"`
}

// check is one condition of readiness.
type check struct {
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// unknown is the result of a check that needs the database.
var unknown = check{false, "unknown while the database does not answer"}

func (s *server) healthz(request) (response, error) {
	return response{body: health{"ok"}}, nil
}

func (s *server) readyz(r request) (response, error) {
	result := s.prober.run(r.Context(), s.probe)
	if result.Status != "ready" {
		return response{status: http.StatusServiceUnavailable, body: result}, nil
	}
	return response{body: result}, nil
}

// prober shares one probe among concurrent callers, because probes are public.
type prober struct {
	flight singleflight.Group

	// Only the running probe uses these.
	lastWrite time.Time // the last successful probe write
	lastTry   time.Time // the last probe write
}

// run returns the result of the running probe, or starts one.
func (p *prober) run(ctx context.Context, probe func(context.Context) readiness) readiness {
	result, _, _ := p.flight.Do("", func() (any, error) { return probe(context.WithoutCancel(ctx)), nil })
	return result.(readiness)
}

// probe runs all checks within probeLimit. One failed check makes the process unready.
func (s *server) probe(ctx context.Context) readiness {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	worker, draining := s.checkWorker()
	if s.isDraining() {
		draining = check{false, "this process is shutting down"}
	}
	result := readiness{"ready", map[string]check{"worker": worker, "draining": draining}}
	result.Checks["database"], result.Checks["schema"] = s.checkDatabase(ctx)
	result.Checks["writes"] = unknown
	if result.Checks["schema"] != unknown {
		result.Checks["writes"] = s.checkWrites(ctx)
	}
	for _, c := range result.Checks {
		if !c.OK {
			result.Status = "unready"
		}
	}
	return result
}

// checkWrites reports whether the database accepts writes. It costs nothing until a statement of this process fails
// because of a full disk, a read-only database or exhausted transaction ids. From then on it sometimes tries a large
// write and rolls it back.
func (s *server) checkWrites(ctx context.Context) check {
	accepted := check{true, "accepted"}
	at, refused := postgres.LastRefusal(s.ready)
	if refused == nil || at.Before(s.prober.lastWrite) {
		return accepted
	}
	began := time.Now()
	if began.Sub(s.prober.lastTry) >= probeWriteInterval {
		s.prober.lastTry = began
		err := TryWrite(ctx, s.ready)
		if err == nil {
			s.prober.lastWrite = began
			return accepted
		}
		if what, _ := postgres.Diagnose(err); what != "" {
			refused = err
		}
	}
	what, _ := postgres.Diagnose(refused)
	return check{false, what}
}

var errRollback = errors.New("rolled back")

// TryWrite writes more than the free space of a table usually holds, and rolls back.
func TryWrite(ctx context.Context, db postgres.Beginner) error {
	body := make([]byte, probeWriteSize)
	rand.Read(body) // never fails; random data does not compress
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_idempotency (scope, key, fingerprint, lease_until, body, expires_at)
			values ('GET /readyz', gen_random_uuid()::text, '', clock_timestamp(), @body, clock_timestamp())`,
			postgres.Strict{"body": body})
		return cmp.Or(err, errRollback)
	})
	if errors.Is(err, errRollback) {
		return nil
	}
	return err
}

func (s *server) isDraining() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

// checkDatabase pings the database and checks its schema. Probes are public, so causes with hosts and users go to the
// log only.
func (s *server) checkDatabase(ctx context.Context) (database, schema check) {
	unreachable := func(err error) check {
		s.notReady.Log(context.WithoutCancel(ctx), s.log, "not ready: the database does not answer", err)
		return check{false, "no answer within " + probeLimit.String()}
	}
	if err := s.ready.Ping(ctx); err != nil {
		return unreachable(err), unknown
	}
	answers := s.checkConnections(ctx)
	err := migrations.Check(ctx, s.ready)
	if errors.Is(err, migrations.ErrNewer) { // an expansion migrated while this process served
		return answers, check{true, "newer than this process; upgrade this process"}
	}
	for _, known := range []error{migrations.ErrOutdated, migrations.ErrOld, migrations.ErrChanged} {
		if errors.Is(err, known) {
			return answers, check{false, err.Error()}
		}
	}
	if err != nil {
		return unreachable(err), unknown
	}
	s.notReady.Log(ctx, s.log, "not ready: the database does not answer", nil)
	return answers, check{true, "current"}
}

// checkConnections reports whether the server accepts another connection, if the next request needs one.
func (s *server) checkConnections(ctx context.Context) check {
	if now := s.pool.Stat(); now.IdleConns() == 0 && now.TotalConns() < now.MaxConns() {
		if err := s.pool.Ping(ctx); postgres.IsCode(err, "53300") { // too_many_connections
			what, _ := postgres.Diagnose(err)
			return check{false, what}
		}
	}
	return check{true, "answers"}
}

// checkWorker reports whether the engine runs and whether it is shutting down. The engine reports both as one error.
// Only the error of a shutdown is a control error other than ErrLost.
func (s *server) checkWorker() (worker, draining check) {
	err := s.engine.Live()
	switch {
	case err == nil:
		return check{true, "lease is live"}, check{true, "no"}
	case executions.IsControl(err) && !errors.Is(err, executions.ErrLost):
		return check{false, "accepts no work"}, check{false, err.Error()}
	}
	return check{false, err.Error()}, check{true, "no"}
}
