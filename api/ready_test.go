package api_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

type readiness struct {
	Status string
	Checks map[string]struct {
		OK     bool
		Detail string
	}
}

// failing returns the names of failed checks.
func (r readiness) failing() string {
	var list []string
	for _, name := range []string{"database", "schema", "writes", "worker", "draining"} {
		if c, has := r.Checks[name]; !has || !c.OK {
			list = append(list, name)
		}
	}
	return strings.Join(list, " ")
}

func (a *agent) readyz(status int) (result readiness) {
	a.t.Helper()
	a.checkResponse(a.raw("GET", "/readyz", "", nil), "GET", "/readyz", status, &result)
	assert.Truef(a.t, (result.Status == "ready") == (status == http.StatusOK), "%d says %q", status, result.Status)
	return result
}

// run runs an engine and returns its stop function.
func run(t *testing.T, e *executions.Engine) (stop func()) {
	t.Helper()
	stop = testkit.Run(t, e.Run)
	pgtest.Eventually(t, func() bool { return e.Live() == nil }, "the engine is live")
	return stop
}

// unreachable returns a pool without a reachable database.
func unreachable(t *testing.T, dial func(ctx context.Context, network, addr string) (net.Conn, error)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://somebody:password@db.internal.example/agent?sslmode=disable")
	require.NoError(t, err)
	config.ConnConfig.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"192.0.2.1"}, nil }
	config.ConnConfig.DialFunc = dial
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func refuseDial(context.Context, string, string) (net.Conn, error) {
	return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
}

func hangDial(ctx context.Context, _, _ string) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestReadyUntilShutdown(t *testing.T) {
	t.Parallel()
	a := start(t)
	got := a.readyz(503)
	assert.Truef(t, got.failing() == "worker", "before it runs: %+v", got)
	stop := run(t, a.engine)
	a.readyz(200)
	stop()
	got = a.readyz(503)
	assert.Truef(t, got.failing() == "worker draining", "after it stopped: %+v", got)
}

func TestMissingSchemaIsNotReady(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	run(t, e)
	a := newAgent(t, pgtest.Empty(t), e)
	got := a.readyz(503)
	assert.Truef(t, got.failing() == "schema" && strings.Contains(got.Checks["schema"].Detail, "agent migrate"),
		"checks are %+v", got.Checks)
}

// A newer schema extends this one, so an upgrade must not cause an outage.
func TestNewerSchemaAtRuntimeIsReady(t *testing.T) {
	t.Parallel()
	a := start(t)
	run(t, a.engine)
	pgtest.Exec(t, a.pool, `insert into agent_migrations (version, name, hash) values (9999, '9999_later.sql', 'x')`)
	got := a.readyz(200)
	assert.Truef(t, strings.Contains(got.Checks["schema"].Detail, "newer"), "checks are %+v", got.Checks)
}

func TestOtherSchemaIsNotReady(t *testing.T) {
	t.Parallel()
	a := start(t)
	run(t, a.engine)
	pgtest.Exec(t, a.pool, `update agent_migrations set hash = 'x'`)
	got := a.readyz(503)
	assert.Truef(t, got.failing() == "schema" && strings.Contains(got.Checks["schema"].Detail, "differs"),
		"checks are %+v", got.Checks)
}

func TestUnreachableDatabaseIsNotReady(t *testing.T) {
	t.Parallel()
	for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){
		"refuses": refuseDial, "keeps silent": hangDial,
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			e := engine(t, pool)
			run(t, e)
			a := newAgent(t, unreachable(t, dial), e)
			began := time.Now()
			got := a.readyz(503)
			took := time.Since(began)
			assert.Truef(t, took <= 25*time.Second, "the answer took %s", took)
			assert.Equal(t, "database schema writes", got.failing(), got.Checks)
			for _, c := range got.Checks {
				assert.Truef(t, !strings.Contains(c.Detail, "somebody") && !strings.Contains(c.Detail, "192.0.2.1"),
					"a public probe says %q", c.Detail)
			}
			var alive struct{ Status string }
			a.checkResponse(a.raw("GET", "/healthz", "", nil), "GET", "/healthz", 200, &alive)
			assert.Equal(t, "ok", alive.Status)
		})
	}
}

func TestServerWithoutFreeConnectionIsNotReady(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	run(t, e)
	config := pool.Config()
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error { return &pgconn.PgError{Code: "53300"} }
	full, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(full.Close)
	got := newAgentWith(t, api.Options{Pool: full, Ready: pool, Engine: e}).readyz(503)
	assert.Truef(t, got.failing() == "database" && strings.Contains(got.Checks["database"].Detail, "no free connection"),
		"checks are %+v", got.Checks)
}

func TestListingsWithUnreachableDatabase(t *testing.T) {
	t.Parallel()
	a := newAgent(t, unreachable(t, refuseDial), engine(t, pgtest.DB(t)))
	for _, path := range []string{"/v1/traces", "/v1/activity", "/v1/executions", "/v1/lanes", "/v1/skills"} {
		w := a.raw("GET", path, "", asAdmin())
		a.checkProblem(w, http.StatusServiceUnavailable, "database")
		assert.Truef(t, !strings.Contains(w.Body.String(), "somebody"), "%s says %s", path, w.Body)
	}
}
