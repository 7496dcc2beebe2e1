package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

func (c *cli) flowsCommand() *cobra.Command {
	return group("flows", "List flows: conversations and processes declared as data",
		c.flowsListCommand(), c.flowsShowCommand(), c.flowsSchemaCommand())
}

type listedFlow struct {
	Name        string     `json:"name"`
	Kind        string     `json:"kind"` // data, or go
	Version     *int       `json:"version"`
	Description string     `json:"description"`
	Source      string     `json:"source"`
	NextRun     *time.Time `json:"next_run_at"` // by a schedule of a Go flow
}

// maxFlows bounds the flows of the workspace in a list.
const maxFlows = 500

func (c *cli) flowsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the startable flows", Args: positionalArgs(0, 0, "no arguments"),
		Long: `List the flows that agent executions start accepts: workspace flows (agent apply), at most 500, and Go flows
of this program and of running servers. NEXT is the next time of a Go flow's schedules (Flow.SetSchedules).`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := flows.List(cmd.Context(), s.Pool, flows.Filter{Limit: maxFlows})
			if err != nil {
				return err
			}
			names, err := c.goFlows(cmd.Context(), s)
			if err != nil {
				return err
			}
			next, err := executions.NextRuns(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			listed := []listedFlow{}
			for _, f := range all {
				listed = append(listed, listedFlow{
					Name: f.Name, Kind: "data", Version: new(f.Version), Description: f.Definition.Description, Source: f.Source,
				})
			}
			for _, name := range names {
				if reservedFlows[executions.ReservedName(name)] != "" {
					continue
				}
				f := listedFlow{Name: name, Kind: "go"}
				if at, scheduled := next[name]; scheduled {
					f.NextRun = &at
				}
				listed = append(listed, f)
			}
			return printRows(c, listed, "", "no flows; `agent apply DIR` creates some",
				[]string{"FLOW", "KIND", "VERSION", "NEXT", "SOURCE", "ABOUT"}, func(f listedFlow) []string {
					version := ""
					if f.Version != nil {
						version = strconv.Itoa(*f.Version)
					}
					return []string{f.Name, f.Kind, version, optionalTime(f.NextRun), f.Source, truncate(f.Description, 60)}
				})
		}),
	}
}

func (c *cli) flowsShowCommand() *cobra.Command {
	var version int
	cmd := &cobra.Command{
		Use: "show NAME", Short: "Show a flow as YAML, and its versions", Args: positionalArgs(1, 1, "a flow's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			var f flows.Flow
			var err error
			if version > 0 {
				f, err = flows.GetVersion(cmd.Context(), s.Pool, args[0], version)
			} else {
				f, err = flows.Get(cmd.Context(), s.Pool, args[0])
			}
			if errors.Is(err, flows.ErrNotFound) {
				return c.noSuchFlow(cmd.Context(), s, args[0], version)
			}
			if err != nil {
				return err
			}
			kept, err := flows.List(cmd.Context(), s.Pool, flows.Filter{Name: f.Name, Limit: 20})
			if err != nil {
				return err
			}
			return c.tryPrint(f, func(w io.Writer) error { return writeFlow(w, f, kept) })
		}),
	}
	cmd.Flags().IntVar(&version, "version", 0, "this version instead of the current one")
	return cmd
}

// noSuchFlow distinguishes an unknown flow, a missing version, and a removed flow.
func (c *cli) noSuchFlow(ctx context.Context, s *session, name string, version int) error {
	kept, err := flows.List(ctx, s.Pool, flows.Filter{Name: name, Limit: 1})
	if err != nil {
		return err
	}
	if len(kept) == 0 {
		names, err := c.goFlows(ctx, s)
		if err != nil {
			return err
		}
		if slices.Contains(names, name) {
			return fmt.Errorf("flow %s is Go code and has no document", name)
		}
		return hint(fmt.Errorf("there is no flow %q", name), "see agent flows ls")
	}
	if version > 0 {
		return hint(fmt.Errorf("flow %s has no version %d: the latest is %d", name, version, kept[0].Version),
			"see agent flows show %s", name)
	}
	return hint(fmt.Errorf("flow %s was removed", name), "agent flows show %s --version %d shows its last version",
		name, kept[0].Version)
}

// writeFlow prints a flow as workspace YAML, with its versions.
func writeFlow(w io.Writer, f flows.Flow, kept []flows.Flow) error {
	fmt.Fprintf(w, "# version %d of %s, from %s\n", f.Version, formatTime(f.CreatedAt), printable(f.Source))
	for _, v := range kept {
		word := ""
		if v.Current {
			word = ", current"
		}
		fmt.Fprintf(w, "#   version %d of %s%s\n", v.Version, formatTime(v.CreatedAt), word)
	}
	shown, err := exactjson.YAML(f.Definition)
	if err != nil {
		return fmt.Errorf("show flow %s: %w", f.Name, err)
	}
	fmt.Fprintf(w, "kind: flow\n%s", shown)
	return nil
}

func (c *cli) flowsSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of flows, for editors and checks",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: `Print the JSON Schema of a flow document. A YAML language server validates a file that begins with
# yaml-language-server: $schema=flow.schema.json`,
		RunE: func(*cobra.Command, []string) error {
			schema, err := flows.JSONSchema()
			if err != nil {
				return err
			}
			return c.tryPrint(schema, func(w io.Writer) error {
				var tree any
				if err := json.Unmarshal(schema, &tree); err != nil {
					return fmt.Errorf("read own schema: %w", err)
				}
				return encodeJSON(w, tree)
			})
		},
	}
}

// goFlows lists the flows in Go, of this program and of live processes.
func (c *cli) goFlows(ctx context.Context, s *session) ([]string, error) {
	a, err := c.app(s, nil)
	if err != nil {
		return nil, err
	}
	return a.Engine.Flows(ctx)
}
