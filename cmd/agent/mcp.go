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
		Long: `Without a subcommand, agent mcp is an MCP server on standard input and output. It serves the skills of agent
mcp offer to an editor, a desktop assistant or another agent. agent serve serves the same over HTTP at /mcp, with the
admin token.

For the other direction, declare servers in the workspace; their tools become skills:

  kind: mcp_server
  name: files
  command: [npx, -y, "@modelcontextprotocol/server-filesystem", /srv/files]   # or url: https://…/mcp
  auto: [read_*]            # act without approval; all other tools need one
  exclude: [move_file]
  headers: {Authorization: "Bearer ${FILES_TOKEN}"}                           # with url; env: with command

A tool that changes later is quarantined: its skill is disabled until agent mcp accept.`,
		Example: `  agent apply ./workspace && agent mcp sync
  agent mcp ls
  agent mcp show files read_file
  agent mcp accept files read_file
  agent mcp offer table_sizes
  agent mcp                        # in the configuration of an MCP client: command agent, arguments mcp`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return unknownCommand(cmd.CommandPath()+" "+args[0], args[0], cmd)
			}
			return nil
		},
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error { return c.serveMCP(cmd.Context(), s) }),
	}
	cmd.AddCommand(&cobra.Command{
		Use: "serve", Short: "Same as agent mcp: serve MCP on standard input and output",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error { return c.serveMCP(cmd.Context(), s) }),
	}, c.mcpListCommand(), c.mcpShowCommand(), c.mcpSyncCommand(), c.mcpAcceptCommand(), c.mcpOfferCommand(true),
		c.mcpOfferCommand(false))
	return cmd
}

type mcpListing struct {
	Servers []mcp.Remote `json:"servers"`
	Tools   []mcp.Tool   `json:"tools"`
	Offered []mcp.Offer  `json:"offered"`
}

func (c *cli) mcpListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [SERVER]", Short: "List MCP servers, their tools, and the skills offered to others",
		Args: positionalArgs(0, 1, "at most one server"),
		Long: `List MCP servers and their tools. A tool is

  mounted      its skill calls it
  quarantined  changed since its acceptance; see agent mcp show, then agent mcp accept
  gone         the server no longer lists it
  excluded     the workspace excludes it
  refused      it cannot become a skill; see its reason`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			listing, err := readMCP(cmd.Context(), s, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return c.print(listing, func(w io.Writer) { writeMCP(w, listing) })
		}),
	}
}

// readMCP reads all servers, or one.
func readMCP(ctx context.Context, s *session, server string) (mcpListing, error) {
	listing := mcpListing{Servers: []mcp.Remote{}, Tools: []mcp.Tool{}, Offered: []mcp.Offer{}}
	if server != "" {
		one, err := mcp.Get(ctx, s.Pool, server)
		if err != nil {
			return listing, mcpHint(err)
		}
		listing.Servers = append(listing.Servers, one)
	} else {
		all, err := mcp.List(ctx, s.Pool)
		if err != nil {
			return listing, err
		}
		listing.Servers = append(listing.Servers, all...)
	}
	tools, err := mcp.Tools(ctx, s.Pool, server)
	if err != nil {
		return listing, err
	}
	listing.Tools = append(listing.Tools, tools...)
	offers, err := mcp.Offers(ctx, s.Pool)
	listing.Offered = append(listing.Offered, offers...)
	return listing, err
}

func writeMCP(w io.Writer, listing mcpListing) {
	rows := make([][]string, len(listing.Servers))
	for i, r := range listing.Servers {
		state := "not synced yet"
		switch {
		case r.SyncError != "":
			state = "sync failed: " + truncate(r.SyncError, 80)
		case r.SyncedAt != nil:
			state = "synced " + formatTime(*r.SyncedAt)
		}
		rows[i] = []string{
			r.Name, r.Transport, truncate(r.URL+strings.Join(r.Command, " "), 60), r.Trust,
			r.Scope, state, r.About,
		}
	}
	writeTable(w, "no MCP servers; declare one with kind: mcp_server, see agent mcp --help",
		[]string{"SERVER", "TRANSPORT", "AT", "TRUST", "SCOPE", "STATE", "ABOUT"}, rows)
	if len(listing.Tools) > 0 {
		rows = make([][]string, len(listing.Tools))
		for i, t := range listing.Tools {
			rows[i] = []string{t.Server, t.Tool, t.State, t.Skill, truncate(t.Reason, 90)}
		}
		fmt.Fprintln(w)
		writeTable(w, "", []string{"SERVER", "TOOL", "STATE", "SKILL", "REASON"}, rows)
	}
	if len(listing.Offered) > 0 {
		rows = make([][]string, len(listing.Offered))
		for i, o := range listing.Offered {
			rows[i] = []string{o.Skill, o.OfferedBy, formatTime(o.CreatedAt)}
		}
		fmt.Fprintln(w)
		writeTable(w, "", []string{"OFFERED TO OTHERS", "BY", "SINCE"}, rows)
	}
}

func (c *cli) mcpShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show SERVER TOOL", Short: "Show a tool's accepted version and, in quarantine, its current one",
		Args: positionalArgs(2, 2, "a server and a tool"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			all, err := mcp.Tools(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return err
			}
			for _, t := range all {
				if t.Tool == args[1] || t.Skill == args[1] {
					return c.print(t, func(w io.Writer) { writeTool(w, t) })
				}
			}
			return mcpHint(fmt.Errorf("show tool %s of %s: %w", args[1], args[0], mcp.ErrNotFound))
		}),
	}
}

