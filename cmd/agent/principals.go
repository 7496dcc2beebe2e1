package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
)

func (c *cli) principalsCommand() *cobra.Command {
	return group("principals", "Manage users of the API and the Engine Room",
		c.principalsListCommand(), c.principalsShowCommand(), c.principalsAddCommand(), c.principalsRoleCommand(),
		c.principalsSwitchCommand("disable", "Disable a principal: its tokens and sessions end at once", false),
		c.principalsSwitchCommand("enable", "Enable a principal again", true),
		c.principalsLinkCommand(), c.principalsUnlinkCommand(), c.principalsLoginLinkCommand())
}

func (c *cli) tokensCommand() *cobra.Command {
	return group("tokens", "Manage API tokens", c.tokensListCommand(), c.tokensCreateCommand(),
		c.revokeCommand("revoke TOKEN_ID", "Revoke an API token, at once and everywhere", "a token's id", "agent tokens ls",
			principals.RevokeToken))
}

func (c *cli) sessionsCommand() *cobra.Command {
	return group("sessions", "Manage the sessions of browsers", c.sessionsListCommand(),
		c.revokeCommand("revoke SESSION_ID", "End a session, at once and everywhere", "a session's id", "agent sessions ls",
			principals.RevokeSession))
}

// revoker ends a token or session by its id.
type revoker func(ctx context.Context, db postgres.Beginner, id, reason string) (changed bool, err error)

// principalError maps errors of package principals to exit codes and hints.
func principalError(err error, lists string) error {
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return hint(principals.ErrNotFound, "see %s", lists)
	case errors.Is(err, principals.ErrTaken):
		return hint(err, "see %s; agent principals role changes its role", lists)
	case errors.Is(err, principals.ErrInvalid):
		return &exitError{exitUsage, hint(err, "see --help")}
	}
	return err
}

func reasonFlag(cmd *cobra.Command, into *string) {
	cmd.Flags().StringVar(into, "reason", "", "reason for the audit log")
}

func optionalTime(t *time.Time) string {
	if t == nil {
		return ""
	}
	return formatTime(*t)
}

func enabledWord(p principals.Principal) string {
	if p.Enabled() {
		return "enabled"
	}
	return "disabled"
}

func (c *cli) principalsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List principals by name", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := principals.List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no principals", []string{"NAME", "KIND", "ROLE", "STATE", "CREATED", "ID"},
				func(p principals.Principal) []string {
					return []string{p.Name, p.Kind, string(p.Role), enabledWord(p), formatTime(p.CreatedAt), p.ID}
				})
		}),
	}
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
				fmt.Fprintf(w, "%s: %s, role %s, %s, id %s\n", p.Name, p.Kind, p.Role, enabledWord(p), p.ID)
				writeRows(w, "no identities", []string{"ISSUER", "SUBJECT", "LINKED"}, linked,
					func(i principals.Identity) []string {
						return []string{i.Issuer, i.Subject, formatTime(i.CreatedAt)}
					})
			})
		}),
	}
}

func (c *cli) printPrincipal(p principals.Principal, err error) error {
	if err != nil {
		return principalError(err, "agent principals ls")
	}
	return c.printf(p, "%s: %s, role %s, %s\n", p.Name, p.Kind, p.Role, enabledWord(p))
}

func (c *cli) principalsAddCommand() *cobra.Command {
	n := principals.CreateParams{Kind: principals.User, Role: principals.None}
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Create a principal", Args: positionalArgs(1, 1, "a name"),
		Example: `  agent principals add anna --role approver
  agent principals add ci --kind service --role operator --reason "deploys"`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			n.Name = args[0]
			return c.printPrincipal(principals.Create(cmd.Context(), s.Pool, n))
		}),
	}
	role := string(n.Role)
	wordFlag(cmd.Flags(), &role, "role", "its role", principals.Roles()...)
	wordFlag(cmd.Flags(), &n.Kind, "kind", "its kind", principals.User, principals.Service)
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
			return c.printPrincipal(principals.SetRole(cmd.Context(), s.Pool, args[0], principals.Role(args[1]), reason))
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
			return c.printPrincipal(principals.SetEnabled(cmd.Context(), s.Pool, args[0], enabled, reason))
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
		Long: "Link an account to a principal; it then has the principal's role. The issuer is an OIDC issuer, slack:TEAM or\n" +
			"telegram:BOT. The subject is the id of the account there, never a name or an e-mail address.",
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
				return principalError(err, "agent principals show "+args[0])
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
			return c.printf(value, "%s\nput the address of the Engine Room before it, as in http://localhost:8080/login?link=…; "+
				"with AGENT_PUBLIC_URL the link is whole\nit works once, until %s\n", path, formatTime(until))
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}

