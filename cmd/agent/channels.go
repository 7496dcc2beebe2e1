package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/channels"
)

func (c *cli) channelsCommand() *cobra.Command {
	return group("channels", "List channels, senders and maybe-sent messages; pair senders; enable, disable",
		c.channelsListCommand(), c.channelsShowCommand(), c.channelSendsCommand(), c.pairingsCommand(), c.pairCommand(),
		c.unpairCommand(), c.channelsSwitchCommand(true), c.channelsSwitchCommand(false))
}

func (c *cli) channelsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List channels with their state", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := channels.List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, all, "", "no channels; declare one with kind: channel and agent apply",
				[]string{
					"CHANNEL", "TYPE", "STATE", "WAITING", "QUEUED", "MAYBE SENT", "FAILED", "TO PAIR", "LAST IN", "LAST OUT",
					"ERROR",
				},
				func(x channels.Channel) []string {
					in, out := "", ""
					if x.LastInAt != nil {
						in = formatTime(*x.LastInAt)
					}
					if x.LastOutAt != nil {
						out = formatTime(*x.LastOutAt)
					}
					return []string{
						x.Name, x.Type, x.Status(), fmt.Sprint(x.Waiting), fmt.Sprint(x.Queued), fmt.Sprint(x.MaybeSent),
						fmt.Sprint(x.Failed), fmt.Sprint(x.Pairings), in, out, truncate(x.Error, 80),
					}
				})
		}),
	}
}

func (c *cli) channelsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show NAME", Short: "Show one channel, without its secrets", Args: positionalArgs(1, 1, "a channel's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			x, err := channels.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return channelHint(err)
			}
			return c.print(x, func(w io.Writer) {
				seen := ""
				if x.SeenAt != nil {
					seen = formatTime(*x.SeenAt)
				}
				writeFields(w, "%-12s %s\n", [][2]string{
					{"channel", x.Name},
					{"type", x.Type},
					{"agent", x.Agent},
					{"state", x.Status()},
					{"error", x.Error},
					{"since", formatTime(x.StateAt)},
					{"heard from", seen},
					{"pairing", x.Pairing},
					{"reports to", x.ReportTo},
					{"waiting", fmt.Sprint(x.Waiting)},
					{"queued", fmt.Sprint(x.Queued)},
					{"maybe sent", fmt.Sprint(x.MaybeSent)},
					{"failed", fmt.Sprint(x.Failed)},
					{"to pair", fmt.Sprint(x.Pairings)},
				})
			})
		}),
	}
}

func (c *cli) channelSendsCommand() *cobra.Command {
	var f channels.SendFilter
	cmd := &cobra.Command{
		Use: "sends", Short: "List messages that were maybe sent or given up, newest first",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			sends, next, err := readPage(cmd.Context(), s, channels.Sends, &f, &f.Limit,
				func(x channels.Sent) string { return x.MessageID })
			if err != nil {
				return err
			}
			return printRows(c, sends, next, "no message was maybe sent or given up",
				[]string{"MESSAGE", "CHANNEL", "THREAD", "STATUS", "ATTEMPTS", "CREATED", "ERROR"},
				func(x channels.Sent) []string {
					return []string{
						x.MessageID, x.Channel, x.ThreadID, x.Status, fmt.Sprint(x.Attempts), formatTime(x.CreatedAt),
						truncate(x.Error, 60),
					}
				})
		}),
	}
	cmd.Flags().StringVar(&f.Channel, "channel", "", "only this channel")
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

// maxSenders bounds the listed senders.
const maxSenders = 500

func (c *cli) pairingsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "pairings", Short: "List the senders of channels, waiting senders first; at most 500",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := channels.Identities(cmd.Context(), s.Pool, maxSenders)
			if err != nil {
				return err
			}
			return printRows(c, all, "", "nobody has written to a channel that requires pairing",
				[]string{"CHANNEL", "SENDER", "NAME", "STATUS", "EXPIRES", "PAIRED BY"}, func(x channels.Identity) []string {
					until := ""
					if x.ExpiresAt != nil {
						until = formatTime(*x.ExpiresAt)
					}
					return []string{x.Channel, x.Subject, truncate(x.Name, 40), x.Status, until, x.PairedBy}
				})
		}),
	}
}

func (c *cli) pairCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "pair CODE", Short: "Pair a sender by its code; it may then write as a visitor",
		Args: positionalArgs(1, 1, "a pairing code"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			var paired channels.Identity
			input := map[string]any{"reason": reason}
			_, err := recordChange(cmd.Context(), s, "pair_sender", input, func(tx pgx.Tx, _ string) (_ bool, err error) {
				paired, err = channels.Pair(cmd.Context(), tx, args[0], actor(cmd.Context()))
				input["channel"], input["sender"] = paired.Channel, paired.Subject
				return err == nil, err
			})
			if errors.Is(err, channels.ErrCode) {
				return hint(err, "the sender gets a new code by writing again")
			}
			if err != nil {
				return err
			}
			return c.print(paired, func(w io.Writer) {
				fmt.Fprintf(w, "%s (%s) may write to %s\n", printable(paired.Name), printable(paired.Subject), paired.Channel)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	return cmd
}

func (c *cli) unpairCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "unpair CHANNEL SENDER", Short: "Forget a sender; it then needs a new code",
		Args: positionalArgs(2, 2, "a channel's name and a sender's id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			input := map[string]any{"channel": args[0], "sender": args[1], "reason": reason}
			changed, err := recordChange(cmd.Context(), s, "unpair_sender", input, func(tx pgx.Tx, _ string) (bool, error) {
				return channels.Unpair(cmd.Context(), tx, args[0], args[1])
			})
			if err != nil {
				return err
			}
			if !changed {
				return hint(errors.New("the channel has no such sender"), "see agent channels pairings")
			}
			return c.print(map[string]any{"channel": args[0], "sender": args[1], "changed": changed}, func(w io.Writer) {
				fmt.Fprintf(w, "%s may not write to %s any more\n", printable(args[1]), args[0])
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	return cmd
}

func (c *cli) channelsSwitchCommand(enable bool) *cobra.Command {
	var reason string
	word := map[bool]string{true: "enable", false: "disable"}[enable]
	cmd := &cobra.Command{
		Use: word + " NAME", Short: map[bool]string{true: "Enable", false: "Disable"}[enable] + " a channel",
		Args: positionalArgs(1, 1, "a channel's name"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			input := map[string]any{"channel": args[0], "reason": reason}
			changed, err := recordChange(cmd.Context(), s, word+"_channel", input, func(tx pgx.Tx, _ string) (bool, error) {
				return channels.Set(cmd.Context(), tx, args[0], enable, actor(cmd.Context()), reason)
			})
			if err != nil {
				return channelHint(err)
			}
			return c.print(map[string]any{"name": args[0], "enabled": enable, "changed": changed}, func(w io.Writer) {
				was := ""
				if !changed {
					was = " already"
				}
				fmt.Fprintf(w, "channel %s is %sd%s\n", args[0], word, was)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "from the command line", "reason for the audit log")
	return cmd
}

func channelHint(err error) error {
	if errors.Is(err, channels.ErrNotFound) {
		return hint(err, "see agent channels ls")
	}
	return err
}
