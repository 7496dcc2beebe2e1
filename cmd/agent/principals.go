package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/principals"
)

func (c *cli) principalsCommand() *cobra.Command {
	return group("principals", "Manage users of the API and the Engine Room",
		c.principalsListCommand(), c.principalsShowCommand(), c.principalsAddCommand(), c.principalsRoleCommand(),
		c.principalsSwitchCommand("disable", "Disable a principal; its tokens and sessions are rejected", false),
		c.principalsSwitchCommand("enable", "Enable a principal again", true),
		c.principalsLinkCommand(), c.principalsUnlinkCommand(), c.principalsLoginLinkCommand())
}

func (c *cli) principalsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List principals by name", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			list, err := principals.List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, list, "", "no principals", []string{"NAME", "KIND", "ROLE", "STATE", "CREATED", "ID"},
				func(p principals.Principal) []string {
					return []string{p.Name, p.Kind, string(p.Role), enabledText(p), formatTime(p.CreatedAt), p.ID}
				})
		}),
	}
}

func enabledText(p principals.Principal) string {
	if p.Enabled() {
		return "enabled"
	}
	return "disabled"
}

// principalError maps errors of package principals to exit codes and hints.
func principalError(err error, lists string) error {
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return hint(err, "see %s", lists)
	case errors.Is(err, principals.ErrInvalid):
		return &exitError{exitUsage, hint(err, "see --help")}
	}
	return err
}

func reasonFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "reason", "", "reason for the audit log")
}

func (c *cli) principalsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show PRINCIPAL", Short: "Show a principal with its identities", Args: positionalArgs(1, 1, "a name or id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			p, err := principals.Find(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			linked, err := principals.Identities(cmd.Context(), s.Pool, p.ID)
			if err != nil {
				return err
			}
			value := struct {
				principals.Principal
				Identities []principals.Identity `json:"identities"`
			}{p, linked}
			return c.print(value, func(w io.Writer) {
				fmt.Fprintf(w, "%s: %s, role %s, %s, id %s\n", p.Name, p.Kind, p.Role, enabledText(p), p.ID)
				writeRows(w, "no identities", []string{"ISSUER", "SUBJECT", "LINKED"}, linked,
					func(i principals.Identity) []string {
						return []string{i.Issuer, i.Subject, formatTime(i.CreatedAt)}
					})
			})
		}),
	}
}

func (c *cli) printPrincipal(p principals.Principal) error {
	return c.printf(p, "%s: %s, role %s, %s\n", p.Name, p.Kind, p.Role, enabledText(p))
}

func (c *cli) principalsAddCommand() *cobra.Command {
	n := principals.CreateParams{Kind: principals.User, Role: principals.None}
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Create a principal", Args: positionalArgs(1, 1, "a name"),
		Example: `  agent principals add anna --role approver
  agent principals add ci --kind service --role operator --reason "deploys"`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			n.Name = args[0]
			p, err := principals.Create(cmd.Context(), s.Pool, n)
			if errors.Is(err, principals.ErrTaken) {
				return hint(err, "agent principals role changes its role")
			}
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			return c.printPrincipal(p)
		}),
	}
	role := string(n.Role)
	enumFlag(cmd.Flags(), &role, "role", "its role", principals.Roles()...)
	enumFlag(cmd.Flags(), &n.Kind, "kind", "its kind", principals.User, principals.Service)
	reasonFlag(cmd, &n.Reason)
	cmd.PreRun = func(*cobra.Command, []string) { n.Role = principals.Role(role) }
	return cmd
}

func (c *cli) principalsRoleCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "role PRINCIPAL ROLE", Short: "Set the role of a principal", Args: positionalArgs(2, 2, "a name and a role"),
		Long: "Set the role: " + strings.Join(principals.Roles(), ", ") + ". Tokens and sessions have it at once.",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			p, err := principals.SetRole(cmd.Context(), s.Pool, args[0], principals.Role(args[1]), reason)
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			return c.printPrincipal(p)
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}

func (c *cli) principalsSwitchCommand(verb, short string, enabled bool) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: verb + " PRINCIPAL", Short: short, Args: positionalArgs(1, 1, "a name or id"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			p, err := principals.SetEnabled(cmd.Context(), s.Pool, args[0], enabled, reason)
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			return c.printPrincipal(p)
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}

func (c *cli) principalsLinkCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "link PRINCIPAL ISSUER SUBJECT", Short: "Link an account elsewhere to a principal",
		Args: positionalArgs(3, 3, "a name, an issuer and a subject"),
		Long: `Link an account to a principal. The account then has the principal's role. The issuer is an OIDC issuer,
slack:TEAM or telegram:BOT. The subject is the id of the account there, never a name or an e-mail address.`,
		Example: "  agent principals link anna slack:T0123 U0456",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if err := principals.LinkIdentity(cmd.Context(), s.Pool, args[0], args[1], args[2], reason); err != nil {
				return principalError(err, "agent principals ls")
			}
			return c.printf(map[string]string{"principal": args[0], "issuer": args[1], "subject": args[2]}, "linked\n")
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}

func (c *cli) principalsUnlinkCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "unlink PRINCIPAL ISSUER SUBJECT", Short: "Unlink an account from a principal",
		Args: positionalArgs(3, 3, "a name, an issuer and a subject"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if err := principals.UnlinkIdentity(cmd.Context(), s.Pool, args[0], args[1], args[2], reason); err != nil {
				return principalError(err, "agent principals ls")
			}
			return c.printf(map[string]string{"principal": args[0], "issuer": args[1], "subject": args[2]}, "unlinked\n")
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}

func (c *cli) principalsLoginLinkCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "login-link PRINCIPAL", Short: "Create a link that logs in a user once",
		Args: positionalArgs(1, 1, "a name or id"),
		Long: "Create a link to the Engine Room that logs in a user once, within 15 minutes. Whoever has it is that user.",
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			secret, until, err := principals.CreateLink(cmd.Context(), s.Pool, args[0], reason)
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			path := "/login?link=" + secret
			value := map[string]any{"path": path, "expires_at": until.UTC()}
			if s.config.PublicURL != "" {
				link := strings.TrimRight(s.config.PublicURL, "/") + path
				value["url"] = link
				return c.printf(value, "%s\nit works once, until %s\n", link, formatTime(until))
			}
			return c.printf(value, "%s\nput the address of the Engine Room before it, as in "+
				"http://localhost:8080/login?link=…; with AGENT_PUBLIC_URL the link is whole\nit works once, until %s\n", path,
				formatTime(until))
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}