func (c *cli) tokensListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [PRINCIPAL]", Short: "List API tokens, newest first",
		Args: positionalArgs(0, 1, "a principal, or nothing for all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			got, err := principals.Tokens(cmd.Context(), s.Pool, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no tokens",
				[]string{"ID", "PRINCIPAL", "NAME", "SCOPES", "EXPIRES", "LAST USED", "REVOKED"},
				func(t principals.Token) []string {
					return []string{
						t.ID, t.Principal, t.Name, strings.Join(t.Scopes, " "), optionalTime(t.ExpiresAt), optionalTime(t.LastUsedAt),
						optionalTime(t.RevokedAt),
					}
				})
		}),
	}
}

func (c *cli) tokensCreateCommand() *cobra.Command {
	n := principals.TokenParams{Scopes: []string{principals.All}}
	cmd := &cobra.Command{
		Use: "create PRINCIPAL", Short: "Create an API token and print it once", Args: positionalArgs(1, 1, "a name or id"),
		Long: `Create an API token lk_ID_SECRET. It is printed once; the database has only a digest. Scopes narrow the role of the
principal: * for all of it, runs:read, runs:*, threads:read, operate, approvals:decide, admin, or work:GLOB for workers.`,
		Example: `  agent tokens create ci --scope 'runs:*' --expires 90d
  agent tokens create sums --scope 'work:external:sum*'`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			n.Principal = args[0]
			made, text, err := principals.CreateToken(cmd.Context(), s.Pool, n)
			if err != nil {
				return principalError(err, "agent principals ls")
			}
			value := struct {
				principals.Token
				Text string `json:"token"`
			}{made, text}
			return c.printf(value, "%s\n", text)
		}),
	}
	cmd.Flags().StringSliceVar(&n.Scopes, "scope", n.Scopes, "scope; may be repeated")
	cmd.Flags().StringVar(&n.Name, "name", "", "the token's purpose")
	cmd.Flags().Var(&checkedFlag{kind: "span", parse: func(text string) (err error) {
		n.TTL, err = parseSpan(text)
		return err
	}}, "expires", "lifetime: 90m, 24h, 90d; without it for ever")
	reasonFlag(cmd, &n.Reason)
	return cmd
}

func (c *cli) sessionsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [PRINCIPAL]", Short: "List sessions of browsers, newest first",
		Args: positionalArgs(0, 1, "a principal, or nothing for all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			got, err := principals.Sessions(cmd.Context(), s.Pool, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return printRows(c, got, "", "no sessions",
				[]string{"PRINCIPAL", "METHOD", "SEEN", "EXPIRES", "REVOKED", "ADDRESS", "BROWSER", "ID"},
				func(x principals.Session) []string {
					return []string{
						x.Principal, x.Method, formatTime(x.LastSeenAt), formatTime(x.ExpiresAt), optionalTime(x.RevokedAt), x.Address,
						x.Browser, x.ID,
					}
				})
		}),
	}
}

func (c *cli) revokeCommand(use, short, what, lists string, revoke revoker) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: use, Short: short, Args: positionalArgs(1, 1, what),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			changed, err := revoke(cmd.Context(), s.Pool, args[0], reason)
			if err != nil {
				return principalError(err, lists)
			}
			return c.printf(map[string]any{"id": args[0], "changed": changed},
				"%s\n", map[bool]string{true: "revoked", false: "ended before"}[changed])
		}),
	}
	reasonFlag(cmd, &reason)
	return cmd
}
