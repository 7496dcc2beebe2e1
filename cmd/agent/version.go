package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/migrations"
)

func (c *cli) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(*cobra.Command, []string) error { return c.printVersion() },
	}
}

func (c *cli) printVersion() error {
	built := buildVersion()
	about := map[string]any{"version": built, "schema": migrations.Version(), "go": runtime.Version()}
	return c.printf(about, "agent %s, schema %d, %s\n", built, migrations.Version(), runtime.Version())
}

// version is set by builds without a repository, such as the container image: -ldflags "-X main.version=v1.2.3".
var version string

// buildVersion is this program's version, as the build recorded it.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
