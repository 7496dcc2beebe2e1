package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func (c *cli) webhooksCommand() *cobra.Command {
	return group("webhooks", "List received webhooks, endpoints and targets; replay, enable, disable",
		c.webhooksListCommand(), c.webhooksShowCommand(), c.webhooksReplayCommand(), c.webhookEndpointsCommand(),
		c.webhookTargetsCommand(), c.webhooksSwitchCommand(true), c.webhooksSwitchCommand(false))
}

func (c *cli) webhooksListCommand() *cobra.Command {
	var f webhooks.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List deliveries, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			list, next, err := readPage(cmd.Context(), s, webhooks.List, &f, &f.Limit,
				func(d webhooks.Delivery) string { return d.ID })
			if err != nil {
				return err
			}
			return printRows(c, list, next, "no matching deliveries; see `agent webhooks endpoints`",
				[]string{"DELIVERY", "ENDPOINT", "SENDER'S ID", "STATUS", "ATTEMPTS", "RECEIVED", "TRACE", "ERROR"},
				func(d webhooks.Delivery) []string {
					return []string{
						d.ID, d.Endpoint, truncate(d.DeliveryID, 40), d.Status, fmt.Sprint(d.Attempts),
						formatTime(d.ReceivedAt), d.LastTraceID,
						truncate(postgres.Deref(d.ErrorMessage), 60),
					}
				})
		}),
	}
	cmd.Flags().StringVar(&f.Endpoint, "endpoint", "", "only this endpoint")
	statusFlag(cmd.Flags(), &f.Status, "only this state", webhooks.Statuses()...)
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) webhooksShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one delivery with its headers and body, without secrets",
		Args: positionalArgs(1, 1, "a delivery's id, or the sender's"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := webhooks.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return deliveryHint(err)
			}
			shown, err := webhook.Show(cmd.Context(), s.Pool, d)
			if err != nil {
				return err
			}
			return c.print(shown, func(w io.Writer) { writeDelivery(w, shown) })
		}),
	}
}

func deliveryHint(err error) error {
	switch {
	case errors.Is(err, webhooks.ErrNotFound):
		return hint(err, "see agent webhooks ls")
	case errors.Is(err, webhooks.ErrInProgress):
		return hint(err, "see agent webhooks show, and replay it once it is done, ignored or dead")
	}
	return err
}

func writeDelivery(w io.Writer, d webhook.Shown) {
	next := ""
	if d.NextAttemptAt != nil {
		next = formatTime(*d.NextAttemptAt)
	}
	writeFields(w, "%-15s %s\n", [][2]string{
		{"delivery", d.ID},
		{"endpoint", d.Endpoint},
		{"sender's id", d.DeliveryID},
		{"status", d.Status},
		{"attempts", fmt.Sprint(d.Attempts)},
		{"next attempt", next},
		{"error", postgres.Deref(d.ErrorMessage)},
		{"received", formatTime(d.ReceivedAt)},
		{"repeats", fmt.Sprint(d.Repeats)},
		{"other bodies", fmt.Sprintf("%d, none processed", d.Conflicts)},
		{"replayed", fmt.Sprint(d.Replays)},
		{"first trace", d.TraceID},
		{"last trace", d.LastTraceID},
		{"execution", postgres.Deref(d.ExecutionID)},
		{"sender's trace", d.Traceparent},
		{"body", fmt.Sprintf("%d bytes, sha256 %s", d.BodyBytes, d.BodySHA256)},
	})
	writeUntrustedJSON(w, "headers", d.Headers)
	writeUntrustedJSON(w, "body", d.Body)
	writeUntrustedJSON(w, "outcome", d.Outcome)
	for _, o := range d.OtherBodies {
		writeUntrustedJSON(w, "another body, received "+formatTime(o.ReceivedAt)+", sha256 "+o.BodySHA256, o.Body)
	}
}

func (c *cli) webhooksReplayCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "replay ID", Short: "Process a done, ignored or dead delivery again",
		Args: positionalArgs(1, 1, "a delivery's id, or the sender's"),
		Long: `Process a delivery again with its endpoint's current definition, a new execution and a new trace. A delivery
in progress stays untouched. A process that runs agent serve or agent dev does the work.`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			keeper := lanes.NewKeeper(s.Pool, lanes.Options{Logger: s.log, Disabled: !s.config.LanesEnabled})
			engine, err := executions.New(s.Pool, executions.Options{Keeper: keeper, Logger: s.log})
			if err != nil {
				return err
			}
			d, err := webhooks.Get(cmd.Context(), s.Pool, args[0])
			if err == nil {
				surface := &webhook.Surface{Pool: s.Pool, Engine: engine, Logger: s.log}
				d, err = surface.Replay(cmd.Context(), d.ID, d.Replays, reason)
			}
			if err != nil {
				return deliveryHint(err)
			}
			return c.print(webhook.Replayed{
				ID: d.ID, TraceID: d.LastTraceID, ExecutionID: postgres.Deref(d.ExecutionID),
				Replays: d.Replays,
			},
				func(w io.Writer) {
					fmt.Fprintf(w, "replay %d of %s started; see agent trace %s\n", d.Replays, d.ID, d.LastTraceID)
				})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// shownEndpoint is an endpoint with the error of its secrets, such as a missing or weak one. The error is that of this
