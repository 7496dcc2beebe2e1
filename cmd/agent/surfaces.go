package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// surfaces are the ways in which the agent is reached, and acts by itself.
type surfaces struct {
	operate  *operate.Operate
	chat     *chat.Chat
	webhook  *webhook.Surface
	runner   *runner.Runner
	outgoing *webhooks.Dispatcher
	threads  *threads.Dispatcher
	offered  *mcp.Server
}

// addSurfaces makes the surfaces and registers their flows.
func (a *app) addSurfaces() (err error) {
	cfg := a.config
	everything := []string{skills.ScopeInternal, skills.ScopeExternal, skills.ScopeBoth}
	a.operate, err = operate.New(operate.Options{
		Pool: a.pool, Engine: a.engine, Keeper: a.keeper, Loop: a.loop, Logger: a.log, Agent: cfg.Name,
		Idle: cfg.Operate.Idle, Tools: []reason.Tool{a.loop.DelegateTool(a.engine, everything)},
	})
	if err != nil {
		return err
	}
	a.chat = &chat.Chat{
		Pool: a.pool, Front: a.reserved.visitors, Engine: a.engine, Loop: a.loop, Logger: a.log, Agents: a.loop.Agents,
		DoubleTexting: chat.DoubleTexting(cfg.Chat.DoubleTexting), Rate: cfg.Chat.Rate, MaxBody: int64(cfg.Chat.MaxBytes), DocumentBytes: int64(cfg.DocumentMaxBytes),
		ApprovalWait: cfg.Chat.ApprovalWait, Listener: a.listener,
		Visitor: func(r *http.Request) string {
			name, _ := api.VisitorFrom(r.Context())
			return name
		},
		Browser: func(key string) bool { return slices.Contains(cfg.Chat.BrowserKeys, key) },
	}
	a.webhook = &webhook.Surface{
		Pool: a.pool, Front: a.reserved.visitors, Engine: a.engine, Loop: a.loop, Logger: a.log, Agent: cfg.Name, Getenv: a.getenv, Received: a.metrics.Delivery,
	}
	a.runner = &runner.Runner{
		Pool: a.pool, Loop: a.loop, Engine: a.engine, Logger: a.log, Listener: a.listener, Agent: cfg.Name,
	}
	guarded, err := skills.NewGuardedClient(cfg.PrivateHTTP, nil)
	if err != nil {
		return fmt.Errorf("prepare outgoing webhooks: %w", err)
	}
	a.outgoing = &webhooks.Dispatcher{
		Pool: a.pool, Client: guarded, Logger: a.log, Listener: a.listener, Getenv: a.getenv,
	}
	a.threads = &threads.Dispatcher{Pool: a.pool, Client: guarded, Logger: a.log, Listener: a.listener, Getenv: a.getenv}
	a.offered = &mcp.Server{
		Pool: a.adminPool(), Engine: a.engine, Skills: a.registry, Invoke: a.loop.Invoke, Agent: cfg.Name, Version: buildVersion(), Logger: a.log,
	}
	beat := &heartbeat.Heartbeat{Pool: a.pool, Loop: a.loop, Heal: healPolicy(cfg), Logger: a.log}
	return errors.Join(beat.Register(a.engine), a.chat.Register(a.engine), a.webhook.Register(a.engine),
		a.runner.Register(), a.offered.Register())
}

// beside lists what works beside the engine for as long as the process serves.
func (s *surfaces) beside() []func(ctx context.Context) error {
	return []func(ctx context.Context) error{s.chat.Run, s.runner.Run, s.outgoing.Run, s.threads.Run}
}
