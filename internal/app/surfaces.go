package app

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/email"
	"github.com/lanekeeper/lanekeeper/channels/slack"
	"github.com/lanekeeper/lanekeeper/channels/telegram"
	"github.com/lanekeeper/lanekeeper/evals"
	evalrunner "github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/models/offline"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// surfaces are the entry points of the agent and its dispatchers.
type surfaces struct {
	Operate   *operate.Operate
	Chat      *chat.Chat
	Webhook   *webhook.Surface
	Runner    *runner.Runner
	outgoing  *webhooks.Dispatcher
	threads   *threads.Dispatcher
	Channels  *channels.Runner
	MCPServer *mcp.Server
	Evals     *evalrunner.Runner
}

// registerSurfaces builds the surfaces and registers their flows.
func (a *App) registerSurfaces() (err error) {
	cfg := a.Config
	a.Operate, err = operate.New(operate.Options{
		Pool: a.Pool, Engine: a.Engine, Keeper: a.Keeper, Loop: a.Loop, Logger: a.Log, Agent: cfg.Name,
		Idle: cfg.Operate.Idle, Tools: []reason.Tool{a.Loop.DelegateTool(a.Engine, adminScopes())},
	})
	if err != nil {
		return err
	}
	a.Chat = &chat.Chat{
		Pool: a.Pool, Front: a.reserved.visitors, Engine: a.Engine, Loop: a.Loop, Logger: a.Log, Agents: a.Loop.Agents,
		DoubleTexting: chat.DoubleTexting(cfg.Chat.DoubleTexting), Rate: cfg.Chat.Rate, MaxBody: int64(cfg.Chat.MaxBytes),
		DocumentBytes: int64(cfg.DocumentMaxBytes),
		ApprovalWait:  cfg.Chat.ApprovalWait, Listener: a.listener,
		Visitor: func(r *http.Request) string {
			name, _ := api.VisitorFrom(r.Context())
			return name
		},
		EmbedOrigins: cfg.Chat.EmbedOrigins,
		Browser:      func(key string) bool { return slices.Contains(cfg.Chat.BrowserKeys, key) },
	}
	a.Webhook = &webhook.Surface{
		Pool: a.Pool, RequestPool: a.reserved.visitors, Engine: a.Engine, Loop: a.Loop, Logger: a.Log, Agent: cfg.Name,
		Getenv: a.Getenv, Received: a.metrics.Delivery,
	}
	a.Runner = &runner.Runner{
		Pool: a.Pool, Loop: a.Loop, Engine: a.Engine, Logger: a.Log, Listener: a.listener, Agent: cfg.Name,
	}
	client, err := skills.NewGuardedClient(cfg.PrivateHTTP, nil)
	if err != nil {
		return fmt.Errorf("prepare outgoing webhooks: %w", err)
	}
	a.outgoing = &webhooks.Dispatcher{
		Pool: a.Pool, Client: client, Logger: a.Log, Listener: a.listener, Getenv: a.Getenv,
		PublicURL: a.Config.PublicURL,
	}
	a.threads = &threads.Dispatcher{Pool: a.Pool, Client: client, Logger: a.Log, Listener: a.listener, Getenv: a.Getenv}
	a.Channels = &channels.Runner{
		Pool: a.Pool, Keeper: a.Keeper, Listener: a.listener, Logger: a.Log, Client: client, Getenv: a.Getenv,
		Open: map[string]channels.Open{
			channels.Telegram: telegram.Open, channels.Slack: slack.Open, channels.Email: email.Open,
		},
		Accept: a.Chat.Accept, MaxFile: int64(cfg.DocumentMaxBytes), Principals: approvers{a.Pool}, PublicURL: cfg.PublicURL,
	}
	a.MCPServer = &mcp.Server{
		Pool: a.admin(), Engine: a.Engine, Skills: a.Registry, Invoke: a.Loop.Invoke, Agent: cfg.Name,
		Agents: a.Loop.Agents, Version: a.Version, Logger: a.Log,
	}
	a.Evals = &evalrunner.Runner{
		Pool: a.Pool, Engine: a.Engine, Model: a.Loop.Model, Skills: a.Registry, Agents: a.Loop.Agents, Budget: a.Loop.Budget,
		Logger: a.Log, Surfaces: evalSurfaces(), Version: a.Version, Setup: modelSetup(cfg),
	}
	beat := &heartbeat.Heartbeat{Pool: a.Pool, Loop: a.Loop, Heal: HealPolicy(cfg), Logger: a.Log}
	return errors.Join(beat.Register(a.Engine), a.Chat.Register(a.Engine), a.Webhook.Register(a.Engine),
		a.Runner.Register(), a.MCPServer.Register(), a.Evals.Register())
}

