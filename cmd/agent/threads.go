package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
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

func (c *cli) threadsCommand() *cobra.Command {
	return group("threads", "List conversations and their holders",
		c.threadsListCommand(), c.threadsShowCommand(), c.threadsLocksCommand(), c.threadsSendCommand(),
		c.threadsCleanCommand(),
		c.threadsInviteCommand(), c.threadsOpenCommand(), c.threadsAccessCommand(), c.threadsRevokeCommand())
}

func (c *cli) threadsListCommand() *cobra.Command {
	var f threads.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List threads, most recent first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := threads.List(cmd.Context(), s.Pool, f)
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no threads",
				[]string{"THREAD", "NAME", "CHANNEL", "OWNER", "PARTICIPANT", "MESSAGES", "LAST"}, func(t threads.Thread) []string {
					return []string{
						t.ID, t.Name, t.Channel, strings.TrimSpace(string(t.OwnerKind) + " " + t.Owner), t.Participant,
						fmt.Sprint(t.NextSeq - 1), formatTime(t.UpdatedAt),
					}
				})
		}),
	}
	cmd.Flags().StringVar(&f.Channel, "channel", "", "only this channel: chat, operate, …")
	cmd.Flags().StringVar(&f.Owner, "owner", "", "only this owner: the name of a chat key, …")
	actingFlag(cmd.Flags(), &f.Agent)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) threadsShowCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "show ID", Short: "Show the latest messages of a thread, oldest first",
		Args: positionalArgs(1, 1, "a thread's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			thread, err := threads.Find(cmd.Context(), s.Pool, args[0])
			if errors.Is(err, threads.ErrNotFound) {
				return hint(fmt.Errorf("thread %q: %w", args[0], err), "see agent threads ls")
			}
			if err != nil {
				return err
			}
			messages, err := threads.Messages(cmd.Context(), s.Pool, threads.MessageFilter{ThreadID: thread.ID, Limit: limit})
			if err != nil {
				return err
			}
			slices.Reverse(messages)
			return c.print(struct {
				Thread   threads.Thread    `json:"thread"`
				Messages []threads.Message `json:"messages"`
			}{thread, messages}, func(w io.Writer) { writeThread(w, thread, messages) })
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func writeThread(w io.Writer, t threads.Thread, messages []threads.Message) {
	about := printable(t.Channel)
	if t.Participant != "" {
		about += ", " + printable(t.Participant)
	}
	if t.Owner != "" {
		about += " of " + printable(t.Owner)
	}
	if t.Name != "" && t.Name != t.ID {
		about += ", called " + printable(t.Name)
	}
	fmt.Fprintf(w, "%s  %s\n", printable(t.ID), about)
	if t.Summary != "" {
		fmt.Fprintf(w, "\nsummary up to %d:\n%s\n", t.SummaryThrough, printableText(t.Summary))
	}
	for _, m := range messages {
		place, note := "-", ""
		if m.Seq != nil {
			place = fmt.Sprint(*m.Seq)
		}
		if m.Interrupted {
			note = ", interrupted"
		}
		if m.Channel == threads.ChannelWebhook || m.Channel == threads.ChannelLog {
			note += fmt.Sprintf(", by %s after %d attempts", strings.TrimSpace(m.Channel+" "+printable(m.Target)), m.Attempts)
		}
		if m.ErrorMessage != nil {
			note += ": " + printable(*m.ErrorMessage)
		}
		fmt.Fprintf(w, "\n%s  %s  %s%s  %s\n%s\n", place, m.Role, m.Status, note, formatTime(m.CreatedAt),
			printableText(m.Content))
	}
}

func (c *cli) threadsLocksCommand() *cobra.Command {
	var stale bool
	cmd := &cobra.Command{
		Use: "locks", Short: "List held threads with their holder's last heartbeat",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := threads.Locks(cmd.Context(), s.Pool, stale)
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no held threads",
				[]string{"THREAD", "PARTICIPANT", "HOLDER", "SINCE", "MINUTES", "STATE", "QUEUED"},
				func(l threads.HeldThread) []string {
					state := "active"
					switch {
					case l.Parked:
						state = "parked"
					case l.Stale:
						state = "stale"
					}
					return []string{
						l.ThreadID, l.ParticipantName, l.Holder, formatTime(l.ExecutionLockedAt),
						fmt.Sprint(l.LockMinutes), state, fmt.Sprint(l.Queued),
					}
				})
		}),
	}
	cmd.Flags().BoolVar(&stale, "stale", false, "only threads whose holder's lease has expired")
	return cmd
}

// commandLine is the recorded grantor of access.
const commandLine = "command line"

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

