package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/aymanbagabas/go-udiff"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/human"
)

func (c *cli) agentsCommand() *cobra.Command {
	return group("agents", "List agents, their effective values and versions",
		c.agentsListCommand(), c.agentsShowCommand(), c.agentsDiffCommand())
}

type listedAgent struct {
	agents.Agent
	Today budgets.Standing `json:"today"` // usage since midnight UTC
}

func (c *cli) agentsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the enabled agents, the default first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := app.NewDirectory(s.config).List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			used, err := budgets.Today(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			listed := make([]listedAgent, len(all))
			for i, a := range all {
				listed[i] = listedAgent{Agent: a, Today: budgets.AgentOf(used, a.Name)}
			}
			return c.print(pageOf(listed, ""), func(w io.Writer) { writeAgents(w, listed) })
		}),
	}
}

func writeAgents(w io.Writer, listed []listedAgent) {
	writeRows(w, "",
		[]string{"AGENT", "ROLE", "VERSION", "MODEL", "MEMORY", "KEYS", "HEARTBEAT", "TODAY", "ABOUT"}, listed,
		func(a listedAgent) []string {
			heartbeat, role := "", ""
			if a.Heartbeat != nil {
				heartbeat = a.Heartbeat.Cron
			}
			if a.Default {
				role = "default"
			}
			return []string{
				a.Name, role, strconv.Itoa(a.Version), modelOrOffline(a.Model), a.Memory, strings.Join(a.Keys, ", "), heartbeat,
				human.Cost(a.Today.CostUSD, a.Today.Tokens), truncate(a.Description, 50),
			}
		})
}

func modelOrOffline(text string) string {
	if text == "" {
		return "offline"
	}
	return text
}

func (c *cli) agentsShowCommand() *cobra.Command {
	var version int
	var asYAML bool
	cmd := &cobra.Command{
		Use: "show NAME", Short: "Show an agent's effective values and their sources",
		Args: positionalArgs(1, 1, "an agent's name"),
		Long: `Show an agent's effective values with their sources: document, setting or default. Its instructions
follow. With --yaml, print its document; to go back to a version, apply its document.`,
		Example: "  agent agents show sales --version 3 --yaml > sales.yaml",
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			if cmd.Flags().Changed("version") && version < 1 {
				return usageError("--version %d: use a number from 1", version)
			}
			if asYAML {
				return c.printDocument(cmd.Context(), s, args[0], version)
			}
			shown, err := app.NewDirectory(s.config).Show(cmd.Context(), s.Pool, args[0], version)
			if err != nil {
				return agentHint(err)
			}
			return c.print(shown, func(w io.Writer) { writeAgent(w, shown) })
		}),
	}
	cmd.Flags().IntVar(&version, "version", 0, "this version instead of the current one")
	cmd.Flags().BoolVar(&asYAML, "yaml", false, "print the document of the version, for agent apply")
	return cmd
}

// printDocument prints the document of an agent's version; 0 is the current one.
func (c *cli) printDocument(ctx context.Context, s *session, name string, version int) error {
	a, err := findAgent(ctx, s, name, version)
	if err == nil && !a.Declared() {
		err = hint(fmt.Errorf("agent %s has no document: its values are settings", name), "see agent agents show %s", name)
	}
	if err != nil {
		return err
	}
	document, err := documentOf(ctx, s, name, a.Version)
	if err != nil {
		return err
	}
	document.text = "kind: agent\n" + document.text
	return c.print(map[string]any{"version": document.version, "document": document.text}, func(w io.Writer) {
		fmt.Fprint(w, document.text)
	})
}

// actingFlag filters a listing by the agent that acted.
func actingFlag(flags *pflag.FlagSet, agent *string) {
	flags.StringVar(agent, "agent", "", "only this agent")
}

// findAgent reads an agent or one of its versions, also after its removal.
func findAgent(ctx context.Context, s *session, name string, version int) (agents.Agent, error) {
	a, err := app.NewDirectory(s.config).Look(ctx, s.Pool, name, version)
	return a, agentHint(err)
}

// agentHint adds a next step to the error of a missing agent or version.
func agentHint(err error) error {
	missing, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case !ok:
		return err
	case missing.Latest == 0:
		return hint(missing, "see agent agents ls")
	case missing.Version > 0:
		return hint(missing, "see agent agents show %s", missing.Name)
	}
	return hint(missing, "agent agents show %s --version %d shows its last version", missing.Name, missing.Latest)
}

func writeAgent(w io.Writer, a agents.Shown) {
	rows := make([][]string, len(a.Values))
	for i, v := range a.Values {
		rows[i] = []string{v.Name, printable(v.Value), v.From}
	}
	if a.Declared() {
		fmt.Fprintf(w, "version %d of %s, %d in all\n\n", a.Version, formatTime(a.CreatedAt), len(a.Versions))
	}
	writeTable(w, "", []string{"KEY", "VALUE", "FROM"}, rows)
	if a.Instructions != "" {
		fmt.Fprintf(w, "\n%s\n", printableText(strings.TrimSpace(a.Instructions)))
	}
}

func (c *cli) agentsDiffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "diff NAME [FROM [TO]]", Short: "Compare two versions of an agent's document; default the last two",
		Args: positionalArgs(1, 3, "an agent's name, and versions"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			from, to, err := diffVersions(cmd.Context(), s, args)
			if err != nil {
				return err
			}
			diff := udiff.Unified(label(args[0], from), label(args[0], to), from.text, to.text)
			return c.print(map[string]any{"from": from.version, "to": to.version, "diff": diff}, func(w io.Writer) {
				diff = cmp.Or(diff, "no difference\n")
				fmt.Fprint(w, diff)
			})
		}),
	}
}

// agentVersion is one version of an agent as workspace YAML; version 0 is empty.
type agentVersion struct {
	version int
	text    string
}

func label(name string, v agentVersion) string { return fmt.Sprintf("%s version %d", name, v.version) }

func diffVersions(ctx context.Context, s *session, args []string) (from, to agentVersion, err error) {
	versions, err := agents.Versions(ctx, s.Pool, args[0])
	if errors.Is(err, agents.ErrNotFound) {
		return from, to, hint(fmt.Errorf("there is no document of an agent %q", args[0]), "see agent agents ls")
	}
	if err != nil {
		return from, to, err
	}
	numbers := []int{max(0, versions[0]-1), versions[0]}
	for i, arg := range args[1:] {
		if numbers[i], err = strconv.Atoi(arg); err != nil || numbers[i] < 0 {
			return from, to, usageError("invalid version %q: use a number from 1", arg)
		}
	}
	if from, err = documentOf(ctx, s, args[0], numbers[0]); err == nil {
		to, err = documentOf(ctx, s, args[0], numbers[1])
	}
	return from, to, err
}

// documentOf renders a version as YAML. Version 0 renders empty.
func documentOf(ctx context.Context, s *session, name string, version int) (agentVersion, error) {
	if version == 0 {
		return agentVersion{}, nil
	}
	a, err := findAgent(ctx, s, name, version)
	if err != nil {
		return agentVersion{}, err
	}
	shown, err := exactjson.YAML(a.AsDeclared())
	if err != nil {
		return agentVersion{}, fmt.Errorf("show agent %s: %w", name, err)
	}
	return agentVersion{version, strings.Replace(string(shown), "\nskills: null\n", "\n", 1)}, nil // all skills
}
