package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/sdnotify"
)

// cutLimit is how long answers that are cut may take to say so.
const cutLimit = 5 * time.Second

// stages are those of a stop, so that no request is lost whose client may not send it again:
//
//  1. draining, at once: /readyz says 503, so that whoever shares out requests sends them elsewhere, and connections are closed
//     behind their answers. Everything else goes on for AGENT_DRAIN_DELAY.
//  2. stopping: no connection is taken any more, and streams that are only watched end. Requests under way, also answers that are
//     streamed, have AGENT_SHUTDOWN_TIMEOUT, and the engine goes on working for them.
//  3. cutting: answers still being made end with where to find them later. The engine takes no more work, lets the steps under way
//     finish within AGENT_SHUTDOWN_TIMEOUT, and hands the rest to other processes.
type stages struct{ draining, stopping, cutting chan struct{} }

// serving works and answers until ctx ends, and then stops in stages. more runs beside it.
func (a *app) serving(ctx context.Context, listener net.Listener, more ...func(ctx context.Context) error) error {
	manager := sdnotify.New(a.getenv)
	alive, dead := context.WithCancel(context.WithoutCancel(ctx))
	var watching sync.WaitGroup
	watching.Go(func() { manager.Watchdog(alive) })
	defer watching.Wait()
	defer dead()
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return a.run(work, append(more, func(work context.Context) error {
		defer end()
		return a.serveHTTP(work, ctx.Done(), listener, manager)
	})...)
}

// serveHTTP answers until stop is closed and the requests under way have been answered, or until work ends.
func (a *app) serveHTTP(work context.Context, stop <-chan struct{}, listener net.Listener, manager *sdnotify.Manager) error {
	at := stages{make(chan struct{}), make(chan struct{}), make(chan struct{})}
	server, err := a.httpServer(at)
	if err != nil {
		return err
	}
	server.BaseContext = func(net.Listener) context.Context { return context.WithoutCancel(work) }
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(api.Listen(listener)) }()
	a.notify(work, manager, sdnotify.Ready)
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP: %w", err)
	case <-stop:
	case <-work.Done():
	}
	a.notify(work, manager, sdnotify.Stopping)
	a.drain(work, at, server)
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	return nil
}

// drain goes through the stages. When work has ended by itself nobody can be served, and there is nothing to wait for.
func (a *app) drain(work context.Context, at stages, server *http.Server) {
	began := time.Now()
	close(at.draining)
	a.log.InfoContext(work, "stopping", "drain_delay", a.config.DrainDelay)
	select {
	case <-time.After(a.config.DrainDelay):
	case <-work.Done():
	}
	close(at.stopping)
	closing, cancel := context.WithTimeout(work, a.config.ShutdownTimeout)
	err := server.Shutdown(closing)
	cancel()
	close(at.cutting)
	if err != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(work), cutLimit)
		err = server.Shutdown(last)
		cancel()
	}
	if err != nil {
		a.log.WarnContext(work, "requests cut off", "error", err)
	}
	a.log.InfoContext(work, "requests answered", "after", time.Since(began))
}

// notify tells the service manager, where there is one.
func (a *app) notify(ctx context.Context, manager *sdnotify.Manager, state string) {
	if err := manager.Tell(state); err != nil {
		a.log.WarnContext(ctx, "service manager not told", "state", state, "error", err)
	}
}