// background lists the loops that run beside the engine.
func (s *surfaces) background() []func(ctx context.Context) error {
	return []func(ctx context.Context) error{
		s.Chat.Run, s.Runner.Run, s.outgoing.Run, s.threads.Run, s.Channels.Run, s.Evals.Serve,
	}
}

// modelSetup returns a short hash of the settings that determine the answers and costs of model calls.
func modelSetup(cfg config.Config) string {
	text := fmt.Appendf(nil, "%q %q %q %v %v", cfg.OpenAIBaseURL, cfg.OpenAIKey.Reveal(), cfg.Model, cfg.Prices,
		cfg.Budget.MaxCostUSD)
	p := cfg.Provider
	for i, part := range []string{p.HeadersJSON.Reveal(), p.QueryJSON.Reveal(), p.ExtraJSON} {
		if part != "" {
			text = fmt.Appendf(text, " %d %q", i, part)
		}
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:4])
}

// adminScopes are the scopes of the skills that an admin's agent may call: all.
func adminScopes() []string {
	return []string{skills.ScopeInternal, skills.ScopeExternal, skills.ScopeBoth}
}

// evalSurfaces are the surfaces whose rules and skills a suite of evals may use.
func evalSurfaces() map[string]evalrunner.Surface {
	return map[string]evalrunner.Surface{
		"chat":    {Rules: chat.Rules, Scopes: []string{skills.ScopeExternal}},
		"operate": {Rules: operate.Rules, Scopes: adminScopes()},
	}
}

// EvalInstallation returns the same installation for evals as the runner of an [App], without an App.
func EvalInstallation(cfg config.Config, version string) evals.Installation {
	runner := evalrunner.Runner{
		Agents: NewDirectory(cfg), Surfaces: evalSurfaces(), Version: version, Setup: modelSetup(cfg),
	}
	model := cmp.Or(cfg.Model, DefaultModel)
	if isOffline(cfg) {
		model = offline.Model
	}
	return runner.Installation(model)
}

// approvers finds the principals of accounts that press buttons in channels. Only a linked account has a principal;
// pairing creates none.
type approvers struct{ pool *pgxpool.Pool }

// Approver implements [channels.Principals].
func (a approvers) Approver(
	ctx context.Context, issuer, subject, via, message string,
) (context.Context, string, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return nil, "", channels.ErrNotLinked
	case err != nil:
		return nil, "", err
	case !p.Role.May(principals.ApprovalsDecide):
		return nil, "", channels.ErrMayNot
	}
	return actingFor(ctx, p, via, message), p.Name, nil
}

// Asking implements [channels.Principals].
func (a approvers) Asking(ctx context.Context, issuer, subject, via, message string) (context.Context, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	if errors.Is(err, principals.ErrNotFound) {
		return ctx, nil
	}
	if err != nil {
		return nil, err
	}
	return actingFor(ctx, p, via, message), nil
}

func actingFor(ctx context.Context, p principals.Principal, via, message string) context.Context {
	return activity.WithActor(ctx, activity.Actor{Name: p.Name, Via: via, MessageID: message})
}
