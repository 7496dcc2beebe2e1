//go:build unix

package soak_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// The secrets of a world. Nothing of them may ever show.
const (
	adminToken   = "admin-9f2c7a51e0b84d36"
	visitorKey   = "visitor-41d6e8a90c7b2f35"
	strangerKey  = "stranger-7e3b5d9018f6a2c4"
	modelKey     = "model-c85a1f3e7d924b60"
	weatherToken = "weather-2b7f94e6a1d3c580"
	shopKey      = "c29hay1vZi13ZWJob29rcy1zZWNyZXQtMDE="
)

// world is a database with the schema `soak` beside the product's, a model, a server for the skills, and a workspace
// that `agent apply` has applied.
type world struct {
	t     testing.TB
	url   string
	db    *pgxpool.Pool
	model *modeltest.Server
	dir   string
}

// noted is what only the test knows, beside the product's own tables.
const noted = `
	create schema soak;
	create table soak.calls (skill text not null, key text not null, body jsonb not null,
	  at timestamptz not null default clock_timestamp());
	create table soak.deliveries (id text not null, n int not null, type text not null, status int not null);
	create table soak.answers (thread text not null, question int not null, answer text not null);
	create table soak.lanes (lane text not null, owner text not null, token bigint not null);
	create table soak.operated (n int not null, trace_id text not null, answer text not null)`

// newWorld makes a world whose workspace is yaml; %s in it is the address of the skills' server.
func newWorld(t testing.TB, yaml string) *world {
	t.Helper()
	w := &world{t: t, url: pgtest.URL(t), model: modeltest.New(t), dir: t.TempDir()}
	w.db = pgtest.Pool(t, w.url, postgres.Options{MaxConns: 8, ApplicationName: "soak"})
	pgtest.Exec(w.t, w.db, noted)
	served := testkit.Serve(t, http.HandlerFunc(w.serveSkill))
	require.NoError(t, os.Mkdir(filepath.Join(w.dir, "workspace"), 0o755))
	file := filepath.Join(w.dir, "workspace", "all.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(yaml, "%s", served)), 0o600))
	a := w.agent("apply", "workspace")
	require.Truef(t, a.Exit() == 0, "agent apply: %s", a.Err.Tail(30))
	return w
}

// serveSkill answers the skills' requests and notes them.
func (w *world) serveSkill(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client went away
	}
	if len(body) == 0 {
		body = []byte("{}")
	}
	skill := strings.Trim(r.URL.Path, "/")
	_, err = w.db.Exec(r.Context(), `insert into soak.calls (skill, key, body) values ($1, $2, $3)`, skill,
		r.Header.Get("Idempotency-Key"), body)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	if _, err := fmt.Fprintf(rw, `{"%s": "done", "for": %s}`, skill, body); err != nil {
		return // the client went away
	}
}

// environ is what a process of this world gets.
func (w *world) environ(more ...string) []string {
	return append(testkit.Environ(w.url, w.model, "AGENT_ADMIN_TOKEN="+adminToken,
		"AGENT_CHAT_KEY=visitors="+visitorKey+",stranger="+strangerKey, "OPENAI_API_KEY="+modelKey,
		`AGENT_PRICES={"scripted":{"input":2.5,"output":10}}`, "SHOP_SECRET=whsec_"+shopKey, "WEATHER_TOKEN="+weatherToken,
		"AGENT_LOG_FORMAT=json", "AGENT_HEARTBEAT_CRON=0 0 29 2 *"), more...)
}

// agent starts the program in this world.
func (w *world) agent(args ...string) *proctest.Process {
	w.t.Helper()
	return launch(w.t, w.dir, w.environ(), args...)
}

// serve starts `agent serve` with further settings, and returns its URL when it works.
func (w *world) serve(more ...string) (*proctest.Process, string) {
	w.t.Helper()
	a := launch(w.t, w.dir, w.environ(more...), "serve")
	return a, a.Base()
}
