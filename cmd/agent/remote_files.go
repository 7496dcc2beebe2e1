package main

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"syscall"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// openFile opens a file of the caller: on a server, only a file that the caller sent.
func (c *cli) openFile(name string) (io.ReadCloser, error) {
	if c.host == nil {
		return os.Open(name)
	}
	content, sent := c.sent.Files[name]
	if !sent {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.ENOENT}
	}
	return io.NopCloser(bytes.NewReader(content)), nil
}

// writeFile writes the file that outputFlag names, on the caller's machine. Without replace, an existing file is an
// error.
func (c *cli) writeFile(name string, content []byte, replace bool) error {
	out, remote := c.out.(*callerStream)
	if !remote {
		return writeFile(name, content, replace)
	}
	for part := range slices.Chunk(content, maxFrame) {
		if err := out.frames.send(commandFrame{File: part}); err != nil {
			return err
		}
	}
	return out.frames.send(commandFrame{Created: true})
}

// sentFolder returns the workspace that a caller sent; nil for a command on this machine.
func (c *cli) sentFolder() fs.FS {
	if c.host != nil && c.folder == nil {
		return &zip.Reader{}
	}
	return c.folder
}

// reference matches a reference to a variable of the environment, or to a file.
var reference = regexp.MustCompile(`\$\{(?:env:)?(\w+)\}|"url_env":"(\w+)"|"(file:)`)

// checkSentWorkspace rejects changes of documents that reach into the server's machine. A workspace from a caller can
// name secrets and programs of that machine, to which its author may have no access. So a server accepts such a
// document only if it is already in its database.
func (c *cli) checkSentWorkspace(ctx context.Context, s *session, files workspace.Workspace) error {
	if c.host == nil {
		return nil
	}
	reasons := map[string]string{}
	for _, d := range files.MCPServers {
		if len(d.Definition.Command) > 0 {
			reasons["mcp_server "+d.Definition.Name] = "it runs a program on the server"
		}
		recordPrivileged(reasons, "mcp_server "+d.Definition.Name, d.Definition)
	}
	for _, d := range files.Databases {
		recordPrivileged(reasons, "database "+d.Definition.Name, d.Definition)
	}
	for _, d := range files.Skills {
		recordPrivileged(reasons, "skill "+d.Definition.Name, d.Definition)
	}
	for _, d := range files.Webhooks {
		recordPrivileged(reasons, "webhook "+d.Definition.Name, d.Definition)
	}
	for _, d := range files.Targets {
		recordPrivileged(reasons, "webhook_target "+d.Definition.Name, d.Definition)
	}
	for _, d := range files.Channels {
		recordPrivileged(reasons, "channel "+d.Definition.Name, d.Definition)
		for _, file := range []string{"smtp_ca", "tls_cert", "tls_key"} {
			if d.Definition.Settings[file] != "" {
				reasons["channel "+d.Definition.Name] = "it reads a file of the server"
			}
		}
	}
	if len(reasons) == 0 {
		return nil
	}
	diff, err := workspace.Plan(ctx, s.Pool, files, workspace.Options{}) // connects to no named database
	if err != nil {
		return err
	}
	for _, item := range diff.Items {
		reason := reasons[item.Kind+" "+item.Name]
		if reason != "" && (item.Action == workspace.Create || item.Action == workspace.Update) {
			return &exitError{exitUsage, hint(fmt.Errorf("%s %s: %s", item.Kind, item.Name, reason),
				"apply it on the machine of the server")}
		}
	}
	return nil
}

// recordPrivileged adds to reasons that a document refers to a secret setting of the server, or to a file.
func recordPrivileged(reasons map[string]string, name string, definition any) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(definition); err != nil {
		reasons[name] = "it cannot be checked: " + err.Error()
		return
	}
	for _, match := range reference.FindAllStringSubmatch(text.String(), -1) {
		if match[3] != "" {
			reasons[name] = "it reads a file of the server"
		}
		for _, variable := range match[1:3] {
			if slices.ContainsFunc(config.Settings(), func(s config.Setting) bool { return s.Secret && s.Name == variable }) {
				reasons[name] = "it reads " + variable + ", a secret of the server"
			}
		}
	}
}
