package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/sdnotify"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Handler returns the handler of the API, the pages and the surfaces. stages signal the phases of a shutdown.
func (a *App) Handler(stages Stages) (http.Handler, error) {
	keys := make(map[string]string, len(a.Config.ChatKeys))
	for name, key := range a.Config.ChatKeys {
		keys[name] = key.Reveal()
	}
	var handler http.Handler
	room, pages, err := a.engineRoom(func() http.Handler { return handler })
	if err != nil {
		return nil, err
	}
	handler, err = api.New(api.Options{
		Pool: a.admin(), Read: a.Read, Ready: a.reserved.system, Engine: a.Engine, Agents: a.Loop.Agents, Memory: a.Index,
		Limits: Limits(a.Config.Limits), Evals: a.Evals,
		AdminToken: a.Config.AdminToken.Reveal(), ChatKeys: keys,
		Proxies: a.Config.Proxies, Endpoints: append(a.endpoints(), pages...), Pages: room, Logger: a.Log,
		Listener: a.listener, OIDC: oidcOf(a.Config),
		DocumentBytes: int64(a.Config.DocumentMaxBytes),
		Draining:      stages.draining, Stopping: stages.stopping, ForceStop: stages.forceStop,
	})
	if err != nil {
		return nil, fmt.Errorf("prepare HTTP: %w", err)
	}
	return handler, nil
}

// oidcOf returns the login at an issuer; nil without one.
func oidcOf(c config.Config) *api.OIDC {
	if c.OIDC.Issuer == "" {
		return nil
	}
	o := &api.OIDC{
		Issuer: c.OIDC.Issuer, ClientID: c.OIDC.ClientID, ClientSecret: c.OIDC.ClientSecret.Reveal(), PublicURL: c.PublicURL,
	}
	for _, text := range c.OIDC.Roles { // checked by package config: claim=value:role
		claim, rest, _ := strings.Cut(text, "=")
		at := strings.LastIndexByte(rest, ':')
		o.Roles = append(o.Roles, api.ClaimRole{Claim: claim, Value: rest[:at], Role: principals.Role(rest[at+1:])})
	}
	return o
}

// WarnWeakTokens logs endpoints that reject everything because their bearer tokens are weak.
func (a *App) WarnWeakTokens(ctx context.Context) error {
	all, err := webhooks.Endpoints(ctx, a.Pool)
	if err != nil {
		return err
	}
	for _, e := range all {
		if err := webhooks.CheckTokens(e.Scheme, e.Secrets, a.Getenv); err != nil && e.Enabled {
			a.Log.ErrorContext(ctx, "webhook endpoint rejects all requests", "endpoint", e.Name, "error", err)
		}
	}
	return nil
}

// cutTimeout bounds the last phase: cut responses write their final event.
const cutTimeout = 5 * time.Second

// Stages signal the phases of a graceful shutdown:
//
//  1. draining starts at once. /readyz answers 503, so load balancers stop sending requests. Connections close
//     after their current response. Work continues for AGENT_DRAIN_DELAY.
//  2. stopping closes the listener and the streams that only watch. Requests in flight, including streams, have
//     AGENT_SHUTDOWN_TIMEOUT. The engine still works for them.
//  3. forceStop ends the remaining responses with a pointer to their result. The engine accepts no work, finishes
//     running steps within AGENT_SHUTDOWN_TIMEOUT, and hands the rest to other processes.
type Stages struct{ draining, stopping, forceStop chan struct{} }

// NewStages returns the stages of a shutdown that has not begun.
func NewStages() Stages { return Stages{make(chan struct{}), make(chan struct{}), make(chan struct{})} }

// End begins all stages.
func (s Stages) End() {
	close(s.draining)
	close(s.stopping)
	close(s.forceStop)
}

// Serve runs the engine and HTTP until ctx ends, then shuts down in stages. It waits for extra.
func (a *App) Serve(ctx context.Context, listener net.Listener, extra ...func(ctx context.Context) error) error {
	manager := sdnotify.New(func(name string) string { return a.Environ[name] })
	watchdog, stopWatchdog := context.WithCancel(context.WithoutCancel(ctx))
	var watchdogs sync.WaitGroup
	watchdogs.Go(func() { manager.Watchdog(watchdog) })
	defer watchdogs.Wait()
	defer stopWatchdog()
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	return a.Run(work, append(extra, func(work context.Context) error {
		defer end()
		return a.serveHTTP(work, ctx.Done(), listener, manager)
	})...)
}

// serveHTTP serves until stop closes and the requests in flight are done, or until work ends.
func (a *App) serveHTTP(
	work context.Context, stop <-chan struct{}, listener net.Listener, manager *sdnotify.Manager,
) error {
	stages := NewStages()
	handler, err := a.Handler(stages)
	if err != nil {
		return err
	}
	server := api.Server(handler, a.Log)
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
	a.drain(work, stages, server)
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	return nil
}

// drain runs the shutdown phases. After a failed engine it waits for cutTimeout at most.
func (a *App) drain(work context.Context, stages Stages, server *http.Server) {
	began := time.Now()
	close(stages.draining)
	a.Log.InfoContext(work, "stopping", "drain_delay", a.Config.DrainDelay)
	select {
	case <-time.After(a.Config.DrainDelay):
	case <-work.Done():
	}
	close(stages.stopping)
	closing, cancel := context.WithTimeout(work, a.Config.ShutdownTimeout)
	err := server.Shutdown(closing)
	cancel()
	close(stages.forceStop)
	if err != nil {
		last, cancel := context.WithTimeout(context.WithoutCancel(work), cutTimeout)
		err = server.Shutdown(last)
		cancel()
	}
	if err != nil {
		err = errors.Join(err, server.Close())
		a.Log.WarnContext(work, "requests cut off", "error", err)
	}
	a.Log.InfoContext(work, "HTTP stopped", "after", time.Since(began))
}

// notify reports a state to the service manager.
func (a *App) notify(ctx context.Context, manager *sdnotify.Manager, state string) {
	if err := manager.Tell(state); err != nil {
		a.Log.WarnContext(ctx, "service manager not notified", "state", state, "error", err)
	}
}
