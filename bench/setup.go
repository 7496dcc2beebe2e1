package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// node is the set of parts that one process has for executions, wired as in `agent serve`.
type node struct {
	pool     *pgxpool.Pool
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
}

func newNode(pool *pgxpool.Pool, workers int) (n *node, err error) {
	log := slog.New(slog.DiscardHandler)
	n = &node{pool: pool, listener: postgres.NewListener(postgres.Dialer(pool), log)}
	n.keeper = lanes.NewKeeper(pool, lanes.Options{Listener: n.listener, Logger: log})
	n.engine, err = executions.New(pool, executions.Options{
		Keeper: n.keeper, Listener: n.listener,
		Logger: log, Workers: workers,
	})
	return n, err
}

// runNodes runs nodes and services while fn runs. Services and engines stop first.
func runNodes(
	ctx context.Context, nodes []*node, services []func(context.Context) error, fn func(ctx context.Context) error,
) error {
	working, stop := context.WithCancel(ctx)
	defer stop()
	base, stopBase := context.WithCancel(context.WithoutCancel(ctx))
	defer stopBase()
	var running, baseRunning errgroup.Group
	for _, n := range nodes {
		baseRunning.Go(func() error { return n.listener.Run(base) })
		baseRunning.Go(func() error { return n.keeper.Run(base) })
		running.Go(func() error { return n.engine.Run(working) })
	}
	for _, service := range services {
		running.Go(func() error { return service(working) })
	}
	err := poll(ctx, 10*time.Millisecond, func() (bool, error) {
		return !slices.ContainsFunc(nodes, func(n *node) bool { return n.engine.Live() != nil }), nil
	})
	if err == nil {
		err = fn(ctx)
	}
	stop()
	err = errors.Join(err, running.Wait())
	stopBase()
	return errors.Join(err, baseRunning.Wait())
}

// testAgent is a node with a chat and a model.
type testAgent struct {
	*node
	loop *reason.Loop
	chat *chat.Chat
	url  string // the address of the chat
}

// withServer starts a durable PostgreSQL while fn runs. Without config.Dir, it removes the data afterwards.
func withServer(
	ctx context.Context, config pgserver.Config, stderr io.Writer, fn func(server *pgserver.Server) error,
) (err error) {
	config.Ephemeral, config.Durable = config.Dir == "", true
	config.Progress = func(line string) { fmt.Fprintln(stderr, line) }
	server, err := pgserver.Start(ctx, config)
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	return fn(server)
}

// withDatabase starts a server with a migrated database while fn runs.
func withDatabase(
	ctx context.Context, config pgserver.Config, conns int, stderr io.Writer, fn func(pool *pgxpool.Pool) error,
) error {
	return withServer(ctx, config, stderr, func(server *pgserver.Server) error {
		pool, err := postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: int32(conns), ApplicationName: benchName})
		if err != nil {
			return err
		}
		defer pool.Close()
		if _, err := migrations.Up(ctx, pool); err != nil {
			return err
		}
		return fn(pool)
	})
}

// withTestAgent runs a testAgent with additional flows while fn runs.
func withTestAgent(
	ctx context.Context, workers int, model *modelServer, flows map[string]executions.Func, stderr io.Writer,
	fn func(ctx context.Context, w *testAgent) error,
) error {
	return withDatabase(ctx, pgserver.Config{}, workers+12, stderr, func(pool *pgxpool.Pool) error {
		modelServer := httptest.NewServer(model)
		defer modelServer.Close()
		w, err := newTestAgent(pool, workers, modelServer.URL+"/v1")
		if err != nil {
			return err
		}
		for name, flow := range flows {
			if err := w.engine.Register(name, flow); err != nil {
				return err
			}
		}
		chatServer := httptest.NewServer(w.chat.CompletionsHandler())
		defer chatServer.Close()
		w.url = chatServer.URL
		return runNodes(ctx, []*node{w.node}, []func(context.Context) error{w.chat.Run},
			func(ctx context.Context) error { return fn(ctx, w) })
	})
}

func newTestAgent(pool *pgxpool.Pool, workers int, modelURL string) (*testAgent, error) {
	log := slog.New(slog.DiscardHandler)
	n, err := newNode(pool, workers)
	if err != nil {
		return nil, err
	}
	client, err := models.New(models.Config{BaseURL: modelURL, Model: "bench", Logger: log})
	if err != nil {
		return nil, err
	}
	registry, err := skills.New(skills.Options{Pool: pool, Logger: log})
	if err != nil {
		return nil, err
	}
	w := &testAgent{node: n, loop: &reason.Loop{Pool: pool, Model: client, Skills: registry, Logger: log}}
	w.chat = &chat.Chat{Pool: pool, Engine: n.engine, Loop: w.loop, Logger: log, Rate: -1}
	return w, errors.Join(w.chat.Register(n.engine), n.engine.Register(backgroundFlow, w.runBackground))
}

