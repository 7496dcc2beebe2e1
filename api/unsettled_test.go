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

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// An outage that begins while a request is handled leaves its key in nobody's way.
func TestAKeyIsFreeWhenTheDatabaseIsBack(t *testing.T) {
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
