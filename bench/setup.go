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
	"slices"
	"strconv"
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
