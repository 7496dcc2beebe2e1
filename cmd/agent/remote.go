package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// A command with --server runs in the process of the server, with the server's database and settings. It is the same
// command with the same arguments; it asks questions only in the console of agent operate. The client sends the
// arguments, standard input and the named files, and prints the response (remotehost.go).

const (
	// commandsPath is the route that runs commands.
	commandsPath = "/v1/commands"
	// maxSentBytes bounds the files and the standard input of a command, in bytes.
	maxSentBytes = 20 << 20
	// keepAliveInterval is the pause between two empty frames. After silenceLimit without a frame the client gives up.
	keepAliveInterval = 10 * time.Second
	silenceLimit      = 60 * time.Second
)

// commandFrame is one line of the response. The last frame has the exit code. An empty frame keeps the connection open.
type commandFrame struct {
	Version string `json:"version,omitempty"` // of the server; the first frame
	Out     []byte `json:"out,omitempty"`     // standard output
	Err     []byte `json:"err,omitempty"`     // standard error
	File    []byte `json:"file,omitempty"`    // content of the file that --output names
	Created bool   `json:"created,omitempty"` // the file is complete
	// Interrupted is the text that the caller prints if it interrupts the command from now on.
	Interrupted string `json:"interrupted,omitempty"`
	Ask         string `json:"ask,omitempty"`       // the id of an approval that the command waits for
	Execution   string `json:"execution,omitempty"` // the execution that waits for it
	LeftOpen    string `json:"left_open,omitempty"` // the text that the caller prints if it leaves the approval open
	Continues   bool   `json:"continues,omitempty"` // the command no longer waits for the approval
	Exit        *int   `json:"exit,omitempty"`
}

// runRemote runs a command on the server.
func (c *cli) runRemote(cmd *cobra.Command, args []string) error {
	server, err := parseServer(c.server)
	if err != nil {
		return err
	}
	token, err := c.token(server)
	if err != nil {
		return err
	}
	call := remoteCall{cli: c, server: server, token: token}
	call.output, call.replace = outputFlag(cmd)
	if interactive(cmd, args) && terminal(c.in) && terminal(c.out) && !c.json {
		return call.interact(cmd)
	}
	req, err := c.commandRequest(cmd, args)
	if err != nil {
		return err
	}
	return call.run(cmd.Context(), req, watches(cmd))
}

// remoteCall runs commands on one server.
type remoteCall struct {
	*cli
	server *url.URL
	token  string
	output string // the file that the command may write
	// replace allows output to exist.
	replace bool
	warned  bool // of another version
	// tokenAdvice is the advice if the server rejects the token; empty: log in.
	tokenAdvice string
	// interrupted is printed after an interrupt.
	interrupted string
	asks        chan commandFrame // frames that begin or end a question about an approval; nil for none
}

// run sends a command and prints its output. The exit code is the command's.
func (r *remoteCall) run(ctx context.Context, req commandRequest, watching bool) error {
	outer := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silent := time.AfterFunc(silenceLimit, func() { cancel(errSilent) })
	defer silent.Stop()
	resp, err := r.send(ctx, req)
	if err == nil {
		defer resp.Body.Close()
		err = r.print(resp.Body, silent)
	}
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		return err
	case outer.Err() != nil && watching:
		return nil
	case outer.Err() != nil:
		if r.interrupted != "" && r.asks == nil { // a console prints the next step
			r.infof("%s", printableText(r.interrupted))
		}
		return &exitError{exitInterrupted, errors.New("interrupted")}
	case errors.Is(context.Cause(ctx), errSilent):
		return hint(fmt.Errorf("%s: %w", r.server.Host, errSilent), unknownOutcome)
	}
	return err
}

var errSilent = fmt.Errorf("the server was silent for %s", silenceLimit)

// unknownOutcome is the advice after a lost connection.
const unknownOutcome = "the command may have been done: see agent activity ls"

// send posts the command and returns a response of frames.
func (r *remoteCall) send(ctx context.Context, body any) (*http.Response, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.server.String()+commandsPath, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+r.token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "agent/"+buildVersion())
	resp, err := remoteClient().Do(req)
	if err != nil {
		if failed, ok := errors.AsType[*url.Error](err); ok {
			err = failed.Err // without the address: the hint has it
		}
		return nil, hint(fmt.Errorf("reach %s: %w", r.server, err), "check --server and that agent serve runs there")
	}
	if resp.StatusCode == http.StatusOK && strings.HasPrefix(resp.Header.Get("Content-Type"), framesType) {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, r.refused(resp)
}

