package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/webhooks"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) applyCommand() *cobra.Command {
	var opts applyOptions
	cmd := &cobra.Command{
		Use:   "apply DIR",
		Short: "Make the database match a workspace folder",
		Long: `Make skills, automations and objectives in the database match the YAML files in DIR, in one transaction, and show
what changes. Applying twice changes nothing the second time. What the agent learned and what an admin decided stays.
An objective that an admin has changed in the database (agent objectives add) and that a file declares otherwise is an error.
What an earlier apply declared and no file declares now is kept and listed. --prune removes it; on a terminal, apply
shows the list and asks.

With --watch, for development, it applies DIR again after each change of a file, until ^C. A mistake is shown with its file, line and
column, and the last good state stays. It never asks, and removes only with --prune.`,
		Example: "  agent apply ./workspace --dry-run\n  agent apply ./workspace --prune\n  agent apply ./workspace --watch",
		Args:    args(1, 1, "a folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" { // a variable that is not set; to dev it means the example, which would add to everything
				return usageError("DIR is empty; name the folder of the workspace")
			}
			opts.dir = args[0]
			if opts.watch {
				return c.applyAndWatch(cmd, opts)
			}
			files, err := readWorkspace(opts.dir)
			if err != nil {
				return err
			}
			return c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
				return c.apply(cmd.Context(), s, files, opts)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&opts.dry, "dry-run", false, "only show what would change")
	cmd.Flags().BoolVar(&opts.watch, "watch", false, "apply again after each change of a file, until ^C; for development")
	pruneFlag(cmd.Flags(), &opts.prune)
	return cmd
}

// applyOptions are the flags of agent apply.
type applyOptions struct {
	dir               string
	dry, prune, watch bool
}

// pruneFlag is the flag that allows removals without a question.
func pruneFlag(flags *pflag.FlagSet, into *bool) {
	flags.BoolVar(into, "prune", false, "remove what an earlier apply declared and no file declares now")
}

// apply changes the database, or only says what would change, and shows it.
func (c *cli) apply(ctx context.Context, s *session, files workspace.Workspace, opts applyOptions) error {
	diff, err := c.change(ctx, s, files, opts)
	if err != nil {
		return err
	}
	c.warn(diff)
	diff.Items = append([]workspace.Item{}, diff.Items...)
	return c.print(diff, func(w io.Writer) error { return writeDiff(w, diff, opts) })
}

// change makes the database match the files, or only plans it.
func (c *cli) change(ctx context.Context, s *session, files workspace.Workspace, opts applyOptions) (workspace.Diff, error) {
	var none workspace.Diff
	if err := c.checkTokens(files); err != nil {
		return none, err
	}
	names, err := c.goFlows(ctx, s)
	if err != nil {
		return none, err
	}
	files.GoFlows, files.Also = names, syncHeartbeats(s)
	named := c.namedDatabases(s)
	defer named.Close()
	decided, err := c.decideRemovals(ctx, s, files, opts, named)
	if err != nil {
		return none, err
	}
	put := applyFiles
	if opts.dry {
		put = workspace.Plan
	}
	diff, err := put(ctx, s.pool, files, decided)
	diff.Warnings = append(diff.Warnings, doubts(files.Agents, s.config)...)
	return diff, err
}

// namedDatabases opens the named databases of a workspace. The caller closes it.
func (c *cli) namedDatabases(s *session) *databases.Client {
	return &databases.Client{DB: s.pool, Getenv: c.getenv}
}

// warn tells what an apply could not check.
func (c *cli) warn(diff workspace.Diff) {
	for _, warning := range diff.Warnings {
		c.say("warning: %s", printable(warning))
	}
}

// writeDiff shows what an apply has changed and what it kept.
func writeDiff(w io.Writer, diff workspace.Diff, opts applyOptions) error {
	switch {
	case diff.Empty():
		declared := len(diff.Items) - diff.Count(workspace.Keep)
		fmt.Fprintf(w, "nothing to change: the database matches all %d of %s\n", declared, opts.dir)
	default:
		if err := diff.WriteText(w); err != nil {
			return err
		}
		fmt.Fprintln(w, map[bool]string{true: "nothing was changed: this was a dry run", false: "applied"}[opts.dry])
	}
	_, err := io.WriteString(w, keptText(diff, "agent apply "+opts.dir))
	return err
}

