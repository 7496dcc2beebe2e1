package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func (c *cli) threadsInviteCommand() *cobra.Command {
	var in threads.Invitation
	cmd := &cobra.Command{
		Use: "invite THREAD", Short: "Create a join token for a thread",
		Long: `Create a join token. A visitor joins the thread with the header X-Thread-Join or at /chat#join=TOKEN. It is
printed once, is valid for one visitor or reusable until it expires, and can be revoked: agent threads revoke.`,
		Args: positionalArgs(1, 1, "a thread's id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if in.Life <= 0 || in.Life > threads.MaxTokenLife {
				return usageError("--expires %s: use more than 0 and at most %s", in.Life, threads.MaxTokenLife)
			}
			in.ThreadID, in.By = args[0], grantor(cmd.Context())
			var token threads.Token
			err := recordThreadChange(cmd.Context(), s, "invite_into_thread", "a join token was given out", args[0],
				map[string]any{}, func(tx pgx.Tx) (_ any, err error) {
					token, err = threads.Invite(cmd.Context(), tx, in)
					return map[string]any{"access_id": token.ID}, err
				})
			if err != nil {
				return err
			}
			return c.printf(token, "%s\nvalid until %s; revoke it with: agent threads revoke %s %s\n", token.Secret,
				formatTime(token.ExpiresAt), printable(args[0]), token.ID)
		}),
	}
	cmd.Flags().BoolVar(&in.Reusable, "reusable", false, "valid for any number of visitors until it expires")
	cmd.Flags().DurationVar(&in.Life, "expires", threads.DefaultTokenLife, "lifetime, at most 720h")
	return cmd
}

func (c *cli) threadsOpenCommand() *cobra.Command {
	var key, flow, webhook, name string
	cmd := &cobra.Command{
		Use: "open THREAD", Short: "Open a thread to a chat key, a flow or a webhook endpoint",
		Args:    positionalArgs(1, 1, "a thread's id"),
		Example: "  agent threads open th_… --key shop --name maria\n  agent threads open th_… --flow support",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			to := threads.Key(key)
			switch {
			case key+flow+webhook == "" || key != "" && flow+webhook != "" || flow != "" && webhook != "" ||
				flow != "" && name != "":
				return usageError("name one of --key, --flow and --webhook; --name belongs to --key and --webhook")
			case flow != "":
				to = threads.Principal{Kind: threads.ByFlow, Owner: flow}
			case webhook != "":
				to = threads.Principal{Kind: threads.ByWebhook, Owner: webhook}
			}
			if err := checkGrantee(cmd.Context(), s, to); err != nil {
				return err
			}
			called := cmp.Or(name, args[0])
			var id string
			input := map[string]any{string(to.Kind): to.Owner}
			err := recordThreadChange(cmd.Context(), s, "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner,
				args[0], input, func(tx pgx.Tx) (_ any, err error) {
					id, err = threads.Grant(cmd.Context(), tx, args[0], to, called, grantor(cmd.Context()))
					return map[string]any{"access_id": id}, err
				})
			if errors.Is(err, threads.ErrTaken) {
				return hint(fmt.Errorf("%s %s has another thread %q", to.Kind, to.Owner, called), "give this one another --name")
			}
			if err != nil {
				return err
			}
			return c.printf(map[string]string{"id": id, "thread_id": args[0]}, "open to %s %s; revoke it with: agent threads "+
				"revoke %s %s\n", to.Kind, printable(to.Owner), printable(args[0]), id)
		}),
	}
	cmd.Flags().StringVar(&key, "key", "", "the name of a chat key")
	cmd.Flags().StringVar(&flow, "flow", "", "the name of a flow")
	cmd.Flags().StringVar(&webhook, "webhook", "", "the name of a webhook endpoint")
	cmd.Flags().StringVar(&name, "name", "", "the thread's name for the key or endpoint; default its id")
	return cmd
}

