package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/config"
)

// healthLimit is how long a process may take to answer its probe.
const healthLimit = 3 * time.Second

func (c *cli) healthcheckCommand() *cobra.Command {
	var ready bool
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask the agent that serves on this machine whether it is alive",
		Long: `Ask the agent that serves at AGENT_LISTEN on this machine whether it is alive; with --ready whether it may be sent
requests. Exit code 0 means yes, 1 no. It needs no other setting, no database and no shell: it is for HEALTHCHECK in containers.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.healthcheck(cmd.Context(), ready) },
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "ask /readyz instead of /healthz")
	return cmd
}

func (c *cli) healthcheck(ctx context.Context, ready bool) error {
	path := "/healthz"
	if ready {
		path = "/readyz"
	}
	base, err := c.probed()
	if err != nil {
		return &exitError{exitUsage, err}
	}
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	said, err := probe(ctx, base+path)
	if err != nil {
		return err
	}
	return c.print(json.RawMessage(said), func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s%s: ok\n", base, path)
		return err
	})
}

// probed is where the process listens that AGENT_LISTEN is the setting of. Other settings may be missing or wrong.
func (c *cli) probed() (string, error) {
	cfg, err := config.Load(map[string]string{"AGENT_LISTEN": c.environ["AGENT_LISTEN"]})
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return "", err
	}
	if addr, err := netip.ParseAddr(host); host == "" || err == nil && addr.IsUnspecified() {
		host = "127.0.0.1"
		if addr.Is6() {
			host = "::1"
		}
	}
	return "http://" + net.JoinHostPort(host, port), nil
}

// probe asks once, and returns what a well process says.
func probe(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, hint(err, "is agent serve running, with this AGENT_LISTEN?")
	}
	defer resp.Body.Close()
	said, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s%s", url, resp.Status, failing(said))
	}
	return said, nil
}

// failing names the checks of a /readyz that failed.
func failing(said []byte) string {
	var got struct {
		Checks map[string]struct {
			OK     bool
			Detail string
		}
	}
	if json.Unmarshal(said, &got) != nil {
		return ""
	}
	var bad []string
	for name, check := range got.Checks {
		if !check.OK {
			bad = append(bad, name+": "+check.Detail)
		}
	}
	slices.Sort(bad)
	if len(bad) == 0 {
		return ""
	}
	return " (" + strings.Join(bad, "; ") + ")"
}
