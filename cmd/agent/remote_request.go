package main

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"
)

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

// sentVariables are the variables of the caller's terminal that apply to a remote command.
var sentVariables = []string{
	"AGENT_OUTPUT", "AGENT_LOG_LEVEL", "AGENT_LOG_FORMAT", "NO_COLOR", "CLICOLOR_FORCE", "TERM",
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
	left := int64(maxSentBytes)
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
			return req, tooLarge("standard input")
		}
	}
	return req, nil
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

// candidateFolder returns the folder of agent eval run --candidate.
func candidateFolder(cmd *cobra.Command) string {
	if name := commandName(cmd); name != "eval run" && name != "eval counterfactual" {
		return ""
	}
	return cmd.Flags().Lookup("candidate").Value.String()
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

// readBounded reads a file of at most *left bytes, and reduces *left by its size. It returns nil for a missing file,
// which the command itself reports.
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
		return nil, tooLarge(name)
	}
	return content, nil
}

// packFolder zips the files of a workspace that loading it reads.
func packFolder(dir string, left *int64) ([]byte, error) {
	if _, err := readWorkspace(dir, nil); err != nil { // with the paths of this machine in its errors
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
			return nil, tooLarge(dir)
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

// namingFS notes the name of each file and folder that is opened, also of a missing one.
type namingFS struct {
	fs.FS
	names map[string]bool
}

func newNamingFS(dir string) *namingFS { return &namingFS{os.DirFS(dir), map[string]bool{}} }

func (n *namingFS) Open(name string) (fs.File, error) {
	n.names[name] = true
	return n.FS.Open(name)
}

func tooLarge(what string) error {
	return usageError("%s has more than %d bytes, too many for a server; run the command there", what, maxSentBytes)
}