// poll calls check at each interval until it returns true.
func poll(ctx context.Context, interval time.Duration, check func() (done bool, err error)) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		if done, err := check(); err != nil || done {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// pollQuery polls until the query returns true.
func pollQuery(ctx context.Context, pool *pgxpool.Pool, query string) error {
	return poll(ctx, 10*time.Millisecond, func() (done bool, err error) {
		err = pool.QueryRow(ctx, query).Scan(&done)
		return done, err
	})
}

// callAll calls fn for 0 to n-1 from a number of concurrent callers.
func callAll(ctx context.Context, callers, n int, fn func(ctx context.Context, i int) error) error {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range callers {
		group.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return nil
				}
				if err := fn(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	return group.Wait()
}

func pause(ctx context.Context, d time.Duration) error {
	if !sleep.For(ctx, d) {
		return ctx.Err()
	}
	return nil
}

// callFor makes a number of concurrent callers call fn repeatedly. It returns the number of calls and their rate per
// second.
func callFor(
	ctx context.Context, callers int, duration time.Duration, fn func(ctx context.Context, caller int) error,
) (int, float64, error) {
	var done atomic.Int64
	began := time.Now()
	end := began.Add(duration)
	group, ctx := errgroup.WithContext(ctx)
	for caller := range callers {
		group.Go(func() error {
			n := int64(0)
			defer func() { done.Add(n) }()
			for time.Now().Before(end) {
				if err := fn(ctx, caller); err != nil {
					return err
				}
				n++
			}
			return nil
		})
	}
	err := group.Wait()
	return int(done.Load()), float64(done.Load()) / time.Since(began).Seconds(), err
}

// nothingRuns: no execution is pending or running. allFinished: none is waiting either.
const (
	nothingRuns = `select not exists (select from agent_executions where status in ('pending', 'running'))`
	allFinished = `select not exists (select from agent_executions where status in ('pending', 'running', 'waiting'))`
)

// createFloor creates the rows of the floor. A committed update is the minimum cost of a durable operation.
func createFloor(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `create table bench_floor (id int primary key, n bigint not null) with (fillfactor = 50)`)
	if err == nil {
		_, err = pool.Exec(ctx, `insert into bench_floor select g, 0 from generate_series(0, 99) g`)
	}
	return err
}

func updateFloor(ctx context.Context, pool *pgxpool.Pool, id int) error {
	_, err := pool.Exec(ctx, `update bench_floor set n = n + 1 where id = @id`, postgres.Strict{"id": id})
	return err
}

// modelServer is a language model with a fixed latency. It calls onCall for each request.
type modelServer struct {
	latency time.Duration
	onCall  func(prompt string, at time.Time)
}

func (m *modelServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at := time.Now()
	var req openai.ChatCompletionRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || len(req.Messages) == 0 {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	m.onCall(req.Messages[len(req.Messages)-1].Content, at)
	timer := time.NewTimer(m.latency)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
		return
	}
	answer := chatwire.Answer{
		ID: "chatcmpl-" + strconv.FormatInt(at.UnixNano(), 10), Model: req.Model, Created: at.Unix(), Text: "Done.",
		Finish: openai.FinishReasonStop,
		Usage:  &openai.Usage{PromptTokens: 100, CompletionTokens: 2, TotalTokens: 102},
	}
	if err := chatwire.WriteStream(w, answer, true); err != nil && !errors.Is(err, net.ErrClosed) {
		return // the client disconnected
	}
}

// agentBinary is the agent's program in a temporary folder.
type agentBinary struct{ path, dir string }

// buildAgent builds the agent from the current folder, unless path names a binary.
func buildAgent(ctx context.Context, path string, stderr io.Writer) (*agentBinary, error) {
	dir, err := os.MkdirTemp("", "agent-bench-")
	if err != nil {
		return nil, err
	}
	if path == "" {
		path = filepath.Join(dir, "agent")
		build := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/agent")
		build.Stderr = stderr
		if err := build.Run(); err != nil {
			return nil, errors.Join(fmt.Errorf("build the agent: %w", err), os.RemoveAll(dir))
		}
	}
	return &agentBinary{path, dir}, nil
}

func (b *agentBinary) remove() error { return os.RemoveAll(b.dir) }

// serve runs `agent serve` while fn runs. Later settings of a name replace the defaults.
func (b *agentBinary) serve(
	ctx context.Context, database string, settings []string, fn func(ctx context.Context, url string, pid int) error,
) (err error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(b.dir, "log"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	agent := exec.CommandContext(ctx, b.path, "serve", "--migrate")
	agent.Dir, agent.Stdout, agent.Stderr = b.dir, log, log
	agent.Cancel = func() error { return agent.Process.Signal(syscall.SIGTERM) }
	agent.WaitDelay = 30 * time.Second
	agent.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + b.dir, "DATABASE_URL=" + database, "AGENT_LISTEN=" + address,
		"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", "AGENT_HEARTBEAT_CRON=0 0 1 1 *",
		"OPENAI_BASE_URL=http://" + address + "/none", "OPENAI_API_KEY=none",
	}, settings...)
	if err := agent.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	if err = untilReady(ctx, "http://"+address+"/readyz"); err == nil {
		err = fn(ctx, "http://"+address, agent.Process.Pid)
	}
	if stopped := agent.Process.Signal(syscall.SIGTERM); stopped != nil && !errors.Is(stopped, os.ErrProcessDone) {
		err = errors.Join(err, stopped)
	}
	if ended := agent.Wait(); ended != nil || err != nil {
		output, _ := os.ReadFile(log.Name())
		err = errors.Join(err, ended, fmt.Errorf("the agent's output: %.2000s", output))
	}
	return err
}

