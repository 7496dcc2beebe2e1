package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/webhooks"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) applyCommand() *cobra.Command {
	var dry bool
	cmd := &cobra.Command{
		Use:   "apply DIR",
		Short: "Make the database match a workspace folder",
		Long: `Make skills, automations and objectives in the database match the YAML files in DIR, in one transaction, and show
what changes. Applying twice changes nothing the second time. What the agent learned and what an admin decided stays.
An objective that an admin has changed in the database (agent objectives add) and that a file declares otherwise is an error.
What an earlier apply declared and no file declares now is removed: files that are all empty remove everything.`,
		Example: "  agent apply ./workspace --dry-run",
		Args:    args(1, 1, "a folder"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" { // a variable that is not set; to dev it means the example, which would replace everything
				return usageError("DIR is empty; name the folder of the workspace")
			}
			files, err := readWorkspace(args[0])
			if err != nil {
				return err
			}
			return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
				return c.apply(cmd.Context(), s, args[0], files, dry)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only show what would change")
	return cmd
}

// apply changes the database, or only says what would change, and shows it.
func (c *cli) apply(ctx context.Context, s *session, dir string, files workspace.Workspace, dry bool) error {
	if err := c.checkTokens(files); err != nil {
		return err
	}
	names, err := c.goFlows(ctx, s)
	if err != nil {
		return err
	}
	files.GoFlows = names
	act := applyFiles
	if dry {
		act = workspace.Plan
	}
	diff, err := act(ctx, s.pool, files)
	if err != nil {
		return err
	}
	diff.Items = append([]workspace.Item{}, diff.Items...)
	return c.print(diff, func(w io.Writer) error {
		if diff.Empty() {
			_, err := fmt.Fprintf(w, "nothing to change: the database matches all %d of %s\n", len(diff.Items), dir)
			return err
		}
		if err := diff.WriteText(w); err != nil {
			return err
		}
		_, err := fmt.Fprintln(w, map[bool]string{true: "nothing was changed: this was a dry run", false: "applied"}[dry])
		return err
	})
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
func applyFiles(ctx context.Context, db postgres.Beginner, files workspace.Workspace) (workspace.Diff, error) {
	if _, err := builtins.Put(ctx, db); err != nil {
		return workspace.Diff{}, err
	}
	diff, err := workspace.Apply(ctx, db, files)
	if err != nil {
		return workspace.Diff{}, err
	}
	_, err = builtins.Put(ctx, db)
	return diff, err
}
