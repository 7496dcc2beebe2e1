package main

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/principals"
)

// A command with --server runs in the process of the server, with the server's database and settings. It is the same
// command with the same arguments, so its output and exit code are the same. The client sends the arguments, standard
// input and the named files, and prints the response (remotehost.go).

const (
	// commandsPath is the route that runs commands.
	commandsPath = "/v1/commands"
	// maxSent bounds the files and the standard input of a command, in bytes.
	maxSent = 20 << 20
	// aliveInterval is the longest pause between two frames. After silenceLimit without a frame the client gives up.
	aliveInterval = 10 * time.Second
	silenceLimit  = 60 * time.Second
)

// sentVariables are the variables of the caller's terminal that apply to a remote command.
var sentVariables = []string{
	"AGENT_OUTPUT", "AGENT_LOG_LEVEL", "AGENT_LOG_FORMAT", "NO_COLOR", "CLICOLOR_FORCE", "TERM",
}

// remoteCommands run on a server, with all commands below them, except localCommands. Each requires the scope of its
// HTTP route.
var remoteCommands = map[string]principals.Scope{
	"activity":           principals.RunsRead,
	"agents":             principals.RunsRead,
	"apply":              principals.Administer,
	"approvals":          principals.ApprovalsDecide,
	"approvals ls":       principals.ApprovalsRead,
	"approvals show":     principals.ApprovalsRead,
	"automations":        principals.Operate,
	"automations dead":   principals.RunsRead,
	"automations ls":     principals.RunsRead,
	"automations runs":   principals.RunsRead,
	"automations show":   principals.RunsRead,
	"channels":           principals.Administer,
	"channels ls":        principals.RunsRead,
	"channels show":      principals.RunsRead,
	"chat":               principals.ThreadsWrite,
	"doctor":             principals.Operate,
	"documents":          principals.ThreadsWrite,
	"documents get":      principals.ThreadsRead,
	"documents ls":       principals.ThreadsRead,
	"documents show":     principals.ThreadsRead,
	"eval":               principals.Operate,
	"eval add":           principals.ThreadsRead,
	"eval label":         principals.RunsWrite,
	"eval labels":        principals.ThreadsRead,
	"eval ls":            principals.RunsRead,
	"eval shadow ls":     principals.RunsRead,
	"eval show":          principals.RunsRead,
	"executions":         principals.RunsWrite,
	"executions ls":      principals.RunsRead,
	"executions show":    principals.RunsRead,
	"executions status":  principals.RunsRead,
	"executions stuck":   principals.RunsRead,
	"executions waiting": principals.RunsRead,
	"flows":              principals.RunsRead,
	"heartbeat":          principals.Operate,
	"lanes":              principals.Operate,
	"lanes ls":           principals.RunsRead,
	"mcp accept":         principals.Administer,
	"mcp ls":             principals.RunsRead,
	"mcp offer":          principals.Administer,
	"mcp show":           principals.RunsRead,
	"mcp sync":           principals.Operate,
	"mcp withdraw":       principals.Administer,
	"memory":             principals.ThreadsWrite,
	"memory conflicts":   principals.ThreadsRead,
	"memory get":         principals.ThreadsRead,
	"memory ls":          principals.ThreadsRead,
	"memory search":      principals.ThreadsRead,
	"memory stats":       principals.ThreadsRead,
	"models":             principals.RunsRead,
	"models check":       principals.Operate,
	"objectives":         principals.RunsWrite,
	"objectives ls":      principals.RunsRead,
	"objectives show":    principals.RunsRead,
	"operate":            principals.Operate,
	"pause":              principals.Operate,
	"principals":         principals.Administer,
	"requests":           principals.RunsWrite,
	"requests ls":        principals.RunsRead,
	"requests show":      principals.RunsRead,
	"resume":             principals.Operate,
	"retention":          principals.Administer,
	"selfheal":           principals.Operate,
	"selfheal report":    principals.RunsRead,
	"sessions":           principals.Administer,
	"skills":             principals.Operate,
	"skills ls":          principals.RunsRead,
	"skills show":        principals.RunsRead,
	"threads":            principals.ThreadsWrite,
	"threads access":     principals.ThreadsRead,
	"threads locks":      principals.ThreadsRead,
	"threads ls":         principals.ThreadsRead,
	"threads show":       principals.ThreadsRead,
	"tokens":             principals.Administer,
	"trace":              principals.RunsRead,
	"version":            principals.Authenticated,
	"webhooks":           principals.Operate,
	"webhooks endpoints": principals.RunsRead,
	"webhooks ls":        principals.RunsRead,
	"webhooks show":      principals.RunsRead,
	"webhooks targets":   principals.RunsRead,
	"why":                principals.RunsRead,
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

// place reports where a command runs: on a server, for callers with the scope, or on this machine, for the reason.
// listed is false for a command in neither list, which runs on this machine.
func place(cmd *cobra.Command) (scope principals.Scope, reason string, listed bool) {
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

func commandName(cmd *cobra.Command) string {
	return strings.TrimPrefix(strings.TrimPrefix(cmd.CommandPath(), "agent"), " ")
}

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
		scope, reason, _ := place(cmd)
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

// commandRequest is the body of a command: its arguments, and its input from the caller's machine.
type commandRequest struct {
	Args    []string          `json:"args"`
	Environ map[string]string `json:"environ,omitempty"`
	Stdin   []byte            `json:"stdin,omitempty"`
	// Files are the files that the arguments name, by the name as it is written there.
	Files map[string][]byte `json:"files,omitempty"`
	// Folder is a zip of the workspace that the arguments name.
	Folder []byte `json:"folder,omitempty"`
	// Width is that of the terminal; 0 without one.
	Width       int  `json:"width,omitempty"`
	OutTerminal bool `json:"out_terminal,omitempty"`
	ErrTerminal bool `json:"err_terminal,omitempty"`
	// Asks says that the caller is a console. In agent operate it asks its user about approvals while a line runs; agent
	// chat without a message prints the greeting.
	Asks bool `json:"asks,omitempty"`
}

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

// commandRequest collects the files and the standard input that a command reads.
func (c *cli) commandRequest(cmd *cobra.Command, args []string) (commandRequest, error) {
	req := commandRequest{
		Args: c.args, Environ: map[string]string{}, Files: map[string][]byte{}, Width: terminalWidth(c.out),
		OutTerminal: terminal(c.out), ErrTerminal: terminal(c.err),
	}
	for _, name := range sentVariables {
		if value := c.environ[name]; value != "" {
			req.Environ[name] = value
		}
	}
	files, stdin := inputs(cmd, args)
	left := int64(maxSent)
	for _, name := range files {
		content, err := readBounded(name, &left)
		if err != nil {
			return req, err
		}
		if content != nil {
			req.Files[name] = content
		}
	}
	if commandName(cmd) == "apply" {
		if watches(cmd) {
			return req, usageError("agent apply --watch runs only on this machine: leave out --watch, or --server")
		}
		if args[0] == "" {
			return req, usageError("DIR is empty; name the folder of the workspace")
		}
		var err error
		if req.Folder, err = packFolder(args[0], &left); err != nil {
			return req, err
		}
	}
	if dir := candidateFolder(cmd); dir != "" {
		var err error
		if req.Folder, err = packFolder(dir, &left); err != nil {
			return req, err
		}
	}
	if stdin {
		var err error
		if req.Stdin, err = io.ReadAll(io.LimitReader(c.in, left+1)); err != nil {
			return req, fmt.Errorf("read standard input: %w", err)
		}
		if int64(len(req.Stdin)) > left {
			return req, tooMuch("standard input")
		}
	}
	return req, nil
}

// candidateFolder returns the folder of agent eval run --candidate.
func candidateFolder(cmd *cobra.Command) string {
	if name := commandName(cmd); name != "eval run" && name != "eval counterfactual" {
		return ""
	}
	return cmd.Flags().Lookup("candidate").Value.String()
}

func tooMuch(what string) error {
	return usageError("%s has more than %d bytes, too many for a server; run the command there", what, maxSent)
}

// inputs lists the files that a command reads, and reports whether it reads standard input.
func inputs(cmd *cobra.Command, args []string) (files []string, stdin bool) {
	name := func(text string) {
		switch {
		case text == "-":
			stdin = true
		case len(text) > 1 && text[0] == '@':
			files = append(files, text[1:])
		}
	}
	switch commandName(cmd) {
	case "documents add":
		if args[0] == "-" {
			return nil, true
		}
		return args[:1], false
	case "chat":
		files, _ = cmd.Flags().GetStringArray("file") // the flag exists
		return files, interactive(cmd, args)
	case "operate":
		return nil, interactive(cmd, args)
	case "selfheal report":
		if set, _ := cmd.Flags().GetString("set"); set != "" {
			files = []string{set}
		}
		return files, false
	case "eval add":
		if to, _ := outputFlag(cmd); to != "" {
			files = []string{to}
		}
		return files, false
	}
	for _, flag := range []string{"input", "data"} {
		if f := cmd.Flags().Lookup(flag); f != nil {
			name(f.Value.String())
		}
	}
	return files, stdin
}

// interactive reports whether a command is a conversation: it reads messages until its input ends.
func interactive(cmd *cobra.Command, args []string) bool {
	name := commandName(cmd)
	return (name == "chat" || name == "operate") && len(args) == 0 && !watches(cmd)
}

// watches reports whether a command runs until ^C, which is then no failure.
func watches(cmd *cobra.Command) bool {
	f := cmd.Flags().Lookup("watch")
	return f != nil && f.Value.String() == "true"
}

// outputFlag returns the file that a command writes, and whether it may exist.
func outputFlag(cmd *cobra.Command) (name string, replace bool) {
	value := func(flag string) string { return cmd.Flags().Lookup(flag).Value.String() }
	switch commandName(cmd) {
	case "documents get":
		return value("output"), false
	case "eval run", "eval counterfactual":
		return value("junit"), true
	case "eval add":
		return value("to"), true
	}
	return "", false
}

// readBounded reads a file. The command itself reports a missing file.
func readBounded(name string, left *int64) ([]byte, error) {
	file, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, *left+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if *left -= int64(len(content)); *left < 0 {
		return nil, tooMuch(name)
	}
	return append([]byte{}, content...), nil
}

// packFolder zips the files of a workspace that loading it reads.
func packFolder(dir string, left *int64) ([]byte, error) {
	if _, err := readWorkspace(dir, nil); err != nil {
		return nil, err
	}
	read := &recordingFS{FS: os.DirFS(dir), files: map[string][]byte{}}
	if _, err := readWorkspace(dir, read); err != nil {
		return nil, err
	}
	var packed bytes.Buffer
	out := zip.NewWriter(&packed)
	for _, name := range slices.Sorted(maps.Keys(read.files)) {
		if *left -= int64(len(read.files[name])); *left < 0 {
			return nil, tooMuch(dir)
		}
		w, err := out.Create(name)
		if err == nil {
			_, err = w.Write(read.files[name])
		}
		if err != nil {
			return nil, fmt.Errorf("pack %s: %w", dir, err)
		}
	}
	if err := out.Close(); err != nil {
		return nil, fmt.Errorf("pack %s: %w", dir, err)
	}
	return packed.Bytes(), nil
}

// recordingFS keeps the content of each file that is opened.
type recordingFS struct {
	fs.FS
	files map[string][]byte
}

func (r *recordingFS) Open(name string) (fs.File, error) {
	file, err := r.FS.Open(name)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err != nil || !info.Mode().IsRegular() || r.files[name] != nil {
		return file, err
	}
	content, err := fs.ReadFile(r.FS, name)
	r.files[name] = append([]byte{}, content...)
	return file, err
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
	asks        chan commandFrame // frames with an approval to ask about; nil for none
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
		err = r.print(resp.Body, func() { silent.Reset(silenceLimit) })
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
		return hint(fmt.Errorf("%s: %w", r.server.Host, errSilent), unknownEnd)
	}
	return err
}

var errSilent = fmt.Errorf("the server was silent for %s", silenceLimit)

// unknownEnd is the advice after a lost connection.
const unknownEnd = "the command may have been done: see agent activity ls"

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

// print prints frames until the exit code.
func (r *remoteCall) print(body io.Reader, alive func()) error {
	frames := json.NewDecoder(body)
	var file bytes.Buffer
	for {
		var f commandFrame
		if err := frames.Decode(&f); err != nil {
			return hint(fmt.Errorf("%s: the connection ended before the command", r.server.Host), unknownEnd)
		}
		alive()
		if f.Interrupted != "" {
			r.interrupted = f.Interrupted
		}
		if f.Version != "" && f.Version != buildVersion() && !r.warned {
			r.warned = true
			r.infof("agent: the server runs %s, this is %s", printable(f.Version), buildVersion())
		}
		if f.Ask != "" && r.asks != nil {
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
