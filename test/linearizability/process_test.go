package linearizability_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/child"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// waitTimeout bounds every wait of a test, for busy machines.
const waitTimeout = 90 * time.Second

// configVariable is the environment variable with the configuration of a process: this test binary, started again.
const configVariable = "LANECHECK_PART"

// processConfig configures a process of a scenario.
type processConfig struct {
	Role    string   `json:"role"` // sql, lanes or family
	Own     string   `json:"own"`  // the lane of a family
	Name    string   `json:"name"`
	URL     string   `json:"url"`
	History string   `json:"history"`
	Lanes   []string `json:"lanes"`
	Clients int      `json:"clients"`
	Seed    uint64   `json:"seed"`
	Skew    int64    `json:"skew"` // seconds by which its clock is ahead
}

func TestMain(m *testing.M) {
	pgserver.GuardMain()
	if raw := os.Getenv(configVariable); raw != "" {
		if err := runProcess(raw); err != nil {
			fmt.Fprintln(os.Stderr, "lanetest:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	pgtest.Main(m)
}

// runProcess plays its role until standard input ends. It also ends if the test dies.
func runProcess(raw string) error {
	var p processConfig
	if err := json.Unmarshal([]byte(raw), &p); err != nil {
		return err
	}
	if skewable && p.Skew != 0 {
		if err := skew(p.Skew); err != nil {
			return err
		}
		if ahead := time.Until(time.Unix(0, now())); (ahead + time.Duration(p.Skew)*time.Second).Abs() > time.Minute {
			return fmt.Errorf("the clock is %s behind the machine's, which is not %d seconds ahead of it", ahead, p.Skew)
		}
	}
	history, err := newHistory(p.History, p.Name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // returns at the end of standard input
		cancel()
	}()
	switch p.Role {
	case "sql":
		p.sessions(ctx, history)
		return nil
	case "family":
		p.runFamilies(ctx, history)
		return nil
	}
	return p.workers(ctx, history)
}

func (p processConfig) random(n int) *rand.Rand {
	return rand.New(rand.NewPCG(p.Seed, uint64(n))) // not a secret
}

func (p processConfig) sessions(ctx context.Context, history *history) {
	var group sync.WaitGroup
	for n := range p.Clients {
		s := &session{history: history, url: p.URL, name: fmt.Sprintf("%s.%d", p.Name, n), lanes: p.Lanes, rand: p.random(n)}
		group.Go(func() { s.play(ctx) })
	}
	group.Wait()
}

func (p processConfig) workers(ctx context.Context, history *history) error {
	pool, err := postgres.Open(ctx, p.URL, postgres.Options{
		MaxConns: int32(p.Clients) + 2, ConnectWait: waitTimeout, ApplicationName: "lanetest",
	})
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	defer pool.Close()
	listener := postgres.NewListener(postgres.Dialer(pool), slog.New(slog.DiscardHandler))
	keeper := lanes.NewKeeper(recordingDB{pool, history}, lanes.Options{Listener: listener})
	var background, group sync.WaitGroup
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var failed [2]error
	background.Go(func() { failed[0] = keeper.Run(running) })
	background.Go(func() { failed[1] = listener.Run(running) })
	for n := range p.Clients {
		w := &worker{history: history, pool: pool, keeper: keeper, lanes: p.Lanes, rand: p.random(n)}
		group.Go(func() { w.play(ctx) })
	}
	group.Wait()
	stop()
	background.Wait()
	return errors.Join(failed[:]...)
}

// process is a process of a scenario.
type process struct {
	config processConfig
	cmd    *exec.Cmd
	stdin  io.Closer
	ended  chan struct{}
	err    error // of its end
}

// start starts a process. The end of the test kills it.
func start(t testing.TB, p processConfig) *process {
	t.Helper()
	raw, err := json.Marshal(p)
	require.NoError(t, err)
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), configVariable+"="+string(raw))
	cmd.Stderr, cmd.SysProcAttr = os.Stderr, proctest.DieWithUs()
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	a := &process{config: p, cmd: cmd, stdin: stdin, ended: make(chan struct{})}
	err = child.Start(cmd, syscall.SIGKILL, func(err error) {
		a.err = err
		close(a.ended)
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the process may have ended
		<-a.ended
	})
	return a
}

// kill ends a process with SIGKILL.
func (a *process) kill() {
	_ = a.cmd.Process.Kill() // the process may have ended
	<-a.ended
}

func (a *process) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	assert.NoError(t, a.cmd.Process.Signal(s), "signal", s, "to", a.config.Name)
}

// stop asks a process to end, and waits for it.
func (a *process) stop(t testing.TB) {
	t.Helper()
	_ = a.stdin.Close() // the signal is the request
	select {
	case <-a.ended:
		assert.NoError(t, a.err, "process", a.config.Name)
	case <-time.After(waitTimeout):
		a.kill()
		t.Errorf("process %s did not end within %s", a.config.Name, waitTimeout)
	}
}

func historyPath(dir, name string) string { return filepath.Join(dir, name+".jsonl") }

// proxy forwards connections to a database, and breaks them on request.
type proxy struct {
	*pgproxy.Proxy

	next atomic.Int32 // the verdict on the next request about lanes
	done [pgproxy.LoseAnswer + 1]atomic.Int64
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	p := &proxy{}
	p.Proxy = pgproxy.Intercept(t, target, p.decide, nil)
	return p
}

// decide takes the next verdict for a request about lanes.
func (p *proxy) decide(r pgproxy.Request) pgproxy.Verdict {
	if !aboutLanes(r) {
		return pgproxy.Pass
	}
	verdict := pgproxy.Verdict(p.next.Swap(int32(pgproxy.Pass)))
	p.done[verdict].Add(1)
	return verdict
}

// aboutLanes reports whether a request acquires or releases a lane, or ends a transaction.
func aboutLanes(r pgproxy.Request) bool {
	if r.Simple {
		return strings.HasPrefix(r.Bound[0], "commit") || strings.HasPrefix(r.Bound[0], "rollback")
	}
	for _, sql := range r.Bound {
		if strings.Contains(sql, "agent_lock") || strings.Contains(sql, "agent_execution") {
			return r.Executes
		}
	}
	return false
}
