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

func (c *cli) healthcheckCommand() *cobra.Command {
	var ready bool
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Check the agent that serves on this machine",
		Long: `Check that the agent at AGENT_LISTEN on this machine is alive. With --ready, check that it accepts requests.
The command exits with 0 if the check succeeds, 1 if it fails, and 2 for an invalid AGENT_LISTEN. It needs no other
setting, no database and no shell, so it suits the HEALTHCHECK of a container.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.healthcheck(cmd.Context(), ready) },
	}
	cmd.Flags().BoolVar(&ready, "ready", false, "check /readyz instead of /healthz")
	return cmd
}

// probeTimeout bounds a probe.
const probeTimeout = 3 * time.Second

func (c *cli) healthcheck(ctx context.Context, ready bool) error {
	path := "/healthz"
	if ready {
		path = "/readyz"
	}
	base, err := c.probeURL()
	if err != nil {
		return &exitError{exitUsage, err}
	}
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	body, err := probe(ctx, base+path)
	if err != nil {
		return err
	}
	return c.printf(json.RawMessage(body), "%s%s: ok\n", base, path)
}

// probeURL returns the base URL of AGENT_LISTEN. For a wildcard address, the host is the loopback address. Other
// settings may be invalid.
func (c *cli) probeURL() (string, error) {
	cfg, err := config.Load(map[string]string{"AGENT_LISTEN": c.environ["AGENT_LISTEN"]})
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return "", err
	}
	return "http://" + net.JoinHostPort(loopbackFor(host), port), nil
}

// loopbackFor returns the loopback address for a wildcard address, and any other host unchanged.
func loopbackFor(host string) string {
	if host == "" {
		return "127.0.0.1"
	}
	addr, err := netip.ParseAddr(host)
	switch {
	case err != nil || !addr.IsUnspecified():
		return host
	case addr.Is6():
		return "::1"
	}
	return "127.0.0.1"
}

// probe requests url once and returns the body of a 200 response.
func probe(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", url, err)
	}
	client := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, hint(err, "check that agent serve runs with this AGENT_LISTEN")
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s%s", url, resp.Status, failedChecks(body))
	}
	return body, nil
}

// failedChecks lists the failed checks of a /readyz response.
func failedChecks(body []byte) string {
	var response struct {
		Checks map[string]struct {
			OK     bool
			Detail string
		}
	}
	if json.Unmarshal(body, &response) != nil {
		return ""
	}
	var failures []string
	for name, check := range response.Checks {
		if !check.OK {
			failures = append(failures, name+": "+check.Detail)
		}
	}
	slices.Sort(failures)
	if len(failures) == 0 {
		return ""
	}
	return " (" + strings.Join(failures, "; ") + ")"
}