func freeAddress(ctx context.Context) (string, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// untilReady polls for at most two minutes until the agent is ready.
func untilReady(ctx context.Context, ready string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, ready, http.NoBody)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(req)
		if err == nil {
			err = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return err
			}
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("wait for the agent: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}

// idleBench measures the cost of an idle `agent serve` in its own process. The bench connects to another database, so
// all transactions of the agent's database are the agent's.
type idleBench struct {
	settle, duration time.Duration
	pool             *pgxpool.Pool // to another database of the server
	stderr           io.Writer
}

const idleDatabase = "idle"

type idleCost struct {
	agent, server time.Duration
	elapsed       time.Duration
	transactions  int64
}

func idle(ctx context.Context, args []string, out, stderr io.Writer) (err error) {
	b := idleBench{stderr: stderr}
	flags := newFlags("idle", stderr)
	flags.DurationVar(&b.settle, "settle", 10*time.Second, "idle time before it is measured")
	flags.DurationVar(&b.duration, "for", 30*time.Second, "how long it is measured")
	binary := flags.String("agent", "", "the agent's binary; default: built from the current folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.settle < 0 || b.duration <= 0 {
		return errors.New("idle: -for must be above 0, -settle at least 0")
	}
	agent, err := buildAgent(ctx, *binary, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	return withServer(ctx, pgserver.Config{Database: idleDatabase}, stderr, func(server *pgserver.Server) error {
		if err := b.connect(ctx, server.URL()); err != nil {
			return err
		}
		defer b.pool.Close()
		return agent.serve(ctx, server.URL(), nil, func(ctx context.Context, url string, pid int) error {
			cost, err := b.watch(ctx, pid)
			if err == nil {
				cost.print(out)
			}
			return err
		})
	})
}

// connect opens a pool whose transactions do not count.
func (b *idleBench) connect(ctx context.Context, serverURL string) error {
	address, err := url.Parse(serverURL)
	if err != nil {
		return fmt.Errorf("read the server's address: %w", err)
	}
	address.Path = "/postgres"
	b.pool, err = postgres.Open(ctx, address.String(), postgres.Options{MaxConns: 2, ApplicationName: "bench"})
	return err
}

func (b *idleBench) watch(ctx context.Context, pid int) (cost idleCost, err error) {
	fmt.Fprintf(b.stderr, "the agent is ready; measuring for %s in %s\n", b.duration, b.settle)
	if err := pause(ctx, b.settle); err != nil {
		return cost, err
	}
	before, err := b.read(ctx, pid)
	if err != nil {
		return cost, err
	}
	began := time.Now()
	if err := pause(ctx, b.duration); err != nil {
		return cost, err
	}
	after, err := b.read(ctx, pid)
	return idleCost{
		agent: after.agent - before.agent, server: after.server - before.server,
		elapsed: time.Since(began), transactions: after.transactions - before.transactions,
	}, err
}

func (b *idleBench) read(ctx context.Context, pid int) (cost idleCost, err error) {
	stat, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cost, errors.New("read the agent's processor time: no such process in /proc")
	}
	all, err := usedCPU(ctx, b.pool)
	if err != nil {
		return cost, err
	}
	cost.agent, cost.server = stat.cpu, all.server
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database where datname = @name`,
		postgres.Strict{"name": idleDatabase}).Scan(&cost.transactions)
	if err != nil {
		return cost, fmt.Errorf("count the transactions: %w", err)
	}
	return cost, nil
}

func (c idleCost) print(out io.Writer) {
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %%", 100*d.Seconds()/c.elapsed.Seconds()) }
	var t strings.Builder
	fmt.Fprintf(&t, "`agent serve` idle for %s; %d processors.\n\n", c.elapsed.Round(time.Second), runtime.NumCPU())
	t.WriteString("| | measured | target |\n|---|---|---|\n")
	fmt.Fprintf(&t, "| processor time of the process, of one core | %s | < 1 %% |\n", share(c.agent))
	fmt.Fprintf(&t, "| processor time of the server's processes, of one core | %s | |\n", share(c.server))
	fmt.Fprintf(&t, "| transactions per second | %.1f | a handful |\n", float64(c.transactions)/c.elapsed.Seconds())
	fmt.Fprint(out, t.String())
}
