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