// keptText says what an apply has kept, and how to remove it; empty when it kept nothing.
func keptText(diff workspace.Diff, command string) string {
	kept := diff.Of(workspace.Keep)
	if len(kept) == 0 {
		return ""
	}
	return fmt.Sprintf("kept, though no file declares it: %s; %s --prune removes it\n", itemNames(kept), command)
}

// itemNames lists rows for a person.
func itemNames(items []workspace.Item) string {
	all := make([]string, len(items))
	for i, item := range items {
		all[i] = item.Kind + " " + item.Name
	}
	return strings.Join(all, ", ")
}

// syncHeartbeats gives the agents that are applied their heartbeats, in the same transaction.
func syncHeartbeats(s *session) func(ctx context.Context, tx pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error { return heartbeat.Sync(ctx, tx, directory(s.config), false) }
}

// decideRemovals says which rows an apply may remove: all with --prune, those that a person at a terminal has seen and
// agreed to, else none.
func (c *cli) decideRemovals(
	ctx context.Context, s *session, files workspace.Workspace, opts applyOptions, named *databases.Client,
) (workspace.Options, error) {
	keep := workspace.Options{Reach: named.Reach}
	if opts.prune {
		return workspace.Options{Prune: workspace.All, Reach: named.Reach}, nil
	}
	if opts.dry || opts.watch || c.json || !terminal(c.in) || !terminal(c.err) {
		return keep, nil
	}
	planned, err := workspace.Plan(ctx, s.pool, files, workspace.Options{Prune: workspace.All, Reach: named.Reach})
	if used, ok := errors.AsType[*workspace.InUseError](err); ok {
		c.say("nothing is removed: %s", used)
		return keep, nil
	}
	if err != nil {
		return keep, err
	}
	removals := planned.Of(workspace.Remove)
	if len(removals) == 0 {
		return keep, nil
	}
	c.say("An earlier apply declared this, and no file of %s declares it now:", cmp.Or(opts.dir, "the example"))
	for _, item := range removals {
		c.say("- %s %s", item.Kind, item.Name)
	}
	yes, err := c.confirm(ctx, fmt.Sprintf("Remove %d %s?", len(removals), plural("row", len(removals))))
	if err != nil || !yes {
		return keep, err
	}
	agreed := func(item workspace.Item) bool {
		return slices.ContainsFunc(removals, func(seen workspace.Item) bool {
			return seen.Kind == item.Kind && seen.Name == item.Name
		})
	}
	return workspace.Options{Prune: agreed, Reach: named.Reach}, nil
}

// confirm asks a person at the terminal. Only y or yes is a yes.
func (c *cli) confirm(ctx context.Context, question string) (yes bool, err error) {
	fmt.Fprintf(c.err, "%s [y/N] ", question)
	answered := make(chan string, 1)
	go func() { answered <- readLine(c.in) }() // a read cannot be interrupted; it ends with the process
	select {
	case <-ctx.Done():
		return false, &exitError{exitInterrupted, nil}
	case line := <-answered:
		answer := strings.ToLower(strings.TrimSpace(line))
		return answer == "y" || answer == "yes", nil
	}
}

// checkTokens refuses endpoints whose bearer tokens are set here and too weak.
func (c *cli) checkTokens(files workspace.Workspace) error {
	var problems []error
	for _, d := range files.Webhooks {
		if err := webhooks.CheckTokens(d.Definition.Scheme, d.Definition.Secrets, c.getenv); err != nil {
			problems = append(problems, fmt.Errorf("%s: webhook %s: %w", d.At, d.Definition.Name, err))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return &exitError{exitUsage, errors.Join(problems...)}
}

// applyFiles applies a workspace and declares the builtins: before, because an automation may call one, and after,
// because one that the workspace used to replace is back when it no longer does.
func applyFiles(
	ctx context.Context, db postgres.Beginner, files workspace.Workspace, o workspace.Options,
) (workspace.Diff, error) {
	if _, err := builtins.Put(ctx, db); err != nil {
		return workspace.Diff{}, err
	}
	diff, err := workspace.Apply(ctx, db, files, o)
	if err != nil {
		return workspace.Diff{}, err
	}
	_, err = builtins.Put(ctx, db)
	return diff, err
}
