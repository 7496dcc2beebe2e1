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

	"github.com/lanekeeper/lanekeeper/webhooks"
)

// shownEndpoint is an endpoint with whether its secrets can be read here; which is no proof for another process.
type shownEndpoint struct {
	webhooks.Endpoint
	Path         string `json:"path"`
	SecretsError string `json:"secrets_error"`
}

func (c *cli) getenv(name string) string { return cmp.Or(c.environ[name], c.references[name]) }

func (c *cli) webhookEndpointsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "endpoints", Short: "List where other systems post to", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := webhooks.Endpoints(cmd.Context(), s.pool)
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
					e.Name, string(e.Scheme), service(e.Enabled, e.DisabledReason), fmt.Sprint(len(e.Actions)), shown[i].Path,
					clipped(shown[i].SecretsError, 80),
				}
			}
			return c.print(listing(shown, ""), func(w io.Writer) error {
				return table(w, "there is no endpoint; declare one with kind: webhook and agent apply",
					[]string{"ENDPOINT", "SCHEME", "STATE", "ACTIONS", "PATH", "SECRETS MISSING HERE"}, rows)
			})
		}),
	}
}

func (c *cli) webhookTargetsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "targets", Short: "List who is told of the agent's own events", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := webhooks.Targets(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			return c.print(listing(all, ""), func(w io.Writer) error {
				rows := make([][]string, len(all))
				for i, t := range all {
					rows[i] = []string{
						t.Name, clipped(t.URL, 60), strings.Join(t.Events, " "), service(t.Enabled, t.DisabledReason), fmt.Sprint(t.Failures),
						fmt.Sprint(t.Pending), fmt.Sprint(t.Dead),
					}
				}
				return table(w, "there is no target; declare one with kind: webhook_target and agent apply",
					[]string{"TARGET", "URL", "EVENTS", "STATE", "FAILURES", "PENDING", "DEAD"}, rows)
			})
		}),
	}
}

// service says whether something is in service, and if not, why.
func service(enabled bool, reason string) string {
	if enabled {
		return "enabled"
	}
	return "disabled: " + clipped(reason, 60)
}

func (c *cli) webhooksSwitchCommand(enable bool) *cobra.Command {
	var reason string
	var target bool
	use, short := "disable NAME", "Take an endpoint, or with --target a target, out of service"
	if enable {
		use, short = "enable NAME", "Put an endpoint, or with --target a target, back into service"
	}
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "a name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.switchWebhook(cmd.Context(), s, args[0], target, enable, reason)
		}),
	}
	cmd.Flags().BoolVar(&target, "target", false, "NAME is a target of outgoing webhooks")
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "why, for the record")
	return cmd
}

func (c *cli) switchWebhook(ctx context.Context, s *session, name string, target, enable bool, reason string) error {
	set, kind, list, verb := webhooks.SetEndpoint, "endpoint", "endpoints", "disable_webhook"
	if enable {
		verb = "enable_webhook"
	}
	if target {
		set, kind, list, verb = webhooks.SetTarget, "target", "targets", verb+"_target"
	}
	changed, err := act(ctx, s, verb, map[string]any{kind: name, "reason": reason}, func(tx pgx.Tx, _ string) (bool, error) {
		return set(ctx, tx, name, enable, admin, reason)
	})
	if errors.Is(err, webhooks.ErrNotFound) {
		return hint(err, "see agent webhooks %s", list)
	}
	if err != nil {
		return err
	}
	word := map[bool]string{true: "enabled", false: "disabled"}[enable]
	return c.print(map[string]any{"name": name, "kind": kind, "enabled": enable, "changed": changed}, func(w io.Writer) error {
		was := ""
		if !changed {
			was = " already"
		}
		_, err := fmt.Fprintf(w, "%s %s is %s%s\n", kind, name, word, was)
		return err
	})
}
