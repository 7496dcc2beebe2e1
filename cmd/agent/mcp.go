package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/mcp"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) mcpCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "mcp", Short: "Use tools of MCP servers as skills; offer skills over MCP",
		Long: `Without a command below it, agent mcp is an MCP server on standard input and output: it offers the skills that
agent mcp offer chose, to an editor, a desktop assistant or another agent. agent serve offers the same over HTTP at
/mcp, with the admin token.

The other direction is declared in the workspace, and what servers offer is mounted as skills:

  kind: mcp_server
  name: files
  command: [npx, -y, "@modelcontextprotocol/server-filesystem", /srv/files]   # or url: https://…/mcp
  auto: [read_*]            # act without approval; all other tools need one
  exclude: [move_file]
  headers: {Authorization: "Bearer ${FILES_TOKEN}"}                           # with url; env: with command

A tool that changes after it was mounted is quarantined: its skill is disabled until agent mcp accept.`,
		Example: `  agent apply ./workspace && agent mcp sync
  agent mcp ls
  agent mcp show files read_file
  agent mcp accept files read_file
  agent mcp offer table_sizes
  agent mcp                        # in the configuration of an MCP client: command agent, arguments mcp`,
		Args: func(cmd *cobra.Command, got []string) error {
			if len(got) > 0 {
				return unknown(cmd.CommandPath()+" "+got[0], got[0], cmd)
			}
			return nil
		},
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error { return c.serveMCP(cmd.Context(), s) }),
	}
	cmd.AddCommand(&cobra.Command{
		Use: "serve", Short: "The same as agent mcp: speak MCP over standard input and output", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error { return c.serveMCP(cmd.Context(), s) }),
	}, c.mcpListCommand(), c.mcpShowCommand(), c.mcpSyncCommand(), c.mcpAcceptCommand(), c.mcpOfferCommand(true), c.mcpOfferCommand(false))
	return cmd
}

// mcpListing is what agent mcp ls shows.
type mcpListing struct {
	Servers []mcp.Remote `json:"servers"`
	Tools   []mcp.Tool   `json:"tools"`
	Offered []mcp.Offer  `json:"offered"`
}

func (c *cli) mcpListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [SERVER]", Short: "List MCP servers, their tools, and the skills offered to others", Args: args(0, 1, "at most one server"),
		Long: `List MCP servers and their tools. A tool is

  mounted      its skill calls it
  quarantined  it changed since it was accepted; see agent mcp show, then agent mcp accept
  gone         the server no longer lists it
  excluded     the workspace leaves it out
  refused      it cannot be a skill; the reason says why`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			got, err := readMCP(cmd.Context(), s, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return c.print(got, func(w io.Writer) error { return writeMCP(w, got) })
		}),
	}
}

// readMCP reads everything, or what concerns one server.
func readMCP(ctx context.Context, s *session, server string) (mcpListing, error) {
	got := mcpListing{Servers: []mcp.Remote{}, Tools: []mcp.Tool{}, Offered: []mcp.Offer{}}
	if server != "" {
		one, err := mcp.Get(ctx, s.pool, server)
		if err != nil {
			return got, mcpHint(err)
		}
		got.Servers = append(got.Servers, one)
	} else {
		all, err := mcp.List(ctx, s.pool)
		if err != nil {
			return got, err
		}
		got.Servers = append(got.Servers, all...)
	}
	tools, err := mcp.Tools(ctx, s.pool, server)
	if err != nil {
		return got, err
	}
	got.Tools = append(got.Tools, tools...)
	offers, err := mcp.Offers(ctx, s.pool)
	got.Offered = append(got.Offered, offers...)
	return got, err
}

