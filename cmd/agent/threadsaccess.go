package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// commandLine is who opens a thread by a command.
const commandLine = "command line"

// noted makes a change to a thread and records it.
func noted(ctx context.Context, s *session, skill, purpose, thread string, input map[string]any, change func(tx pgx.Tx) (output any, err error)) error {
	input["thread_id"] = thread
	_, err := activity.Record(ctx, s.pool, activity.Act{Name: skill, Reason: purpose, Input: input},
		func(tx pgx.Tx, _ string) (any, error) { return change(tx) })
	return threadHint(thread, err)
}

// threadHint says what to do about a thread that there is not.
func threadHint(thread string, err error) error {
	switch {
	case errors.Is(err, threads.ErrNoAccess):
		return hint(threads.ErrNoAccess, "see agent threads access %s", thread)
	case errors.Is(err, threads.ErrNotFound):
		return hint(fmt.Errorf("thread %q: %w", thread, threads.ErrNotFound), "agent threads ls has the ids; a name is not enough")
	case errors.Is(err, threads.ErrInvalid):
		return usageError("%s", threads.ErrInvalid)
	}
	return err
}

func (c *cli) threadsInviteCommand() *cobra.Command {
	in := threads.Invitation{By: commandLine}
	cmd := &cobra.Command{
		Use: "invite THREAD", Short: "Give out a join token, by which a visitor gets into a thread",
		Long: `Give out a join token. A visitor who sends it as the header X-Thread-Join, or opens /chat#join=TOKEN, gets into the thread. It is
shown once. It lets one visitor in, or any number until its end, and can be revoked: agent threads revoke.`,
		Args: args(1, 1, "a thread's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if in.Life <= 0 || in.Life > threads.MaxTokenLife {
				return usageError("--expires: %s is not more than 0 and at most %s", in.Life, threads.MaxTokenLife)
			}
			in.ThreadID = args[0]
			var token threads.Token
			err := noted(cmd.Context(), s, "invite_into_thread", "a join token was given out", args[0], map[string]any{}, func(tx pgx.Tx) (_ any, err error) {
				token, err = threads.Invite(cmd.Context(), tx, in)
				return map[string]any{"access_id": token.ID}, err
			})
			if err != nil {
				return err
			}
			return c.print(token, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s\nvalid until %s; to revoke it: agent threads revoke %s %s\n", token.Secret, when(token.ExpiresAt), printable(args[0]), token.ID)
				return err
			})
		}),
	}
	cmd.Flags().BoolVar(&in.Reusable, "reusable", false, "it lets any number of visitors in until its end")
	cmd.Flags().DurationVar(&in.Life, "expires", threads.DefaultTokenLife, "how long it is valid, at most 720h")
	return cmd
}

func (c *cli) threadsOpenCommand() *cobra.Command {
	var key, flow, webhook, name string
	cmd := &cobra.Command{
		Use: "open THREAD", Short: "Open a thread to a chat key, a flow or a webhook endpoint",
		Args:    args(1, 1, "a thread's id"),
		Example: "  agent threads open th_… --key shop --name maria\n  agent threads open th_… --flow support",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			to := threads.Key(key)
			switch {
			case key+flow+webhook == "" || key != "" && flow+webhook != "" || flow != "" && webhook != "" || flow != "" && name != "":
				return usageError("name one of --key, --flow and --webhook; --name belongs to --key and --webhook")
			case flow != "":
				to = threads.Principal{Kind: threads.ByFlow, Owner: flow}
			case webhook != "":
				to = threads.Principal{Kind: threads.ByWebhook, Owner: webhook}
			}
			if err := canBeLetIn(cmd.Context(), s, to); err != nil {
				return err
			}
			called := cmp.Or(name, args[0])
			var id string
			input := map[string]any{string(to.Kind): to.Owner}
			err := noted(cmd.Context(), s, "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner, args[0], input, func(tx pgx.Tx) (_ any, err error) {
				id, err = threads.Let(cmd.Context(), tx, args[0], to, called, commandLine)
				return map[string]any{"access_id": id}, err
			})
			if errors.Is(err, threads.ErrTaken) {
				return hint(fmt.Errorf("%s %s has another thread %q", to.Kind, to.Owner, called), "give this one another --name")
			}
			if err != nil {
				return err
			}
			return c.print(map[string]string{"id": id, "thread_id": args[0]}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "open to %s %s; to revoke it: agent threads revoke %s %s\n", to.Kind, printable(to.Owner), printable(args[0]), id)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&key, "key", "", "the name of a chat key")
	cmd.Flags().StringVar(&flow, "flow", "", "the name of a flow")
	cmd.Flags().StringVar(&webhook, "webhook", "", "the name of a webhook endpoint")
	cmd.Flags().StringVar(&name, "name", "", "what the key or the endpoint calls the thread; its id when left out")
	return cmd
}

// canBeLetIn refuses a participant that is not there, as far as that is known here: flows of other programs are not,
// nor are the keys of a server elsewhere.
func canBeLetIn(ctx context.Context, s *session, to threads.Principal) error {
	switch keys := slices.Sorted(maps.Keys(s.config.ChatKeys)); {
	case to.Kind == threads.ByWebhook:
		if _, err := webhooks.GetEndpoint(ctx, s.pool, to.Owner); err != nil {
			return hint(err, "a workspace declares endpoints; see agent apply")
		}
	case to.Kind != threads.ByKey || len(keys) == 0:
	case !slices.Contains(keys, to.Owner):
		return usageError("there is no chat key named %q; AGENT_CHAT_KEY has %s", to.Owner, strings.Join(keys, ", "))
	case slices.Contains(s.config.Chat.BrowserKeys, to.Owner):
		return usageError("each visitor of the key %q has a token of its own, so the key alone lets nobody in; give out a join token: agent threads invite", to.Owner)
	}
	return nil
}

func (c *cli) threadsAccessCommand() *cobra.Command {
	return &cobra.Command{
		Use: "access THREAD", Short: "List who was let into a thread, and its join tokens", Args: args(1, 1, "a thread's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if _, err := threads.Get(cmd.Context(), s.pool, args[0]); err != nil {
				return threadHint(args[0], err)
			}
			got, err := threads.AccessOf(cmd.Context(), s.pool, args[0])
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, a := range got {
					rows[i] = []string{a.ID, a.Kind, printable(a.Owner), printable(a.Name), accessState(a), printable(a.CreatedBy), when(a.CreatedAt)}
				}
				return table(w, "nobody was let in", []string{"ACCESS", "KIND", "WHO", "NAME", "STATE", "BY", "SINCE"}, rows)
			})
		}),
	}
}

// accessState says whether a join token lets somebody in; "" of a participant.
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
		Use: "revoke THREAD ACCESS", Short: "Revoke an access to a thread; with a join token goes everybody whom it has let in",
		Args: args(2, 2, "a thread's id and that of an access"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			err := noted(cmd.Context(), s, "revoke_thread_access", "an access to a thread was revoked", args[0], map[string]any{"access_id": args[1]}, func(tx pgx.Tx) (any, error) {
				return map[string]any{"access_id": args[1]}, threads.Revoke(cmd.Context(), tx, args[0], args[1])
			})
			if postgres.IsCode(err, "22P02") {
				return usageError("%q is not the id of an access; see agent threads access %s", args[1], args[0])
			}
			if err != nil {
				return err
			}
			return c.print(map[string]any{"id": args[1], "revoked": true}, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, "revoked")
				return err
			})
		}),
	}
}
