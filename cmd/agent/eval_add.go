package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
)

func (c *cli) evalAddCommand() *cobra.Command {
	var name, to, outage string
	cmd := &cobra.Command{
		Use: "add [TRACE]", Short: "Make a case from a trace, or from an outage of a skill",
		Long: `Make a case from a trace: its messages, and stubs of the calls that it made. The case is redacted and
independent of the trace. Print it as YAML, or append it to the cases of a file that ends with them. The case expects
the same calls in the same order; edit its expectations.

With --outage the case has the messages of a run whose failure made self-heal disable the skill, and the skill fails at
every call. Cases of the suite "selfheal" run when their skill comes back from its trial; --to starts that suite in a
new file.`,
		Example: "  agent eval add ch_01JD3V7K8ZQ6W2M5T9X4C1B0AE --name \"refund not due\" --to workspace/evals.yaml\n" +
			"  agent eval add --outage fetch --to workspace/selfheal.yaml",
		Args: positionalArgs(0, 1, "a trace id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if (outage == "") == (len(args) == 0) {
				return usageError("give either a trace id or --outage SKILL")
			}
			if name != "" && !evals.ValidCaseName(name) {
				return usageError("--name must have 1 to 100 bytes in one line")
			}
			made, begin, err := evals.Case{}, "", error(nil)
			if outage != "" {
				made, begin, err = caseOfOutage(cmd.Context(), s, outage, name)
			} else {
				made, err = caseOfTrace(cmd.Context(), s, args[0], name)
			}
			if err != nil {
				return err
			}
			if to != "" {
				if err := c.appendCase(to, begin, made); err != nil {
					return err
				}
				return c.printf(made, "added %q to %s; edit its expectations\n", made.Name, to)
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
	cmd.Flags().StringVar(&outage, "outage", "", "the skill, instead of a trace")
	return cmd
}

func caseOfTrace(ctx context.Context, s *session, id, name string) (evals.Case, error) {
	story, err := activity.TraceOf(ctx, s.Pool, id)
	if err != nil {
		return evals.Case{}, err
	}
	made, err := evals.FromTrace(story, name)
	if errors.Is(err, evals.ErrNoCase) {
		return made, hint(err, "see agent trace %s", id)
	}
	return made, err
}

// caseOfOutage makes a case of the newest failure that a model caused, or else of the newest failure. begin is the text
// of a new file for the case.
func caseOfOutage(ctx context.Context, s *session, skill, name string) (made evals.Case, begin string, err error) {
	broken, err := skills.Get(ctx, s.Pool, skill)
	if err != nil {
		return made, "", skillHint(err)
	}
	var evidence selfheal.Evidence
	if json.Unmarshal(broken.Evidence, &evidence) != nil || len(evidence.Failures) == 0 {
		return made, "", hint(fmt.Errorf("self-heal has not taken %s out of service", skill),
			"see agent skills show %s", skill)
	}
	chosen, story := evidence.Failures[0], activity.Trace{}
	for i, f := range evidence.Failures {
		found, err := activity.TraceOf(ctx, s.Pool, f.TraceID)
		if errors.Is(err, activity.ErrNotFound) {
			continue // retention may have removed it
		}
		if err != nil {
			return made, "", err
		}
		_, none := evals.FromTrace(found, name)
		if i == 0 || none == nil {
			chosen, story = f, found
		}
		if none == nil {
			break
		}
	}
	surface := "operate"
	if broken.Scope != skills.ScopeInternal {
		surface = "chat"
	}
	made, err = evals.FromOutage(skill, chosen, story, name)
	return made, evals.OutageFile(surface), err
}

// appendCase appends a case to a file whose last document ends with its cases.
func (c *cli) appendCase(path, begin string, made evals.Case) error {
	before, err := c.readInput(path)
	if begin != "" && errors.Is(err, fs.ErrNotExist) {
		before, err = []byte(begin), nil
	}
	if err != nil {
		return err
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
