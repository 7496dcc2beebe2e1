package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) threadsSendCommand() *cobra.Command {
	var o threads.Outgoing
	cmd := &cobra.Command{
		Use: "send THREAD TEXT", Short: "Say something in a thread, as the admin",
		Long: `Say something in a thread. When an execution holds the thread the message is queued, and leaves when the thread is free.
What is said is recorded.`,
		Args: args(2, 2, "a thread's id and a text"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			ctx := cmd.Context()
			o.ThreadID, o.Content = args[0], args[1]
			var sent threads.SendResult
			what := fmt.Sprintf("thread %q", o.ThreadID)
			err := new(postgres.KeyedTx).Try(ctx, what, func(ctx context.Context) (err error) {
				sent, err = sendAsAdmin(ctx, s.pool, o)
				return err
			})
			err = postgres.ExplainLock(ctx, s.pool, err, what, "agent_locks", "agent_threads")
			switch {
			case errors.Is(err, threads.ErrNotFound):
				return hint(fmt.Errorf("thread %q: %w", args[0], threads.ErrNotFound), "see agent threads ls")
			case err != nil:
				return err
			}
			return c.print(struct {
				Success bool `json:"success"`
				threads.SendResult
			}{true, sent}, func(w io.Writer) error {
				if sent.Queued {
					_, err := fmt.Fprintf(w, "queued behind %s\n", printable(sent.Holder))
					return err
				}
				_, err := fmt.Fprintf(w, "sent as message %d\n", *sent.Seq)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&o.Channel, "channel", "", "chat, webhook or log; default the thread's")
	cmd.Flags().StringVar(&o.Target, "target", "", "of channel webhook: the outgoing target; default the thread's")
	return cmd
}

func (c *cli) threadsCleanCommand() *cobra.Command {
	return &cobra.Command{
		Use: "clean", Short: "Free the threads whose holder has ended, is gone, or has been silent for too long",
		Long: `Free the threads whose holder has ended, is gone, or has not sent anything for the thread's idle time (ten minutes
unless it was set otherwise), and send what is queued in them. A running agent does this by itself: at once where
something is queued, after five more minutes elsewhere. The threads of waiting executions stay theirs.`,
		Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			freed, err := threads.Clean(cmd.Context(), s.pool, slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			names := make([]string, len(freed))
			for i, f := range freed {
				names[i] = f.ThreadID
			}
			_, err = act(cmd.Context(), s, "clean_threads", map[string]any{"changed": names}, func(pgx.Tx, string) (bool, error) { return len(freed) > 0, nil })
			if err != nil {
				return err
			}
			for _, f := range freed {
				if _, err := threads.Flush(cmd.Context(), s.pool, f.ThreadID); err != nil && !errors.Is(err, threads.ErrNotFound) {
					return err
				}
			}
			return c.print(listing(freed, ""), func(w io.Writer) error {
				rows := make([][]string, len(freed))
				for i, f := range freed {
					rows[i] = []string{f.ThreadID, f.Holder, fmt.Sprintf("%d", f.IdleSeconds/60)}
				}
				return table(w, "nothing to free", []string{"FREED", "HOLDER", "IDLE MINUTES"}, rows)
			})
		}),
	}
}

// sendAsAdmin sends a message of nobody who could hold the thread, and keeps a record of it.
func sendAsAdmin(ctx context.Context, db postgres.Beginner, o threads.Outgoing) (sent threads.SendResult, err error) {
	a := activity.Act{Name: "send_message", Reason: "an admin's own message", Input: map[string]any{"thread_id": o.ThreadID}}
	_, err = activity.Record(ctx, db, a, func(tx pgx.Tx, _ string) (_ any, err error) {
		sent, err = threads.SendTx(ctx, tx, o)
		return map[string]any{"message_id": sent.MessageID, "queued": sent.Queued}, err
	})
	return sent, err
}