// checkGrantee rejects an unknown participant. Flows of other programs and chat keys of other servers cannot be
// checked here.
func checkGrantee(ctx context.Context, s *session, to threads.Principal) error {
	switch keys := slices.Sorted(maps.Keys(s.config.ChatKeys)); {
	case to.Kind == threads.ByWebhook:
		if _, err := webhooks.GetEndpoint(ctx, s.Pool, to.Owner); err != nil {
			return hint(err, "a workspace declares endpoints; see agent apply")
		}
	case to.Kind != threads.ByKey || len(keys) == 0:
	case !slices.Contains(keys, to.Owner):
		return usageError("there is no chat key named %q; AGENT_CHAT_KEY has %s", to.Owner, strings.Join(keys, ", "))
	case slices.Contains(s.config.Chat.BrowserKeys, to.Owner):
		return usageError("visitors of the browser key %q have their own tokens; create a join token with agent threads "+
			"invite", to.Owner)
	}
	return nil
}

func (c *cli) threadsAccessCommand() *cobra.Command {
	return &cobra.Command{
		Use: "access THREAD", Short: "List the access grants and join tokens of a thread",
		Args: positionalArgs(1, 1, "a thread's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if _, err := threads.Get(cmd.Context(), s.Pool, args[0]); err != nil {
				return threadHint(args[0], err)
			}
			list, err := threads.AccessOf(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return err
			}
			return printRows(c, list, "", "no access grants",
				[]string{"ACCESS", "KIND", "WHO", "NAME", "STATE", "BY", "SINCE"}, func(a threads.Access) []string {
					return []string{
						a.ID, a.Kind, printable(a.Owner), printable(a.Name), accessState(a), printable(a.CreatedBy),
						formatTime(a.CreatedAt),
					}
				})
		}),
	}
}

// accessState returns the state of a join token; "" for a participant.
func accessState(a threads.Access) string {
	switch {
	case a.Kind != "token":
		return ""
	case a.UsedAt != nil && !a.Reusable:
		return "used"
	case a.ExpiresAt != nil && a.ExpiresAt.Before(time.Now()):
		return "expired"
	}
	return "valid"
}

func (c *cli) threadsRevokeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "revoke THREAD ACCESS", Short: "Revoke access to a thread; revoking a join token also ends its visitors' access",
		Args: positionalArgs(2, 2, "the ids of a thread and of an access"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			err := recordThreadChange(cmd.Context(), s, "revoke_thread_access", "an access to a thread was revoked", args[0],
				map[string]any{"access_id": args[1]}, func(tx pgx.Tx) (any, error) {
					return map[string]any{"access_id": args[1]}, threads.Revoke(cmd.Context(), tx, args[0], args[1])
				})
			if postgres.IsCode(err, "22P02") {
				return usageError("%q is not the id of an access; see agent threads access %s", args[1], args[0])
			}
			if err != nil {
				return err
			}
			return c.printf(map[string]any{"id": args[1], "revoked": true}, "revoked\n")
		}),
	}
}

// recordThreadChange changes a thread and records it in one transaction.
func recordThreadChange(
	ctx context.Context, s *session, skill, purpose, thread string, input map[string]any,
	change func(tx pgx.Tx) (output any, err error),
) error {
	input["thread_id"] = thread
	_, err := activity.Record(ctx, s.Pool, activity.Act{Name: skill, Reason: purpose, Input: input},
		func(tx pgx.Tx, _ string) (any, error) { return change(tx) })
	return threadHint(thread, err)
}

func threadHint(thread string, err error) error {
	switch {
	case errors.Is(err, threads.ErrNoAccess):
		return hint(threads.ErrNoAccess, "see agent threads access %s", thread)
	case errors.Is(err, threads.ErrNotFound):
		return hint(fmt.Errorf("thread %q: %w", thread, threads.ErrNotFound), "use an id of agent threads ls, not a name")
	case errors.Is(err, threads.ErrInvalid):
		return usageError("%s", threads.ErrInvalid)
	}
	return err
}

// grantor names who gives access to a thread: the caller of a server, or the local command line.
func grantor(ctx context.Context) string {
	if caller := principals.From(ctx); caller != nil {
		return caller.Name
	}
	return "command line"
}
