package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) threadsCommand() *cobra.Command {
	return group("threads", "See conversations, and who holds them",
		c.threadsListCommand(), c.threadsShowCommand(), c.threadsLocksCommand(), c.threadsSendCommand(), c.threadsCleanCommand(),
		c.threadsInviteCommand(), c.threadsOpenCommand(), c.threadsAccessCommand(), c.threadsRevokeCommand())
}

func (c *cli) threadsListCommand() *cobra.Command {
	var f threads.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List threads, the one that was spoken in last first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := threads.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, t := range got {
					rows[i] = []string{t.ID, t.Name, t.Channel, strings.TrimSpace(string(t.OwnerKind) + " " + t.Owner), t.Participant, fmt.Sprint(t.NextSeq - 1), when(t.UpdatedAt)}
				}
				return table(w, "no threads", []string{"THREAD", "NAME", "CHANNEL", "OWNER", "PARTICIPANT", "MESSAGES", "LAST"}, rows)
			})
		}),
	}
	cmd.Flags().StringVar(&f.Channel, "channel", "", "only those begun over this channel: chat, operate, …")
	cmd.Flags().StringVar(&f.Owner, "owner", "", "only those of this owner: the name of a chat key, …")
	actingFlag(cmd.Flags(), &f.Agent)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) threadsShowCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "show ID", Short: "Show the latest messages of a thread, oldest first", Args: args(1, 1, "a thread's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			thread, err := threads.Find(cmd.Context(), s.pool, args[0])
			if errors.Is(err, threads.ErrNotFound) {
				return hint(fmt.Errorf("thread %q: %w", args[0], err), "see agent threads ls")
			}
			if err != nil {
				return err
			}
			messages, err := threads.Messages(cmd.Context(), s.pool, threads.MessageFilter{ThreadID: thread.ID, Limit: limit})
			if err != nil {
				return err
			}
			slices.Reverse(messages)
			return c.print(struct {
				Thread   threads.Thread    `json:"thread"`
				Messages []threads.Message `json:"messages"`
			}{thread, messages}, func(w io.Writer) error { return writeThread(w, thread, messages) })
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

// writeThread shows a conversation to a person.
func writeThread(w io.Writer, t threads.Thread, messages []threads.Message) error {
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
		fmt.Fprintf(w, "\nsummary up to %d:\n%s\n", t.SummaryThrough, speech(t.Summary))
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
		fmt.Fprintf(w, "\n%s  %s  %s%s  %s\n%s\n", place, m.Role, m.Status, note, when(m.CreatedAt), speech(m.Content))
	}
	return nil
}

func (c *cli) threadsLocksCommand() *cobra.Command {
	var stale bool
	cmd := &cobra.Command{
		Use: "locks", Short: "List the threads that are held, since their holder's last sign of life", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := threads.Locks(cmd.Context(), s.pool, stale)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, l := range got {
					state := "active"
					switch {
					case l.Parked:
						state = "parked"
					case l.Stale:
						state = "stale"
					}
					rows[i] = []string{l.ThreadID, l.ParticipantName, l.Holder, when(l.ExecutionLockedAt), fmt.Sprint(l.LockMinutes), state, fmt.Sprint(l.Queued)}
				}
				return table(w, "no thread is held", []string{"THREAD", "PARTICIPANT", "HOLDER", "SINCE", "MINUTES", "STATE", "QUEUED"}, rows)
			})
		}),
	}
	cmd.Flags().BoolVar(&stale, "stale", false, "only those whose holder has given no sign of life for the time of the lease")
	return cmd
}