// process; the serving process may have other secrets.
type shownEndpoint struct {
	webhooks.Endpoint
	Path         string `json:"path"`
	SecretsError string `json:"secrets_error"`
}

func (c *cli) getenv(name string) string { return cmp.Or(c.environ[name], c.references[name]) }

func (c *cli) webhookEndpointsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "endpoints", Short: "List the endpoints for incoming webhooks", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := webhooks.Endpoints(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			shown := make([]shownEndpoint, len(all))
			rows := make([][]string, len(all))
			for i, e := range all {
				shown[i] = shownEndpoint{Endpoint: e, Path: "/webhooks/" + e.Name}
				_, err := webhooks.Secrets(e.Secrets, c.getenv)
				if err = errors.Join(err, webhooks.CheckTokens(e.Scheme, e.Secrets, c.getenv)); err != nil {
					shown[i].SecretsError = err.Error()
				}
				rows[i] = []string{
					e.Name, string(e.Scheme), serviceState(e.Enabled, e.DisabledReason), fmt.Sprint(len(e.Actions)), shown[i].Path,
					truncate(shown[i].SecretsError, 80),
				}
			}
			return c.print(pageOf(shown, ""), func(w io.Writer) {
				writeTable(w, "no endpoints; declare one with kind: webhook and agent apply",
					[]string{"ENDPOINT", "SCHEME", "STATE", "ACTIONS", "PATH", "SECRETS ERROR"}, rows)
			})
		}),
	}
}

func (c *cli) webhookTargetsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "targets", Short: "List the targets of outgoing webhooks", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := webhooks.Targets(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, all, "", "no targets; declare one with kind: webhook_target and agent apply",
				[]string{"TARGET", "URL", "EVENTS", "STATE", "FAILURES", "PENDING", "DEAD"}, func(t webhooks.Target) []string {
					return []string{
						t.Name, truncate(t.URL, 60), strings.Join(t.Events, " "), serviceState(t.Enabled, t.DisabledReason),
						fmt.Sprint(t.Failures),
						fmt.Sprint(t.Pending), fmt.Sprint(t.Dead),
					}
				})
		}),
	}
}

func serviceState(enabled bool, reason string) string {
	if enabled {
		return "enabled"
	}
	return "disabled: " + truncate(reason, 60)
}

func (c *cli) webhooksSwitchCommand(enable bool) *cobra.Command {
	var reason string
	var target bool
	use, short := "disable NAME", "Disable an endpoint, or with --target a target"
	if enable {
		use, short = "enable NAME", "Enable an endpoint, or with --target a target"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "a name"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.switchWebhook(cmd.Context(), s, args[0], target, enable, reason)
		}),
	}
	cmd.Flags().BoolVar(&target, "target", false, "NAME is a target of outgoing webhooks")
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	return cmd
}

// switchWebhook enables or disables an endpoint or a target, and records the change in one transaction.
func (c *cli) switchWebhook(ctx context.Context, s *session, name string, target, enable bool, reason string) error {
	set, kind, list, verb := webhooks.SetEndpoint, "endpoint", "endpoints; a target needs --target", "disable_webhook"
	if enable {
		verb = "enable_webhook"
	}
	if target {
		set, kind, list, verb = webhooks.SetTarget, "target", "targets", verb+"_target"
	}
	changed, err := recordChange(ctx, s, verb, map[string]any{kind: name, "reason": reason},
		func(tx pgx.Tx, _ string) (bool, error) {
			return set(ctx, tx, name, enable, actor(ctx), reason)
		})
	if errors.Is(err, webhooks.ErrNotFound) {
		return hint(err, "see agent webhooks %s", list)
	}
	if err != nil {
		return err
	}
	word := map[bool]string{true: "enabled", false: "disabled"}[enable]
	return c.print(map[string]any{"name": name, "kind": kind, "enabled": enable, "changed": changed}, func(w io.Writer) {
		was := ""
		if !changed {
			was = " already"
		}
		fmt.Fprintf(w, "%s %s is %s%s\n", kind, name, word, was)
	})
}