// remoteClient follows no redirect: the token is only for the server that was named.
func remoteClient() *http.Client {
	return &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			TLSHandshakeTimeout:   10 * time.Second,
			ResponseHeaderTimeout: silenceLimit,
			DisableKeepAlives:     true,
			ForceAttemptHTTP2:     true,
		},
	}
}

// refused turns a response without frames into an error.
func (r *remoteCall) refused(resp *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // a part says enough
	var problem struct{ Title, Detail string }
	_ = json.Unmarshal(text, &problem) // a proxy's page has neither
	message := resp.Status
	if problem.Detail != "" {
		message += ": " + truncate(printable(problem.Detail), 500)
	}
	err := fmt.Errorf("%s: %s", r.server, message)
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		advice := cmp.Or(r.tokenAdvice, "set AGENT_TOKEN, or run agent login "+r.server.String())
		return &exitError{exitUsage, hint(err, "%s", advice)}
	case resp.StatusCode == http.StatusForbidden:
		return hint(err, "ask an admin for a token with this right")
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusMethodNotAllowed:
		return hint(err, "check that --server names an agent of this version or newer")
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return &exitError{exitUsage, hint(err, "name the server itself: redirects are not followed")}
	}
	return err
}

// print prints frames until the exit code. The timer silent runs only while print waits for a frame, not for the reader
// of the output.
func (r *remoteCall) print(body io.Reader, silent *time.Timer) error {
	frames := json.NewDecoder(body)
	var file bytes.Buffer
	for {
		silent.Reset(silenceLimit)
		var f commandFrame
		if err := frames.Decode(&f); err != nil {
			return hint(fmt.Errorf("%s: the connection ended before the command", r.server.Host), unknownOutcome)
		}
		silent.Stop()
		if f.Interrupted != "" {
			r.interrupted = f.Interrupted
		}
		if f.Version != "" && f.Version != buildVersion() && !r.warned {
			r.warned = true
			r.infof("agent: the server runs %s, this is %s", printable(f.Version), buildVersion())
		}
		if (f.Ask != "" || f.Continues) && r.asks != nil {
			r.asks <- f
		}
		if _, err := r.out.Write(f.Out); err != nil {
			return fmt.Errorf("print result: %w", err)
		}
		if _, err := r.err.Write(f.Err); err != nil {
			return fmt.Errorf("print result: %w", err)
		}
		file.Write(f.File)
		if f.Created && r.output != "" {
			if err := writeFile(r.output, file.Bytes(), r.replace); err != nil {
				return err
			}
		}
		if f.Exit != nil && *f.Exit == 0 {
			return nil
		}
		if f.Exit != nil {
			return &exitError{*f.Exit, nil}
		}
	}
}

// parseServer accepts an https address, or an http address of this machine.
func parseServer(text string) (*url.URL, error) {
	u, err := url.Parse(strings.TrimRight(text, "/"))
	if err != nil || u.Host == "" || u.Opaque != "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, usageError("--server: %.200q is not an address such as https://agent.example.com", text)
	}
	u.Host = strings.ToLower(u.Host)
	switch {
	case u.Scheme == "https", u.Scheme == "http" && thisMachine(u.Hostname()):
		return u, nil
	case u.Scheme == "http":
		return nil, usageError("--server: %s would send the token unencrypted; use https, or an SSH tunnel to localhost", u)
	}
	return nil, usageError("--server: %s is neither https nor http", u)
}

// thisMachine reports whether a host is a loopback address.
func thisMachine(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

func (c *cli) serverFlag(root *cobra.Command) {
	root.PersistentFlags().StringVar(&c.server, "server", c.environ["AGENT_SERVER"],
		"run the command on this server, for example https://agent.example.com")
	root.PersistentFlags().Lookup("server").DefValue = "" // help is the same with AGENT_SERVER
}

// clientVariables are read by the command line alone.
var clientVariables = []string{"AGENT_OUTPUT", "AGENT_URL", "AGENT_SERVER", "AGENT_TOKEN"}
