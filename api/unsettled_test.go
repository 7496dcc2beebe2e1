package api_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// An outage that begins while a request is handled leaves its key in nobody's way.
func TestAKeyIsFreeWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	var a *agent
	away := func() { exec(t, a.pool, `alter table agent_idempotency rename to away`) }
	back := func() { exec(t, a.pool, `alter table away rename to agent_idempotency`) }
	a = surfaced(t, counted(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		switch n {
		case 1:
			away()
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2:
			made(w, r, n)
		case 3:
			away()
			made(w, r, n)
		}
	}))
	a.keyed("/v1/things", "{}", chatKey, "refused")
	a.refused(a.keyed("/v1/things", "{}", chatKey, "meanwhile"), 500, "")
	back()
	if got := a.keyed("/v1/things", "{}", chatKey, "refused"); got.Code != http.StatusCreated {
		t.Errorf("after a refusal that was not recorded: %d %s", got.Code, got.Body)
	}
	a.keyed("/v1/things", "{}", chatKey, "answered")
	back()
	again := a.keyed("/v1/things", "{}", chatKey, "answered")
	if again.Code != http.StatusCreated || again.Header().Get("Idempotent-Replayed") != "true" || calls.Load() != 3 {
		t.Errorf("after an answer that was not recorded: %d %s, after %d calls", again.Code, again.Body, calls.Load())
	}
}

// The key is free also when nobody has heard that it was taken.
func TestAKeyWhoseClaimWasNotHeardOfIsFreeWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var deaf deaf
	config := pool.Config()
	dial := config.ConnConfig.DialFunc
	config.MaxConns = 1
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if deaf.gone.Load() {
			return nil, errors.New("away")
		}
		conn, err := dial(ctx, network, address)
		return deafConn{conn, &deaf}, err
	}
	breaking, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(breaking.Close)
	a := with(t, breaking, engine(t, pool))
	start := `{"flow": "external:job"}`
	if got := a.keyed("/v1/executions", start, token, "before"); got.Code != http.StatusCreated {
		t.Fatalf("%d %s", got.Code, got.Body)
	}
	deaf.gone.Store(true)
	a.refused(a.keyed("/v1/executions", start, token, "unheard"), 503, "")
	if n := value[int](t, pool, `select count(*) from agent_idempotency where key = 'unheard'`); n != 1 {
		t.Fatalf("the key was taken %d times", n)
	}
	deaf.gone.Store(false)
	if got := a.keyed("/v1/executions", start, token, "unheard"); got.Code != http.StatusCreated {
		t.Errorf("when the database is back: %d %s", got.Code, got.Body)
	}
}

// Another process need not wait for a lease either: who could not tell of an attempt tells it once the database is back.
func TestAKeyIsFreeElsewhereWhenTheDatabaseIsBack(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var deaf deaf
	config := pool.Config()
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if deaf.gone.Load() {
			return nil, errors.New("away")
		}
		conn, err := dial(ctx, network, address)
		return deafConn{conn, &deaf}, err
	}
	breaking, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(breaking.Close)
	var calls atomic.Int64
	things := counted(&calls, func(w http.ResponseWriter, r *http.Request, n int64) {
		if n > 1 {
			made(w, r, n)
			return
		}
		exec(t, pool, `update agent_idempotency set lease_until = clock_timestamp() + interval '1 hour'`)
		deaf.gone.Store(true)
		w.WriteHeader(http.StatusServiceUnavailable)
	})
	o := api.Options{Pool: breaking, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Endpoints: []api.Endpoint{things}}
	a := wired(t, o)
	o.Pool = pool
	other := wired(t, o)
	a.keyed("/v1/things", "{}", chatKey, "k")
	other.refused(other.keyed("/v1/things", "{}", chatKey, "k"), 409, "still")
	deaf.gone.Store(false)
	pgtest.Eventually(t, patience, func() bool {
		return other.keyed("/v1/things", "{}", chatKey, "k").Code == http.StatusCreated
	}, "the key is free elsewhere")
}

// deaf is a network on which, while gone, requests still arrive and no answers, and no connection is made.
type deaf struct{ gone atomic.Bool }

type deafConn struct {
	net.Conn
	*deaf
}

func (c deafConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.gone.Load() {
		return 0, io.EOF
	}
	return n, err
}
