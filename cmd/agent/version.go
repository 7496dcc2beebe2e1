package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/migrations"
)

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: args(0, 0, "no arguments"),
		RunE: func(*cobra.Command, []string) error {
			version := buildVersion()
			return c.print(map[string]any{"version": version, "schema": migrations.Version(), "go": runtime.Version()}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "agent %s, schema %d, %s\n", version, migrations.Version(), runtime.Version())
				return err
			})
		},
	}
}

// buildVersion is this program's version, as the build recorded it.
func buildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
