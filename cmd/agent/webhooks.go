package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func (c *cli) webhooksCommand() *cobra.Command {
	return group("webhooks", "See what other systems sent, send it through again, see who is told of events",
		c.webhooksListCommand(), c.webhooksShowCommand(), c.webhooksReplayCommand(), c.webhookEndpointsCommand(),
		c.webhookTargetsCommand(), c.webhooksSwitchCommand(true), c.webhooksSwitchCommand(false))
}

func (c *cli) webhooksListCommand() *cobra.Command {
	var f webhooks.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List deliveries, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1 // a row more tells whether there is another page
			got, err := webhooks.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			next := ""
			if len(got) > limit {
				got, next = got[:limit], got[limit-1].ID
			}
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, d := range got {
					rows[i] = []string{
						d.ID, d.Endpoint, clipped(d.DeliveryID, 40), d.Status, fmt.Sprint(d.Attempts), when(d.ReceivedAt), d.LastTraceID,
						clipped(deref(d.ErrorMessage), 60),
					}
				}
				return table(w, "no delivery matches; `agent webhooks endpoints` shows where others post to",
					[]string{"DELIVERY", "ENDPOINT", "SENDER'S ID", "STATUS", "ATTEMPTS", "RECEIVED", "TRACE", "ERROR"}, rows)
			})
		}),
	}
	cmd.Flags().StringVar(&f.Endpoint, "endpoint", "", "only what came to this endpoint")
	statusFlag(cmd.Flags(), &f.Status, "only this state", webhooks.Statuses()...)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

func (c *cli) webhooksShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one delivery with its headers and body, without secrets",
		Args: args(1, 1, "a delivery's id, or the sender's"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			d, err := webhooks.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return deliveryHint(err)
			}
			shown, err := webhook.Show(cmd.Context(), s.pool, d)
			if err != nil {
				return err
			}
			return c.print(shown, func(w io.Writer) error { return writeDelivery(w, shown) })
		}),
	}
}

// deliveryHint says where ids are listed.
func deliveryHint(err error) error {
	switch {
	case errors.Is(err, webhooks.ErrNotFound):
		return hint(err, "see agent webhooks ls")
	case errors.Is(err, webhooks.ErrInProgress):
		return hint(err, "see agent webhooks show, and replay it when it is done, ignored or dead")
	}
	return err
}

func writeDelivery(w io.Writer, d webhook.Shown) error {
	next := ""
	if d.NextAttemptAt != nil {
		next = when(*d.NextAttemptAt)
	}
	for _, l := range [][2]string{
		{"delivery", d.ID},
		{"endpoint", d.Endpoint},
		{"sender's id", d.DeliveryID},
		{"status", d.Status},
		{"attempts", fmt.Sprint(d.Attempts)},
		{"next attempt", next},
		{"error", deref(d.ErrorMessage)},
		{"received", when(d.ReceivedAt)},
		{"came again", fmt.Sprint(d.Repeats)},
		{"other bodies", fmt.Sprintf("%d, of which none was handled", d.Conflicts)},
		{"replayed", fmt.Sprint(d.Replays)},
		{"first trace", d.TraceID},
		{"last trace", d.LastTraceID},
		{"execution", deref(d.ExecutionID)},
		{"sender's trace", d.Traceparent},
		{"body", fmt.Sprintf("%d bytes, sha256 %s", d.BodyBytes, d.BodySHA256)},
	} {
		if l[1] != "" {
			fmt.Fprintf(w, "%-15s %s\n", l[0], printable(l[1]))
		}
	}
	writeForeign(w, "headers", d.Headers)
	writeForeign(w, "body", d.Body)
	writeForeign(w, "outcome", d.Outcome)
	for _, o := range d.OtherBodies {
		writeForeign(w, "another body, received "+when(o.ReceivedAt)+", sha256 "+o.BodySHA256, o.Body)
	}
	return nil
}

// writeForeign shows JSON that somebody outside wrote: as JSON, so that nothing in it can steer a terminal.
func writeForeign(w io.Writer, heading string, value json.RawMessage) {
	var indented bytes.Buffer
	if len(value) == 0 || json.Indent(&indented, value, "  ", "  ") != nil {
		return
	}
	fmt.Fprintf(w, "\n%s\n", heading)
	for line := range strings.Lines("  " + indented.String()) {
		fmt.Fprintln(w, printable(strings.TrimSuffix(line, "\n")))
	}
}

func (c *cli) webhooksReplayCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "replay ID", Short: "Handle a delivery again that is done, ignored or dead", Args: args(1, 1, "a delivery's id, or the sender's"),
		Long: `Handle a delivery again, with a new execution and a new trace, by what its endpoint says now. One that is being handled is
left alone. The work is done by a process that runs agent serve or agent dev.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			keeper := lanes.NewKeeper(s.pool, lanes.Options{Logger: s.log, Disabled: !s.config.LanesEnabled})
			engine, err := executions.New(s.pool, executions.Options{Keeper: keeper, Logger: s.log})
			if err != nil {
				return err
			}
			d, err := webhooks.Get(cmd.Context(), s.pool, args[0])
			if err == nil {
				surface := &webhook.Surface{Pool: s.pool, Engine: engine, Logger: s.log}
				d, err = surface.Replay(cmd.Context(), d.ID, d.Replays, reason)
			}
			if err != nil {
				return deliveryHint(err)
			}
			return c.print(webhook.Replayed{ID: d.ID, TraceID: d.LastTraceID, ExecutionID: deref(d.ExecutionID), Replays: d.Replays},
				func(w io.Writer) error {
					_, err := fmt.Fprintf(w, "replay %d of %s began; see agent trace %s\n", d.Replays, d.ID, d.LastTraceID)
					return err
				})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

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
