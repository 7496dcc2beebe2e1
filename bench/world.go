package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
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
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// world is the runtime of one process, wired as `agent serve` wires it, on a database of its own.
type world struct {
	pool     *pgxpool.Pool
	listener *postgres.Listener
	keeper   *lanes.Keeper
	engine   *executions.Engine
	loop     *reason.Loop
	chat     *chat.Chat
	flows    map[string]executions.Func // further ones
	url      string                     // where the chat is served
}

// withWorld makes a world with so many workers, whose model takes so long for each answer, lets it work while fn does,
// and takes it down. Flows are what it runs beside those of the chat.
func withWorld(ctx context.Context, workers int, model *model, flows map[string]executions.Func, errw io.Writer, fn func(ctx context.Context, w *world) error) (err error) {
	server, err := pgserver.Start(ctx, pgserver.Config{
		Ephemeral: true, Durable: true, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	pool, err := postgres.Open(ctx, server.URL(), postgres.Options{MaxConns: int32(workers) + 12, ApplicationName: "bench"})
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := migrations.Up(ctx, pool); err != nil {
		return err
	}
	asked := httptest.NewServer(model)
	defer asked.Close()
	w := &world{pool: pool, flows: flows}
	if err := w.wire(workers, asked.URL+"/v1"); err != nil {
		return err
	}
	served := httptest.NewServer(w.chat.CompletionsHandler())
	defer served.Close()
	w.url = served.URL
	return w.work(ctx, fn)
}

// wire puts the parts together.
func (w *world) wire(workers int, modelURL string) (err error) {
	log := slog.New(slog.DiscardHandler)
	w.listener = postgres.NewListener(postgres.Dialer(w.pool), log)
	w.keeper = lanes.NewKeeper(w.pool, lanes.Options{Listener: w.listener, Logger: log})
	w.engine, err = executions.New(w.pool, executions.Options{Keeper: w.keeper, Listener: w.listener, Logger: log, Workers: workers})
	if err != nil {
		return err
	}
	client, err := models.New(models.Config{BaseURL: modelURL, Model: "bench", Logger: log})
	if err != nil {
		return err
	}
	registry, err := skills.New(skills.Options{Pool: w.pool, Logger: log})
	if err != nil {
		return err
	}
	w.loop = &reason.Loop{Pool: w.pool, Model: client, Skills: registry, Logger: log}
	w.chat = &chat.Chat{Pool: w.pool, Engine: w.engine, Loop: w.loop, Logger: log, Rate: -1}
	err = errors.Join(w.chat.Register(w.engine), w.engine.Register(backgroundFlow, w.think))
	for name, fn := range w.flows {
		err = errors.Join(err, w.engine.Register(name, fn))
	}
	return err
}

// work runs the parts while fn does.
func (w *world) work(ctx context.Context, fn func(ctx context.Context, w *world) error) error {
	working, stop := context.WithCancel(ctx)
	defer stop()
	living, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var below, above errgroup.Group
	below.Go(func() error { return w.listener.Run(living) })
	below.Go(func() error { return w.keeper.Run(living) })
	above.Go(func() error { return w.engine.Run(working) })
	above.Go(func() error { return w.chat.Run(working) })
	err := w.ready(ctx)
	if err == nil {
		err = fn(ctx, w)
	}
	stop()
	err = errors.Join(err, above.Wait())
	end()
	return errors.Join(err, below.Wait())
}

// ready waits until the engine takes work.
func (w *world) ready(ctx context.Context) error {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for w.engine.Live() != nil {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// model is a language model that takes a fixed time for each answer and tells when it was asked what.
type model struct {
	latency time.Duration
	asked   func(prompt string, at time.Time)
}

// ServeHTTP answers a chat completion.
func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at := time.Now()
	var req openai.ChatCompletionRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || len(req.Messages) == 0 {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	m.asked(req.Messages[len(req.Messages)-1].Content, at)
	timer := time.NewTimer(m.latency)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.Context().Done():
		return
	}
	answer := chatwire.Answer{
		ID: "chatcmpl-" + strconv.FormatInt(at.UnixNano(), 10), Model: req.Model, Created: at.Unix(), Text: "Done.", Finish: openai.FinishReasonStop,
		Usage: &openai.Usage{PromptTokens: 100, CompletionTokens: 2, TotalTokens: 102},
	}
	if err := chatwire.WriteStream(w, answer, true); err != nil && !errors.Is(err, net.ErrClosed) {
		return // the client went away
	}
}

// binary is the agent's program, in a folder of its own that remove deletes.
type binary struct{ path, dir string }

// buildAgent builds the agent from the present folder, unless path names a binary.
func buildAgent(ctx context.Context, path string, errw io.Writer) (*binary, error) {
	dir, err := os.MkdirTemp("", "agent-bench-")
	if err != nil {
		return nil, err
	}
	if path == "" {
		path = filepath.Join(dir, "agent")
		build := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/agent")
		build.Stderr = errw
		if err := build.Run(); err != nil {
			return nil, errors.Join(fmt.Errorf("build the agent: %w", err), os.RemoveAll(dir))
		}
	}
	return &binary{path, dir}, nil
}

func (b *binary) remove() error { return os.RemoveAll(b.dir) }

// serve runs `agent serve` on a database while fn does. Settings are added to what a quiet agent has; the last one of
// a name counts.
func (b *binary) serve(ctx context.Context, database string, settings []string, fn func(ctx context.Context, url string, pid int) error) (err error) {
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
		said, _ := os.ReadFile(log.Name())
		err = errors.Join(err, ended, fmt.Errorf("the agent said: %.2000s", said))
	}
	return err
}

// freeAddress is one that nobody listens on now.
func freeAddress(ctx context.Context) (string, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("look for a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// untilReady asks for at most two minutes, until the answer is yes.
func untilReady(ctx context.Context, ready string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, ready, http.NoBody)
		if err != nil {
			return err
		}
		answer, err := http.DefaultClient.Do(req)
		if err == nil {
			err = answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return err
			}
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("wait until the agent serves: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}

// idleBench measures what `agent serve` costs while it has nothing to do: the binary itself, in a process of its own,
// with a database of its own. Statements are counted as the transactions of that database; who counts is connected to
// another.
type idleBench struct {
	settle, lasts time.Duration
	server        *pgserver.Server
	pool          *pgxpool.Pool // to another database of the server
	errw          io.Writer
}

// idleDatabase is the one that is served.
const idleDatabase = "idle"

// idleCost is what a stretch of idleness cost.
type idleCost struct {
	agent, server time.Duration
	lasted        time.Duration
	transactions  int64
}

func idle(ctx context.Context, args []string, out, errw io.Writer) (err error) {
	b := idleBench{errw: errw}
	flags := flag.NewFlagSet("idle", flag.ContinueOnError)
	flags.SetOutput(errw)
	flags.DurationVar(&b.settle, "settle", 10*time.Second, "how long it is left alone before it is watched")
	flags.DurationVar(&b.lasts, "for", 30*time.Second, "how long it is watched")
	binary := flags.String("agent", "", "the binary; empty to build it from the present folder")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if b.settle < 0 || b.lasts <= 0 {
		return errors.New("idle: -for is above 0, -settle is not below")
	}
	agent, err := buildAgent(ctx, *binary, errw)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.remove()) }()
	b.server, err = pgserver.Start(ctx, pgserver.Config{
		Ephemeral: true, Durable: true, Database: idleDatabase, Progress: func(line string) { fmt.Fprintln(errw, line) },
	})
	if err != nil {
		return fmt.Errorf("start PostgreSQL: %w", err)
	}
	defer func() { err = errors.Join(err, b.server.Stop(context.WithoutCancel(ctx))) }()
	if err := b.connect(ctx); err != nil {
		return err
	}
	defer b.pool.Close()
	var cost idleCost
	err = agent.serve(ctx, b.server.URL(), nil, func(ctx context.Context, url string, pid int) error {
		cost, err = b.watch(ctx, pid)
		return err
	})
	if err != nil {
		return err
	}
	cost.print(out)
	return nil
}

// connect opens the way to count, which is not counted.
func (b *idleBench) connect(ctx context.Context) error {
	at, err := url.Parse(b.server.URL())
	if err != nil {
		return fmt.Errorf("read the server's address: %w", err)
	}
	at.Path = "/postgres"
	b.pool, err = postgres.Open(ctx, at.String(), postgres.Options{MaxConns: 2, ApplicationName: "bench"})
	return err
}

// watch reads the counters before and after.
func (b *idleBench) watch(ctx context.Context, pid int) (cost idleCost, err error) {
	fmt.Fprintf(b.errw, "it serves; watched for %s, %s from now\n", b.lasts, b.settle)
	if err := pause(ctx, b.settle); err != nil {
		return cost, err
	}
	before, err := b.read(ctx, pid)
	if err != nil {
		return cost, err
	}
	began := time.Now()
	if err := pause(ctx, b.lasts); err != nil {
		return cost, err
	}
	after, err := b.read(ctx, pid)
	return idleCost{
		agent: after.agent - before.agent, server: after.server - before.server,
		lasted: time.Since(began), transactions: after.transactions - before.transactions,
	}, err
}

// read is what was used so far.
func (b *idleBench) read(ctx context.Context, pid int) (cost idleCost, err error) {
	used, ok := procStat(strconv.Itoa(pid))
	if !ok {
		return cost, errors.New("read the agent's processor time: it has ended, or there is no /proc")
	}
	all, err := cpu(ctx, b.pool)
	if err != nil {
		return cost, err
	}
	cost.agent, cost.server = used.used, all.server
	err = b.pool.QueryRow(ctx, `select xact_commit + xact_rollback from pg_stat_database where datname = @name`,
		postgres.Strict{"name": idleDatabase}).Scan(&cost.transactions)
	if err != nil {
		return cost, fmt.Errorf("count the transactions: %w", err)
	}
	return cost, nil
}

// print writes the table.
func (c idleCost) print(out io.Writer) {
	share := func(d time.Duration) string { return fmt.Sprintf("%.2f %%", 100*d.Seconds()/c.lasted.Seconds()) }
	var t strings.Builder
	fmt.Fprintf(&t, "`agent serve` with nothing to do, for %s; %d processors.\n\n", c.lasted.Round(time.Second), runtime.NumCPU())
	t.WriteString("| | measured | asked |\n|---|---|---|\n")
	fmt.Fprintf(&t, "| processor time of the process, of one core | %s | < 1 %% |\n", share(c.agent))
	fmt.Fprintf(&t, "| processor time of the server's processes, of one core | %s | |\n", share(c.server))
	fmt.Fprintf(&t, "| transactions per second | %.1f | a handful |\n", float64(c.transactions)/c.lasted.Seconds())
	fmt.Fprint(out, t.String())
}