func writeMCP(w io.Writer, got mcpListing) error {
	rows := make([][]string, len(got.Servers))
	for i, r := range got.Servers {
		state := "not synced yet"
		switch {
		case r.SyncError != "":
			state = "unreachable: " + clipped(r.SyncError, 80)
		case r.SyncedAt != nil:
			state = "synced " + when(*r.SyncedAt)
		}
		rows[i] = []string{r.Name, r.Transport, clipped(r.URL+strings.Join(r.Command, " "), 60), r.Trust, r.Scope, state, r.About}
	}
	if err := table(w, "no MCP servers; declare one with kind: mcp_server, see agent mcp --help",
		[]string{"SERVER", "TRANSPORT", "AT", "TRUST", "SCOPE", "STATE", "ABOUT"}, rows); err != nil {
		return err
	}
	if len(got.Tools) > 0 {
		rows = make([][]string, len(got.Tools))
		for i, t := range got.Tools {
			rows[i] = []string{t.Server, t.Tool, t.State, t.Skill, clipped(t.Reason, 90)}
		}
		fmt.Fprintln(w)
		if err := table(w, "", []string{"SERVER", "TOOL", "STATE", "SKILL", "REASON"}, rows); err != nil {
			return err
		}
	}
	if len(got.Offered) > 0 {
		rows = make([][]string, len(got.Offered))
		for i, o := range got.Offered {
			rows[i] = []string{o.Skill, o.OfferedBy, when(o.CreatedAt)}
		}
		fmt.Fprintln(w)
		return table(w, "", []string{"OFFERED TO OTHERS", "BY", "SINCE"}, rows)
	}
	return nil
}

func (c *cli) mcpShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show SERVER TOOL", Short: "Show a tool as it was accepted and, in quarantine, as it is now", Args: args(2, 2, "a server and a tool"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			all, err := mcp.Tools(cmd.Context(), s.pool, args[0])
			if err != nil {
				return err
			}
			for _, t := range all {
				if t.Tool == args[1] || t.Skill == args[1] {
					return c.print(t, func(w io.Writer) error { return writeTool(w, t) })
				}
			}
			return mcpHint(fmt.Errorf("show tool %s of %s: %w", args[1], args[0], mcp.ErrNotFound))
		}),
	}
}

// writeTool shows a tool to a person, both versions where there are two.
func writeTool(w io.Writer, t mcp.Tool) error {
	fmt.Fprintf(w, "%s of %s is %s", printable(t.Tool), t.Server, t.State)
	if t.Reason != "" {
		fmt.Fprintf(w, ": %s", printable(t.Reason))
	}
	fmt.Fprintf(w, "\nskill %s\n", t.Skill)
	if t.Pin != "" {
		fmt.Fprintf(w, "\naccepted, hash %s\n", t.Pin)
		writeJSON(w, "", t.Definition)
	}
	if t.SeenPin != "" {
		fmt.Fprintf(w, "\nnow, hash %s\n", t.SeenPin)
		writeJSON(w, "", t.Seen)
		fmt.Fprintf(w, "\nto accept exactly this: agent mcp accept %s %s --hash %s\n", t.Server, printable(t.Tool), t.SeenPin)
	}
	return nil
}

