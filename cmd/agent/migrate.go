package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/migrations"
)

func (c *cli) migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "migrate",
		Short: "Bring the database's schema to this version",
		Long: `Bring the database's schema to this version of agent, River's tables included. Safe to run while others
run it, and while agent serves. A schema that a newer version made is refused.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			c.calm()
			cfg, log, err := c.settings()
			if err != nil {
				return err
			}
			s, err := c.open(ctx, cfg, log)
			if err != nil {
				return err
			}
			defer s.close(ctx)
			applied, err := s.migrate(ctx, c)
			if err != nil {
				return err
			}
			if _, err := builtins.Put(ctx, s.pool); err != nil {
				return err
			}
			missing, err := migrations.ClientMissing(ctx, s.pool)
			if err != nil {
				return err
			}
			if missing != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "other programs have no role for the SQL contract; let a superuser run this, then run agent migrate again:\n  %s\n", missing)
			}
			return c.print(map[string]any{"version": migrations.Version(), "applied": append([]string{}, applied...)}, func(w io.Writer) error {
				for _, name := range applied {
					fmt.Fprintln(w, "applied", name)
				}
				_, err := fmt.Fprintf(w, "schema version %d, up to date\n", migrations.Version())
				return err
			})
		},
	}
}
