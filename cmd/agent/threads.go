package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
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
			list, err := threads.List(cmd.Context(), s.Pool, f)
			if err != nil {
				return err
			}
			return printRows(c, list, "", "no threads",
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
			note += fmt.Sprintf(", by %s after %d %s", strings.TrimSpace(m.Channel+" "+printable(m.Target)), m.Attempts,
				plural("attempt", m.Attempts))
		}
		if m.ErrorMessage != nil {
			note += ": " + printable(*m.ErrorMessage)
		}
		fmt.Fprintf(w, "\n%s  %s  %s%s  %s\n%s\n", place, m.Role, m.Status, note,
			formatTime(*cmp.Or(m.SentAt, &m.CreatedAt)), printableText(m.Content))
	}
}

func (c *cli) threadsLocksCommand() *cobra.Command {
	var stale bool
	cmd := &cobra.Command{
		Use: "locks", Short: "List held threads with their holder's last heartbeat",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			locks, err := threads.Locks(cmd.Context(), s.Pool, stale)
			if err != nil {
				return err
			}
			return printRows(c, locks, "", "no held threads",
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

func (c *cli) threadsSendCommand() *cobra.Command {
	var o threads.Outgoing
	cmd := &cobra.Command{
		Use: "send THREAD TEXT", Short: "Send a message to a thread as the admin",
		Long: `Send a message to a thread. While an execution holds the thread, the message is queued until its release. The
message is recorded.`,
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
		Long: `Release threads whose holder ended, died or sent nothing for the thread's idle time (default ten minutes), and
send their queued messages. A running agent does this itself: at once for threads with a queue, five minutes later for
others. Waiting executions keep their threads.`,
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
