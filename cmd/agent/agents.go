package main

import (
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
)

func (c *cli) agentsCommand() *cobra.Command {
	return group("agents", "See who acts: agents, their effective values and versions",
		c.agentsListCommand(), c.agentsShowCommand(), c.agentsDiffCommand())
}

// listedAgent is an agent in a listing.
type listedAgent struct {
	agents.Agent
	Today budgets.Standing `json:"today"` // what it has used since midnight UTC
}

func (c *cli) agentsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the agents in service, the default first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			all, err := directory(s.config).List(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			used, err := budgets.Today(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			listed := make([]listedAgent, len(all))
			for i, a := range all {
				listed[i] = listedAgent{Agent: a, Today: budgets.AgentOf(used, a.Name)}
			}
			return c.print(listing(listed, ""), func(w io.Writer) error { return writeAgents(w, listed) })
		}),
	}
}

func writeAgents(w io.Writer, listed []listedAgent) error {
	rows := make([][]string, len(listed))
	for i, a := range listed {
		heartbeat, role := "", ""
		if a.Heartbeat != nil {
			heartbeat = a.Heartbeat.Cron
		}
		if a.Default {
			role = "default"
		}
		rows[i] = []string{
			a.Name, role, strconv.Itoa(a.Version), orNone(a.Model), a.Memory, strings.Join(a.Keys, ", "), heartbeat,
			fmt.Sprintf("$%.4f", a.Today.CostUSD), clipped(a.Description, 50),
		}
	}
	return table(w, "", []string{"AGENT", "ROLE", "VERSION", "MODEL", "MEMORY", "KEYS", "HEARTBEAT", "TODAY", "ABOUT"}, rows)
}

func orNone(text string) string {
	if text == "" {
		return "offline"
	}
	return text
}

func (c *cli) agentsShowCommand() *cobra.Command {
	var version int
	cmd := &cobra.Command{
		Use: "show NAME", Short: "Show an agent's effective values, and where each comes from", Args: args(1, 1, "an agent's name"),
		Long: `Show an agent's effective values, and where each comes from: its document, a setting, or a default. Its
instructions follow.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			shown, err := directory(s.config).Show(cmd.Context(), s.pool, args[0], version)
			if err != nil {
				return agentHint(err)
			}
			return c.print(shown, func(w io.Writer) error { return writeAgent(w, shown) })
		}),
	}
	cmd.Flags().IntVar(&version, "version", 0, "this version, not the current one")
	return cmd
}

// actingFlag narrows a listing to what an agent did.
func actingFlag(flags *pflag.FlagSet, agent *string) {
	flags.StringVar(agent, "agent", "", "only those of this agent, by its name")
}

// findAgent reads an agent, or a version of one, a removed one included.
func findAgent(ctx context.Context, s *session, name string, version int) (agents.Agent, error) {
	a, err := directory(s.config).Look(ctx, s.pool, name, version)
	return a, agentHint(err)
}

// agentHint says what to do about an agent, or a version of one, that is not there.
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
	return hint(missing, "agent agents show %s --version %d shows what it was", missing.Name, missing.Latest)
}

func writeAgent(w io.Writer, a agents.Shown) error {
	rows := make([][]string, len(a.Values))
	for i, v := range a.Values {
		rows[i] = []string{v.Name, printable(v.Value), v.From}
	}
	if a.Declared() {
		fmt.Fprintf(w, "version %d of %s, %d in all\n\n", a.Version, when(a.CreatedAt), len(a.Versions))
	}
	if err := table(w, "", []string{"KEY", "VALUE", "FROM"}, rows); err != nil {
		return err
	}
	if a.Instructions != "" {
		fmt.Fprintf(w, "\n%s\n", speech(strings.TrimSpace(a.Instructions)))
	}
	return nil
}

func (c *cli) agentsDiffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "diff NAME [FROM [TO]]", Short: "Compare two versions of an agent's document; the last two when none is named",
		Args: args(1, 3, "an agent's name, and versions"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			from, to, err := diffVersions(cmd.Context(), s, args)
			if err != nil {
				return err
			}
			diff := udiff.Unified(label(args[0], from), label(args[0], to), from.text, to.text)
			return c.print(map[string]any{"from": from.version, "to": to.version, "diff": diff}, func(w io.Writer) error {
				if diff == "" {
					diff = "no difference\n"
				}
				_, err := fmt.Fprint(w, diff)
				return err
			})
		}),
	}
}

// agentVersion is a version of an agent as a workspace file would have it; 0 is before the first.
type agentVersion struct {
	version int
	text    string
}

func label(name string, v agentVersion) string { return fmt.Sprintf("%s version %d", name, v.version) }

func diffVersions(ctx context.Context, s *session, args []string) (from, to agentVersion, err error) {
	versions, err := agents.Versions(ctx, s.pool, args[0])
	if errors.Is(err, agents.ErrNotFound) {
		return from, to, hint(fmt.Errorf("there is no agent %q", args[0]), "see agent agents ls")
	}
	if err != nil {
		return from, to, err
	}
	numbers := []int{max(0, versions[0]-1), versions[0]}
	for i, arg := range args[1:] {
		if numbers[i], err = strconv.Atoi(arg); err != nil || numbers[i] < 0 {
			return from, to, usageError("%q is no version: it is a number from 1", arg)
		}
	}
	if from, err = documentOf(ctx, s, args[0], numbers[0]); err == nil {
		to, err = documentOf(ctx, s, args[0], numbers[1])
	}
	return from, to, err
}

// documentOf is a version's document as YAML; empty before the first version.
func documentOf(ctx context.Context, s *session, name string, version int) (agentVersion, error) {
	if version == 0 {
		return agentVersion{}, nil
	}
	a, err := findAgent(ctx, s, name, version)
	if err != nil {
		return agentVersion{}, err
	}
	shown, err := asYAML(a.AsDeclared())
	if err != nil {
		return agentVersion{}, fmt.Errorf("show agent %s: %w", name, err)
	}
	return agentVersion{version, string(shown)}, nil
}
