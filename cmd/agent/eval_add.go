package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
)

func (c *cli) evalAddCommand() *cobra.Command {
	var name, to string
	cmd := &cobra.Command{
		Use: "add TRACE", Short: "Make a case from a trace",
		Long: `Make a case from a trace: its messages, and stubs of the calls that it made. It is redacted and needs the trace no more.
Print it as YAML, or append it to the cases of a file that ends with them. Its expectations are those calls in their order;
write down what should have happened instead.`,
		Example: "  agent eval add ch_01JD3V7K8ZQ6W2M5T9X4C1B0AE --name \"refund not due\" --to workspace/evals.yaml",
		Args:    positionalArgs(1, 1, "a trace id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			story, err := activity.TraceOf(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return err
			}
			made, err := evals.FromTrace(story, name)
			if errors.Is(err, evals.ErrNoCase) {
				return hint(err, "see agent trace %s", args[0])
			}
			if err != nil {
				return err
			}
			if to != "" {
				if err := c.appendCase(to, made); err != nil {
					return err
				}
				return c.printf(made, "added %q to %s; edit what it expects\n", made.Name, to)
			}
			text, err := made.YAML()
			if err != nil {
				return err
			}
			return c.print(made, func(w io.Writer) { fmt.Fprint(w, text) })
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "the name of the case instead of the trace's id")
	cmd.Flags().StringVar(&to, "to", "", "append it to this file")
	return cmd
}

// appendCase appends a case to a file whose last document ends with its cases.
func (c *cli) appendCase(path string, made evals.Case) error {
	file, err := c.openFile(path)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	before, err := io.ReadAll(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	text, err := made.YAML()
	if err != nil {
		return err
	}
	after := strings.TrimRight(string(before), "\n") + "\n" + text
	if err := evals.CheckAppended(before, []byte(after), made.Name); err != nil {
		return hint(fmt.Errorf("%s cannot be appended to: %w", path, err),
			"it must end with the cases of one kind: eval, indented by two; print the case without --to")
	}
	return c.writeFile(path, []byte(after), true)
}