func (c *cli) mcpSyncCommand() *cobra.Command {
	return &cobra.Command{
		Use: "sync [SERVER]", Short: "Ask servers for their tools and mount them", Args: args(0, 1, "at most one server"),
		Long: `Connect to every MCP server, or to one, list its tools and mount them as skills. agent serve and agent dev do
the same when they start and every 15 minutes. Exit code 1 when a server could not be reached.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.syncMCP(cmd.Context(), s, strings.Join(args, ""))
		}),
	}
}

func (c *cli) syncMCP(ctx context.Context, s *session, server string) error {
	known, err := readMCP(ctx, s, server)
	if err != nil {
		return err
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	defer a.remote.Close()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate, Agent: admin})
	reports := []mcp.Report{}
	failed := 0
	for _, r := range known.Servers {
		report, err := a.remote.Sync(ctx, r.Name)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed++
			report.Server, report.Error = r.Name, err.Error()
		}
		reports = append(reports, report)
	}
	err = c.print(listing(reports, ""), func(w io.Writer) error {
		if len(reports) == 0 {
			_, err := fmt.Fprintln(w, "no MCP servers; declare one with kind: mcp_server, see agent mcp --help")
			return err
		}
		for _, r := range reports {
			writeReport(w, r)
		}
		return nil
	})
	if err == nil && failed > 0 {
		return &exitError{exitFailed, nil}
	}
	return err
}

// writeReport tells what a sync found.
func writeReport(w io.Writer, r mcp.Report) {
	if r.Error != "" {
		fmt.Fprintf(w, "%s: %s\n", r.Server, printable(r.Error))
		return
	}
	fmt.Fprintf(w, "%s: %d tools (%s)\n", r.Server, r.Tools, printable(r.About))
	for _, part := range []struct {
		said  string
		tools []string
	}{
		{"mounted", r.Mounted},
		{"changed, in quarantine (see agent mcp show)", r.Quarantined},
		{"gone", r.Gone},
		{"left out", r.Excluded},
		{"refused", r.Refused},
	} {
		if len(part.tools) > 0 {
			fmt.Fprintf(w, "  %s: %s\n", part.said, printable(strings.Join(part.tools, ", ")))
		}
	}
}

func (c *cli) mcpAcceptCommand() *cobra.Command {
	var hash string
	cmd := &cobra.Command{
		Use: "accept SERVER TOOL", Short: "Accept the changed version of a tool and end its quarantine", Args: args(2, 2, "a server and a tool"),
		Long: `Accept a tool as its server shows it since it changed, and put its skill back into service. Look at it first with
agent mcp show; with --hash exactly the version shown there is accepted, and none that came since.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			t, err := mcp.Accept(cmd.Context(), s.pool, args[0], args[1], hash, admin)
			if err != nil {
				return mcpHint(err)
			}
			return c.print(t, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s of %s is accepted; skill %s is in service\n", printable(t.Tool), t.Server, t.Skill)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&hash, "hash", "", "accept only the version with this hash")
	return cmd
}

// mcpOfferCommand is offer or withdraw.
func (c *cli) mcpOfferCommand(offer bool) *cobra.Command {
	use, short, act := "withdraw SKILL", "End the offer of a skill to MCP clients", mcp.Withdraw
	if offer {
		use, short, act = "offer SKILL", "Offer a skill to MCP clients, over HTTP and agent mcp", mcp.Grant
	}
	return &cobra.Command{
		Use: use, Short: short, Args: args(1, 1, "a skill's name"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := act(cmd.Context(), s.pool, args[0], admin, admin)
			if errors.Is(err, skills.ErrNotFound) {
				return skillHint(err)
			}
			if err != nil {
				return err
			}
			return c.print(map[string]any{"skill": args[0], "offered": offer, "changed": changed}, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "%s is %s%s\n", args[0], map[bool]string{false: "not "}[offer]+"offered", map[bool]string{false: ", as it was before"}[changed])
				return err
			})
		}),
	}
}

// mcpHint says where names are listed.
func mcpHint(err error) error {
	if errors.Is(err, mcp.ErrNotFound) || errors.Is(err, mcp.ErrNothingToAccept) {
		return hint(err, "see agent mcp ls")
	}
	return err
}

// serveMCP offers skills to the one client on standard input and output, until it leaves.
func (c *cli) serveMCP(ctx context.Context, s *session) error {
	if terminal(c.in) {
		c.say("this speaks the Model Context Protocol to a program on standard input and output; see agent mcp --help, ^D leaves")
	}
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	return a.beat(ctx, func(ctx context.Context) error { return a.offered.Serve(ctx, readCloser(c.in), writeCloser{c.out}) })
}

// readCloser is the stream a command reads from, closed where it can be, so that a read under way ends.
func readCloser(r io.Reader) io.ReadCloser {
	if closer, ok := r.(io.ReadCloser); ok {
		return closer
	}
	return io.NopCloser(r)
}

// writeCloser is a stream that stays open.
type writeCloser struct{ io.Writer }

func (writeCloser) Close() error { return nil }