// writeTool prints a tool, with both versions in quarantine.
func writeTool(w io.Writer, t mcp.Tool) {
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
		fmt.Fprintf(w, "\naccept this version: agent mcp accept %s %s --hash %s\n", t.Server, printable(t.Tool), t.SeenPin)
	}
}

func (c *cli) mcpSyncCommand() *cobra.Command {
	return &cobra.Command{
		Use: "sync [SERVER]", Short: "Read the tools of servers and mount them",
		Args: positionalArgs(0, 1, "at most one server"),
		Long: `Connect to all MCP servers, or one, and mount their tools as skills. agent serve and agent dev do this at
start and every 15 minutes. The exit code is 1 when a sync fails.`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.syncMCP(cmd.Context(), s, strings.Join(args, ""))
		}),
	}
}

// syncMCP reads the tools of one MCP server, or of all. An unreachable server does not stop the others; it makes the
// exit code 1.
func (c *cli) syncMCP(ctx context.Context, s *session, server string) error {
	known, err := readMCP(ctx, s, server)
	if err != nil {
		return err
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	defer a.MCPClient.Close()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate, Agent: admin})
	reports := []mcp.Report{}
	failed := 0
	for _, r := range known.Servers {
		if terminal(c.err) {
			c.infof("syncing %s …", printable(r.Name))
		}
		report, err := a.MCPClient.Sync(ctx, r.Name)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed++
			report.Server, report.Error = r.Name, err.Error()
		}
		reports = append(reports, report)
	}
	err = c.print(pageOf(reports, ""), func(w io.Writer) {
		if len(reports) == 0 {
			fmt.Fprintln(w, "no MCP servers; declare one with kind: mcp_server, see agent mcp --help")
			return
		}
		for _, r := range reports {
			writeReport(w, r)
		}
	})
	if err == nil && failed > 0 {
		return &exitError{exitFailed, nil}
	}
	return err
}

func writeReport(w io.Writer, r mcp.Report) {
	if r.Error != "" {
		fmt.Fprintf(w, "%s: %s\n", r.Server, printable(r.Error))
		return
	}
	fmt.Fprintf(w, "%s: %d %s (%s)\n", r.Server, r.Tools, plural("tool", r.Tools), printable(r.About))
	for _, part := range []struct {
		detail string
		tools  []string
	}{
		{"mounted", r.Mounted},
		{"changed, in quarantine (see agent mcp show)", r.Quarantined},
		{"gone", r.Gone},
		{"excluded", r.Excluded},
		{"refused", r.Refused},
	} {
		if len(part.tools) > 0 {
			fmt.Fprintf(w, "  %s: %s\n", part.detail, printable(strings.Join(part.tools, ", ")))
		}
	}
}

func (c *cli) mcpAcceptCommand() *cobra.Command {
	var hash string
	cmd := &cobra.Command{
		Use: "accept SERVER TOOL", Short: "Accept the changed version of a tool and end its quarantine",
		Args: positionalArgs(2, 2, "a server and a tool"),
		Long: `Accept the changed version of a tool and enable its skill. Review it first with agent mcp show; --hash accepts
only the version shown there.`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			t, err := mcp.Accept(cmd.Context(), s.Pool, args[0], args[1], hash, actor(cmd.Context()))
			if err != nil {
				return mcpHint(err)
			}
			return c.printf(t, "%s of %s is accepted; skill %s is in service\n", printable(t.Tool), t.Server, t.Skill)
		}),
	}
	cmd.Flags().StringVar(&hash, "hash", "", "accept only the version with this hash")
	return cmd
}

func (c *cli) mcpOfferCommand(offer bool) *cobra.Command {
	use, short, act := "withdraw SKILL", "End the offer of a skill to MCP clients", mcp.Withdraw
	if offer {
		use, short, act = "offer SKILL", "Offer a skill to MCP clients, over HTTP and agent mcp", mcp.Grant
	}
	return &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, "a skill's name"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := act(cmd.Context(), s.Pool, args[0], actor(cmd.Context()), actor(cmd.Context()))
			if errors.Is(err, skills.ErrNotFound) {
				return skillHint(err)
			}
			if err != nil {
				return err
			}
			return c.printf(map[string]any{"skill": args[0], "offered": offer, "changed": changed}, "%s is %s%s\n", args[0],
				map[bool]string{false: "not "}[offer]+"offered", map[bool]string{false: ", as it was before"}[changed])
		}),
	}
}

func mcpHint(err error) error {
	if errors.Is(err, mcp.ErrNotFound) {
		return hint(err, "see agent mcp ls")
	}
	return err
}

// serveMCP serves one MCP client on standard input and output.
func (c *cli) serveMCP(ctx context.Context, s *session) error {
	if terminal(c.in) {
		c.infof("serving the Model Context Protocol on standard input and output; see agent mcp --help, ^D leaves")
	}
	if _, err := builtins.Put(ctx, s.Pool); err != nil {
		return err
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	return a.RunWithLeases(ctx,
		func(ctx context.Context) error { return a.MCPServer.Serve(ctx, readCloser(c.in), writeCloser{c.out}) })
}

// readCloser closes the stream where possible, so that a blocked read ends.
func readCloser(r io.Reader) io.ReadCloser {
	if closer, ok := r.(io.ReadCloser); ok {
		return closer
	}
	return io.NopCloser(r)
}

// writeCloser ignores Close.
type writeCloser struct{ io.Writer }

func (writeCloser) Close() error { return nil }
