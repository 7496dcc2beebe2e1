package main

// What a workspace that a caller sent may change on a server.

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"regexp"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// reference matches a reference to a variable of the environment, or to a file by its absolute path, in JSON.
var reference = regexp.MustCompile(`\$\{(?:env:)?(\w+)\}|"url_env":"(\w+)"|"file:(/[^"]*)"`)

// checkSentWorkspace rejects changes of documents that run a program on the server, read a file there, or read a secret
// of the server ([config.IsSecret]). The author of the workspace may have no access to them. An unchanged document of
// the database passes. References to other variables of the environment pass too.
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

// recordPrivileged adds to reasons that a document refers to a secret of the server, or to a file.
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
			reasons[name] = "it reads a file of the server, " + match[3]
		}
		for _, variable := range match[1:3] {
			if config.IsSecret(variable) {
				reasons[name] = "it reads " + variable + ", a secret of the server"
			}
		}
	}
}
