package api

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// probeLimit is how long the database may take to answer a probe.
const probeLimit = time.Second

// writePause is how long after a write that was tried the next one is, and writeTried how large it is in bytes.
const (
	writePause = 2 * time.Second
	writeTried = 256 << 10
)

// health is all that /healthz says.
type health struct {
	Status string `json:"status"` // ok
}

// readiness says what each check found.
type readiness struct {
	Status string           `json:"status"` // ready or unready
	Checks map[string]check `json:"checks"` // database, schema, writes, worker, draining
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
	got := s.prober.ask(r.Context(), s.probe)
	if got.Status != "ready" {
		return answer{status: http.StatusServiceUnavailable, body: got}, nil
	}
	return answer{body: got}, nil
}

// prober lets everybody who asks at the same time have the answer of one probe: probes are public.
type prober struct {
	mu      sync.Mutex
	running *probing

	// Of the probe that runs.
	writable time.Time // when the database last took a large write after a refusal
	tried    time.Time
}

type probing struct {
	done chan struct{}
	got  readiness
}

// ask returns what a probe finds that runs already, or that it runs.
func (p *prober) ask(ctx context.Context, probe func(context.Context) readiness) readiness {
	p.mu.Lock()
	running := p.running
	if running != nil {
		p.mu.Unlock()
		<-running.done // within probeLimit
		return running.got
	}
	running = &probing{done: make(chan struct{})}
	p.running = running
	p.mu.Unlock()
	running.got = probe(context.WithoutCancel(ctx))
	p.mu.Lock()
	p.running = nil
	p.mu.Unlock()
	close(running.done)
	return running.got
}

// probe makes all checks.
func (s *server) probe(ctx context.Context) readiness {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	worker, draining := s.worker()
	if s.leaving() {
		draining = check{false, "this process is being stopped"}
	}
	got := readiness{"ready", map[string]check{"worker": worker, "draining": draining}}
	got.Checks["database"], got.Checks["schema"] = s.database(ctx)
	got.Checks["writes"] = s.writes(ctx)
	for _, c := range got.Checks {
		if !c.OK {
			got.Status = "unready"
		}
	}
	return got
}

// writes says whether the database takes what is written. It costs nothing until a statement of this process was
// refused because the disk is full or the database read-only; from then on a large write is tried now and then, and
// taken back.
func (s *server) writes(ctx context.Context) check {
	taken := check{true, "are taken"}
	at, refused := postgres.LastRefusal(s.ready)
	if refused == nil || at.Before(s.prober.writable) {
		return taken
	}
	began := time.Now()
	if began.Sub(s.prober.tried) >= writePause {
		s.prober.tried = began
		err := s.tryWrite(ctx)
		if err == nil {
			s.prober.writable = began
			return taken
		}
		if what, _ := postgres.Trouble(err); what != "" {
			refused = err
		}
	}
	what, _ := postgres.Trouble(refused)
	return check{false, what}
}

// errTakenBack ends a transaction that was only tried.
var errTakenBack = errors.New("taken back")

// tryWrite writes more than the free space of a table usually has room for, and takes it back.
func (s *server) tryWrite(ctx context.Context) error {
	body := make([]byte, writeTried)
	rand.Read(body) // never fails; what can be compressed would be
	err := postgres.InTx(ctx, s.ready, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			insert into agent_idempotency (scope, key, fingerprint, lease_until, body, expires_at)
			values ('GET /readyz', gen_random_uuid()::text, '', clock_timestamp(), @body, clock_timestamp())`, postgres.Strict{"body": body})
		return cmp.Or(err, errTakenBack)
	})
	if errors.Is(err, errTakenBack) {
		return nil
	}
	return err
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
	unknown := check{false, "not known while the database does not answer"}
	away := func(err error) check {
		s.log.WarnContext(ctx, "not ready: the database does not answer", "error", err)
		return check{false, "no answer within " + probeLimit.String()}
	}
	if err := s.ready.Ping(ctx); err != nil {
		return away(err), unknown
	}
	err := migrations.Check(ctx, s.ready)
	if errors.Is(err, migrations.ErrNewer) { // it came while this process served: an expansion, which it does not notice
		return check{true, "answers"}, check{true, "of a newer version: replace this process by one of that version"}
	}
	for _, known := range []error{migrations.ErrOutdated, migrations.ErrOld, migrations.ErrChanged} {
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
