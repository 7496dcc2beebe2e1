package main

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/why"
)

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why ID | last",
		Short: "Say why a run happened, what it waited for and what came of it",
		Long: `Say why a run happened: what caused it, across other traces, from the first cause on; what it did and waited for; who had
which lane; workers lost and writes refused; what came of it, also in other traces; what it cost.

ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits that tracing tools show. The same in SQL:
select * from why('hb_01JD…').`,
		Example: "  agent why last\n  agent why last --surface heartbeat\n  agent why hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE --json",
		Args:    args(1, 1, "a trace id, or last"),
		RunE: c.reading(func(cmd *cobra.Command, args []string, s *session) error {
			return c.showWhy(cmd, s, args[0])
		}),
	}
	cmd.AddCommand(c.whyLastCommand())
	return cmd
}

func (c *cli) showWhy(cmd *cobra.Command, s *session, id string) error {
	answer, err := why.Of(cmd.Context(), s.read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.print(answer, func(w io.Writer) error { return why.Write(w, answer, c.colour()) })
}

func (c *cli) whyLastCommand() *cobra.Command {
	var surface string
	cmd := &cobra.Command{
		Use: "last", Short: "Say why the newest run happened", Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			return c.showWhy(cmd, s, newest)
		}),
	}
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}
