package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/principals"
)

// routeCommands makes the commands run on the server that --server or AGENT_SERVER names. On a server it allows only
// remote commands.
func (c *cli) routeCommands(cmd *cobra.Command) {
	for _, below := range cmd.Commands() {
		c.routeCommands(below)
	}
	local := cmd.RunE
	if local == nil {
		return
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		scope, reason, _ := placeOf(cmd)
		remote := scope != ""
		onlyHelp := cmd.HasSubCommands() && remote && cmd.Annotations["group"] != ""
		switch {
		case c.host != nil && !remote:
			return usageError("%s runs only on the machine of the caller", cmd.CommandPath())
		case c.host != nil && !mayRun(cmd.Context(), scope):
			return forbidden(cmd.Context(), cmd.CommandPath(), scope)
		case c.host != nil || c.server == "" || onlyHelp || !remote && reason == "":
			return local(cmd, args)
		case !remote:
			return &exitError{exitUsage, hint(fmt.Errorf("%s runs only on this machine: %s", cmd.CommandPath(), reason),
				"leave out --server and AGENT_SERVER")}
		}
		return c.runRemote(cmd, args)
	}
}

// placeOf reports where a command runs: on a server, for callers with the scope, or on this machine, for the reason.
// listed is false for a command in neither list, which runs on this machine.
func placeOf(cmd *cobra.Command) (scope principals.Scope, reason string, listed bool) {
	name := commandName(cmd)
	for {
		if reason, is := localCommands[name]; is {
			return "", reason, true
		}
		if scope := remoteCommands[name]; scope != "" {
			if f := cmd.Flags().Lookup("prompts"); f != nil && f.Changed { // the texts of threads
				scope = principals.ThreadsRead
			}
			return scope, "", true
		}
		if i := strings.LastIndexByte(name, ' '); i >= 0 {
			name = name[:i]
			continue
		}
		return "", "it is not offered by servers", false
	}
}

// remoteCommands run on a server, with all commands below them, except localCommands. Each requires the scope of its
// HTTP route.
var remoteCommands = map[string]principals.Scope{
	"activity":              principals.RunsRead,
	"agents":                principals.RunsRead,
	"apply":                 principals.Administer,
	"approvals":             principals.ApprovalsDecide,
	"approvals ls":          principals.ApprovalsRead,
	"approvals show":        principals.ApprovalsRead,
	"automations":           principals.Operate,
	"automations dead":      principals.RunsRead,
	"automations ls":        principals.RunsRead,
	"automations runs":      principals.RunsRead,
	"automations show":      principals.RunsRead,
	"channels":              principals.Administer,
	"channels ls":           principals.RunsRead,
	"channels show":         principals.RunsRead,
	"chat":                  principals.ThreadsWrite,
	"doctor":                principals.Operate,
	"documents":             principals.ThreadsWrite,
	"documents get":         principals.ThreadsRead,
	"documents ls":          principals.ThreadsRead,
	"documents show":        principals.ThreadsRead,
	"eval":                  principals.Operate,
	"eval add":              principals.ThreadsRead,
	"eval label":            principals.RunsWrite,
	"eval labels":           principals.ThreadsRead,
	"eval ls":               principals.RunsRead,
	"eval shadow ls":        principals.RunsRead,
	"eval show":             principals.RunsRead,
	"executions":            principals.RunsWrite,
	"executions ls":         principals.RunsRead,
	"executions show":       principals.RunsRead,
	"executions status":     principals.RunsRead,
	"executions stuck":      principals.RunsRead,
	"executions waiting":    principals.RunsRead,
	"flows":                 principals.RunsRead,
	"heartbeat":             principals.Operate,
	"lanes":                 principals.Operate,
	"lanes ls":              principals.RunsRead,
	"mcp accept":            principals.Administer,
	"mcp ls":                principals.RunsRead,
	"mcp offer":             principals.Administer,
	"mcp show":              principals.RunsRead,
	"mcp sync":              principals.Operate,
	"mcp withdraw":          principals.Administer,
	"memory":                principals.ThreadsWrite,
	"memory conflicts ls":   principals.ThreadsRead,
	"memory conflicts show": principals.ThreadsRead,
	"memory get":            principals.ThreadsRead,
	"memory ls":             principals.ThreadsRead,
	"memory search":         principals.ThreadsRead,
	"memory stats":          principals.ThreadsRead,
	"models":                principals.RunsRead,
	"models check":          principals.Operate,
	"objectives":            principals.RunsWrite,
	"objectives ls":         principals.RunsRead,
	"objectives show":       principals.RunsRead,
	"operate":               principals.Operate,
	"pause":                 principals.Operate,
	"principals":            principals.Administer,
	"requests":              principals.RunsWrite,
	"requests ls":           principals.RunsRead,
	"requests show":         principals.RunsRead,
	"resume":                principals.Operate,
	"retention":             principals.Administer,
	"selfheal":              principals.Operate,
	"selfheal report":       principals.RunsRead,
	"sessions":              principals.Administer,
	"skills":                principals.Operate,
	"skills ls":             principals.RunsRead,
	"skills show":           principals.RunsRead,
	"threads":               principals.ThreadsWrite,
	"threads access":        principals.ThreadsRead,
	"threads locks":         principals.ThreadsRead,
	"threads ls":            principals.ThreadsRead,
	"threads show":          principals.ThreadsRead,
	"tokens":                principals.Administer,
	"trace":                 principals.RunsRead,
	"version":               principals.Authenticated,
	"webhooks":              principals.Operate,
	"webhooks endpoints":    principals.RunsRead,
	"webhooks ls":           principals.RunsRead,
	"webhooks show":         principals.RunsRead,
	"webhooks targets":      principals.RunsRead,
	"why":                   principals.RunsRead,
}

// localCommands need this machine. An empty reason means that they ignore --server.
var localCommands = map[string]string{
	"":            "",
	"completion":  "",
	"demo":        "it runs its own agent",
	"dev":         "it runs the agent",
	"healthcheck": "it checks the process on its machine",
	"help":        "",
	"init":        "it writes a folder",
	"lanes run":   "it runs a program",
	"login":       "",
	"logout":      "",
	"mcp":         "it serves standard input",
	"mcp serve":   "it serves standard input",
	"migrate":     "it changes the database of the server",
	"serve":       "it runs the agent",
}

func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "agent"), " ")
}

// mayRun reports whether the caller of a command has its scope.
func mayRun(ctx context.Context, scope principals.Scope) bool {
	caller := principals.From(ctx)
	return caller != nil && caller.May(scope)
}

func forbidden(ctx context.Context, what string, scope principals.Scope) error {
	who := "the caller"
	if caller := principals.From(ctx); caller != nil {
		who = fmt.Sprintf("%s (role %s)", caller.Name, caller.Role)
	}
	return fmt.Errorf("%s needs the scope %s, which %s does not have here", what, scope, who)
}
