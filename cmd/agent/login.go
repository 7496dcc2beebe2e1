package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// The login file has the token of each server. Only its owner may read it.

func (c *cli) loginCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "login URL",
		Short: "Store the token of a server, for --server",
		Long: `Store the token of a server, after the server has accepted it. It is read from the terminal without echo, or
from standard input. agent --server URL then needs no AGENT_TOKEN. The file login.json is in
XDG_CONFIG_HOME/lanekeeper, else ~/.config/lanekeeper, with mode 0600. http is only for this machine; everything else
needs https.`,
		Example: "  agent login https://agent.example.com\n  agent login https://agent.example.com < token.txt\n" +
			"  agent --server https://agent.example.com trace last",
		Args: positionalArgs(1, 1, "the address of a server"),
		RunE: func(cmd *cobra.Command, args []string) error {
			server, err := parseServer(args[0])
			if err != nil {
				return err
			}
			token, err := c.readToken(cmd.Context())
			if err != nil {
				return err
			}
			check := *c
			check.out = io.Discard // the version of the server
			call := remoteCall{
				cli: &check, server: server, token: token, tokenAdvice: "nothing was stored; use the server's AGENT_ADMIN_TOKEN, " +
					"or a token that agent tokens create prints there",
			}
			if err := call.run(cmd.Context(), commandRequest{Args: []string{"version"}}, false); err != nil {
				return err
			}
			if err := c.storeToken(server, token); err != nil {
				return err
			}
			return c.printf(map[string]any{"server": server.String()}, "logged in to %s; use it with --server or AGENT_SERVER\n",
				server)
		},
	}
}

func (c *cli) logoutCommand() *cobra.Command {
	return &cobra.Command{
		Use: "logout [URL]", Short: "Remove the stored token of a server, or of all",
		Long: "Remove the stored token of a server, or of all servers. The token itself stays valid until it is revoked.",
		Args: positionalArgs(0, 1, "at most one address"),
		RunE: func(_ *cobra.Command, args []string) error {
			tokens, err := c.readLogins()
			if err != nil {
				return err
			}
			removed := len(tokens)
			if len(args) == 1 {
				server, err := parseServer(args[0])
				if err != nil {
					return err
				}
				if tokens[server.String()] == "" {
					return fmt.Errorf("there is no login to %s", server)
				}
				delete(tokens, server.String())
				removed = 1
			} else {
				tokens = nil
			}
			if err := c.writeLogins(tokens); err != nil {
				return err
			}
			return c.printf(map[string]any{"removed": removed}, "removed %d %s\n", removed, plural("token", removed))
		},
	}
}

// readToken reads a token from the terminal or from standard input.
func (c *cli) readToken(ctx context.Context) (token string, err error) {
	if file, ok := c.in.(*os.File); ok && terminal(file) {
		fmt.Fprint(c.err, "Token: ")
		token, err = readPassword(ctx, int(file.Fd()))
		fmt.Fprintln(c.err)
		if err != nil {
			return "", fmt.Errorf("read the token: %w", err)
		}
	} else {
		token = readLine(c.in)
	}
	return trimToken(token)
}

// readPassword reads a line without echo. When ctx ends, it restores the echo and returns.
func readPassword(ctx context.Context, terminal int) (string, error) {
	before, err := term.GetState(terminal)
	if err != nil {
		return "", err
	}
	var typed []byte
	done := make(chan error, 1)
	go func() { // a read cannot be interrupted
		var err error
		typed, err = term.ReadPassword(terminal)
		done <- err
	}()
	select {
	case err := <-done:
		return string(typed), err
	case <-ctx.Done():
		return "", errors.Join(context.Cause(ctx), term.Restore(terminal, before))
	}
}

// trimToken removes blanks around a token. It rejects text that a header cannot hold.
func trimToken(text string) (token string, err error) {
	token = strings.TrimSpace(text)
	if token == "" {
		return "", usageError("the token is empty; pass it on standard input, or type it")
	}
	for _, r := range token {
		if r <= ' ' || r > '~' {
			return "", usageError("the token has characters that no token has")
		}
	}
	return token, nil
}

// token returns AGENT_TOKEN or the stored token of the server.
func (c *cli) token(server *url.URL) (token string, err error) {
	if text := c.environ["AGENT_TOKEN"]; text != "" {
		return trimToken(text)
	}
	tokens, err := c.readLogins()
	if err != nil {
		return "", err
	}
	if token = tokens[server.String()]; token == "" {
		return "", &exitError{exitUsage, hint(fmt.Errorf("there is no token for %s", server),
			"set AGENT_TOKEN, or run agent login %s", server)}
	}
	return token, nil
}

// loginPath returns the path of the login file.
func (c *cli) loginPath() (string, error) {
	dir := c.environ["XDG_CONFIG_HOME"]
	if !filepath.IsAbs(dir) { // the specification ignores it
		dir = filepath.Join(c.environ["HOME"], ".config")
	}
	if !filepath.IsAbs(dir) {
		return "", usageError("HOME is no absolute path; set it, or use AGENT_TOKEN")
	}
	return filepath.Join(dir, "lanekeeper", "login.json"), nil
}

// readLogins returns the stored tokens by server. It rejects a file that others may read.
func (c *cli) readLogins() (map[string]string, error) {
	path, err := c.loginPath()
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]string{}, nil
	}
	if err == nil && info.Mode().Perm()&0o077 != 0 {
		return nil, &exitError{exitUsage, hint(fmt.Errorf("%s can be read by others", path), "run chmod 600 %s", path)}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the stored tokens: %w", err)
	}
	var stored struct {
		Servers map[string]string `json:"servers"`
	}
	if err := json.Unmarshal(text, &stored); err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("%s is no login file; remove it and log in again", path)}
	}
	if stored.Servers == nil {
		stored.Servers = map[string]string{}
	}
	return stored.Servers, nil
}

func (c *cli) storeToken(server *url.URL, token string) error {
	tokens, err := c.readLogins()
	if err != nil {
		return err
	}
	tokens[server.String()] = token
	return c.writeLogins(tokens)
}

// writeLogins replaces the login file, or removes it without tokens.
func (c *cli) writeLogins(tokens map[string]string) error {
	path, err := c.loginPath()
	if err != nil {
		return err
	}
	if len(tokens) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the stored tokens: %w", err)
		}
		return nil
	}
	text, err := json.MarshalIndent(map[string]any{"servers": tokens}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("store the token: %w", err)
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".login-*") // has mode 0600
	if err != nil {
		return fmt.Errorf("store the token: %w", err)
	}
	_, err = file.Write(append(text, '\n'))
	if err = errors.Join(err, file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("store the token: %w", errors.Join(err, os.Remove(file.Name())))
	}
	return nil
}