func (c *cli) threadsInviteCommand() *cobra.Command {
	in := threads.Invitation{By: commandLine}
	cmd := &cobra.Command{
		Use: "invite THREAD", Short: "Create a join token for a thread",
		Long: `Create a join token. A visitor joins the thread with the header X-Thread-Join or at /chat#join=TOKEN. It is printed
once, is valid for one visitor or reusable until it expires, and can be revoked: agent threads revoke.`,
		Args: positionalArgs(1, 1, "a thread's id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if in.Life <= 0 || in.Life > threads.MaxTokenLife {
				return usageError("--expires %s: use more than 0 and at most %s", in.Life, threads.MaxTokenLife)
			}
			in.ThreadID = args[0]
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
					id, err = threads.Grant(cmd.Context(), tx, args[0], to, called, commandLine)
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
			got, err := threads.AccessOf(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no access grants",
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

func (c *cli) threadsSendCommand() *cobra.Command {
	var o threads.Outgoing
	cmd := &cobra.Command{
		Use: "send THREAD TEXT", Short: "Send a message to a thread as the admin",
		Long: `Send a message to a thread. While an execution holds the thread, the message is queued until its release. The message
is recorded.`,
		Args: positionalArgs(2, 2, "a thread's id and a text"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			ctx := cmd.Context()
			o.ThreadID, o.Content = args[0], args[1]
			var sent threads.SendResult
			what := fmt.Sprintf("thread %q", o.ThreadID)
			err := new(postgres.KeyedTx).Try(ctx, what, func(ctx context.Context) (err error) {
				sent, err = sendAsAdmin(ctx, s.Pool, o)
				return err
			})
			err = postgres.ExplainLock(ctx, s.Pool, err, what, "agent_locks", "agent_threads")
			switch {
			case errors.Is(err, threads.ErrNotFound):
				return hint(fmt.Errorf("thread %q: %w", args[0], threads.ErrNotFound), "see agent threads ls")
			case err != nil:
				return err
			}
			return c.print(struct {
				Success bool `json:"success"`
				threads.SendResult
			}{true, sent}, func(w io.Writer) {
				if sent.Queued {
					fmt.Fprintf(w, "queued behind %s\n", printable(sent.Holder))
					return
				}
				fmt.Fprintf(w, "sent as message %d\n", *sent.Seq)
			})
		}),
	}
	cmd.Flags().StringVar(&o.Channel, "channel", "", "chat, webhook or log; default the thread's")
	cmd.Flags().StringVar(&o.Target, "target", "", "the outgoing target of channel webhook; default the thread's")
	return cmd
}

func (c *cli) threadsCleanCommand() *cobra.Command {
	return &cobra.Command{
		Use: "clean", Short: "Release threads whose holder ended, died or went silent",
		Long: `Release threads whose holder ended, died or sent nothing for the thread's idle time (default ten minutes), and send their
queued messages. A running agent does this itself: at once for threads with a queue, five minutes later for others.
Waiting executions keep their threads.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			freed, err := threads.Clean(cmd.Context(), s.Pool, slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			names := make([]string, len(freed))
			for i, f := range freed {
				names[i] = f.ThreadID
			}
			_, err = recordChange(cmd.Context(), s, "clean_threads", map[string]any{"changed": names},
				func(pgx.Tx, string) (bool, error) { return len(freed) > 0, nil })
			if err != nil {
				return err
			}
			for _, f := range freed {
				_, err := threads.Flush(cmd.Context(), s.Pool, slog.New(slog.DiscardHandler), f.ThreadID)
				if err != nil && !errors.Is(err, threads.ErrNotFound) {
					return err
				}
			}
			return printRows(c, freed, "", "nothing to release",
				[]string{"RELEASED", "HOLDER", "IDLE MINUTES"}, func(f threads.Freed) []string {
					return []string{f.ThreadID, f.Holder, fmt.Sprintf("%d", f.IdleSeconds/60)}
				})
		}),
	}
}

// sendAsAdmin sends a message outside any execution and records it.
func sendAsAdmin(ctx context.Context, db postgres.Beginner, o threads.Outgoing) (sent threads.SendResult, err error) {
	a := activity.Act{
		Name: "send_message", Reason: "an admin's own message",
		Input: map[string]any{"thread_id": o.ThreadID},
	}
	_, err = activity.Record(ctx, db, a, func(tx pgx.Tx, _ string) (_ any, err error) {
		sent, err = threads.SendTx(ctx, tx, o)
		return map[string]any{"message_id": sent.MessageID, "queued": sent.Queued}, err
	})
	return sent, err
}
