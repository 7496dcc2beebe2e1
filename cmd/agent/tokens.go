package main

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
)

func (c *cli) tokensCommand() *cobra.Command {
	return group("tokens", "Manage API tokens", c.tokensListCommand(), c.tokensCreateCommand(),
		c.revokeCommand("revoke TOKEN_ID", "Revoke an API token, at once and everywhere", "a token's id", "agent tokens ls",
			principals.RevokeToken))
}

func (c *cli) tokensListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [PRINCIPAL]", Short: "List API tokens, newest first",
		Args: positionalArgs(0, 1, "a principal, or nothing for all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			list, err := principals.Tokens(cmd.Context(), s.Pool, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return printRows(c, list, "", "no tokens",
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
		Long: `Create an API token lk_ID_SECRET. It is printed once; the database has only a digest. Scopes narrow the role
of the principal: * for all of it, runs:read, runs:*, threads:read, operate, approvals:decide, admin, or work:GLOB for
workers.`,
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

func (c *cli) sessionsCommand() *cobra.Command {
	return group("sessions", "Manage the sessions of browsers", c.sessionsListCommand(),
		c.revokeCommand("revoke SESSION_ID", "End a session, at once and everywhere", "a session's id", "agent sessions ls",
			principals.RevokeSession))
}

func (c *cli) sessionsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls [PRINCIPAL]", Short: "List sessions of browsers, newest first",
		Args: positionalArgs(0, 1, "a principal, or nothing for all"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			list, err := principals.Sessions(cmd.Context(), s.Pool, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return printRows(c, list, "", "no sessions",
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

// revoker ends a token or session by its id.
type revoker func(ctx context.Context, db postgres.Beginner, id, reason string) (changed bool, err error)

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
