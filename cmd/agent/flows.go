package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/flows"
)

func (c *cli) flowsCommand() *cobra.Command {
	return group("flows", "See flows: conversations and processes that are written down as data",
		c.flowsListCommand(), c.flowsShowCommand(), c.flowsSchemaCommand())
}

// listedFlow is a flow in a listing.
type listedFlow struct {
	Name        string `json:"name"`
	Kind        string `json:"kind"` // data, or go
	Version     *int   `json:"version"`
	Description string `json:"description"`
	Source      string `json:"source"`
}

func (c *cli) flowsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the flows that can be started", Args: args(0, 0, "no arguments"),
		Long: `List the flows that can be started with agent executions start: those of the workspace (agent apply), and those of this
program in Go code.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := flows.List(cmd.Context(), s.pool, flows.Filter{Limit: 500})
			if err != nil {
				return err
			}
			names, err := c.goFlows(cmd.Context(), s)
			if err != nil {
				return err
			}
			listed := []listedFlow{}
			for _, f := range all {
				listed = append(listed, listedFlow{f.Name, "data", new(f.Version), f.Definition.Description, f.Source})
			}
			for _, name := range names {
				if reservedFlows[name] == "" {
					listed = append(listed, listedFlow{Name: name, Kind: "go"})
				}
			}
			return c.print(listing(listed, ""), func(w io.Writer) error {
				rows := make([][]string, len(listed))
				for i, f := range listed {
					version := ""
					if f.Version != nil {
						version = strconv.Itoa(*f.Version)
					}
					rows[i] = []string{f.Name, f.Kind, version, f.Source, clipped(f.Description, 60)}
				}
				return table(w, "no flows; `agent apply DIR` brings some", []string{"FLOW", "KIND", "VERSION", "SOURCE", "ABOUT"}, rows)
			})
		}),
	}
}

func (c *cli) flowsShowCommand() *cobra.Command {
	var version int
	cmd := &cobra.Command{
		Use: "show NAME", Short: "Show a flow as YAML, and its versions", Args: args(1, 1, "a flow's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			var f flows.Flow
			var err error
			if version > 0 {
				f, err = flows.GetVersion(cmd.Context(), s.pool, args[0], version)
			} else {
				f, err = flows.Get(cmd.Context(), s.pool, args[0])
			}
			if errors.Is(err, flows.ErrNotFound) {
				return c.noSuchFlow(cmd.Context(), s, args[0], version)
			}
			if err != nil {
				return err
			}
			kept, err := flows.List(cmd.Context(), s.pool, flows.Filter{Name: f.Name, Limit: 20})
			if err != nil {
				return err
			}
			return c.print(f, func(w io.Writer) error { return writeFlow(w, f, kept) })
		}),
	}
	cmd.Flags().IntVar(&version, "version", 0, "this version, not the current one")
	return cmd
}

// noSuchFlow says what is not there: a flow that is current, or a version of one.
func (c *cli) noSuchFlow(ctx context.Context, s *session, name string, version int) error {
	kept, err := flows.List(ctx, s.pool, flows.Filter{Name: name, Limit: 1})
	if err != nil {
		return err
	}
	if len(kept) == 0 {
		names, err := c.goFlows(ctx, s)
		if err != nil {
			return err
		}
		if slices.Contains(names, name) {
			return fmt.Errorf("flow %s is Go code of this program: it has no document to show", name)
		}
		return hint(fmt.Errorf("there is no flow %q", name), "see agent flows ls")
	}
	if version > 0 {
		return hint(fmt.Errorf("flow %s has no version %d: the latest is %d", name, version, kept[0].Version), "see agent flows show %s", name)
	}
	return hint(fmt.Errorf("flow %s was removed", name), "agent flows show %s --version %d shows what it was", name, kept[0].Version)
}

// writeFlow shows a flow as a workspace file would have it, and which versions of it there are.
func writeFlow(w io.Writer, f flows.Flow, kept []flows.Flow) error {
	fmt.Fprintf(w, "# version %d of %s, from %s\n", f.Version, when(f.CreatedAt), printable(f.Source))
	for _, v := range kept {
		word := ""
		if v.Current {
			word = ", current"
		}
		fmt.Fprintf(w, "#   version %d of %s%s\n", v.Version, when(v.CreatedAt), word)
	}
	shown, err := asYAML(f.Definition)
	if err != nil {
		return fmt.Errorf("show flow %s: %w", f.Name, err)
	}
	_, err = fmt.Fprintf(w, "kind: flow\n%s", shown)
	return err
}

// asYAML is a definition as a workspace file has it: by its JSON, which is YAML, too, so the order of the keys stays.
func asYAML(definition any) ([]byte, error) {
	text, err := json.Marshal(definition)
	if err != nil {
		return nil, err
	}
	var node yaml.Node
	if err := yaml.Unmarshal(text, &node); err != nil {
		return nil, err
	}
	blocks(&node)
	return yaml.Marshal(&node)
}

// blocks writes nodes in YAML's own style in place of JSON's.
func blocks(n *yaml.Node) {
	n.Style = 0
	for _, below := range n.Content {
		blocks(below)
	}
}

func (c *cli) flowsSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use: "schema", Short: "Print the JSON Schema of flows, for editors and checks", Args: args(0, 0, "no arguments"),
		Long: `Print the JSON Schema of a flow document. An editor with a YAML language server checks a file that begins with
# yaml-language-server: $schema=flow.schema.json`,
		RunE: func(*cobra.Command, []string) error {
			schema, err := flows.JSONSchema()
			if err != nil {
				return err
			}
			return c.print(schema, func(w io.Writer) error {
				var tree any
				if err := json.Unmarshal(schema, &tree); err != nil {
					return fmt.Errorf("read own schema: %w", err)
				}
				encoder := json.NewEncoder(w)
				encoder.SetIndent("", "  ")
				encoder.SetEscapeHTML(false)
				return encoder.Encode(tree)
			})
		},
	}
}
