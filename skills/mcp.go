package skills

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// RemoteTool is what an mcp: skill calls: a tool of a server, as it was when it was accepted. Pin is the hash of
// that; a tool that shows another one is not called.
type RemoteTool struct {
	Server, Tool, Pin string
}

// RemoteCall calls a tool of another program. args are valid and complete. It returns when ctx ends, and may be
// called from many goroutines.
type RemoteCall func(ctx context.Context, t RemoteTool, c Call, args map[string]any) (any, error)

const maxToolName = 128

var (
	serverPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,23}$`)
	pinPattern    = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// mcpHandler calls a tool of an MCP server.
type mcpHandler struct{ tool RemoteTool }

// parseMCP reads mcp:SERVER/TOOL and the pin.
func parseMCP(rest string, config json.RawMessage) (handler, []error) {
	var c struct {
		Pin string `json:"pin"`
	}
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	var problems []error
	server, tool, _ := strings.Cut(rest, "/")
	if !serverPattern.MatchString(server) || tool == "" || len(tool) > maxToolName || strings.ContainsAny(tool, "\x00\r\n") {
		problems = append(problems, fmt.Errorf("handler: mcp:%s must name a server and one of its tools: mcp:server/tool", rest))
	}
	if !pinPattern.MatchString(c.Pin) {
		problems = append(problems, errors.New(
			"config.pin: must be the hash of the accepted tool; declare the server with kind: mcp_server and run agent mcp sync, which mounts its tools"))
	}
	return mcpHandler{RemoteTool{Server: server, Tool: tool, Pin: c.Pin}}, problems
}

func (h mcpHandler) ready(r *Registry) error {
	if r.mcp == nil {
		return errors.New("this program has no MCP client")
	}
	return nil
}

func (h mcpHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	return r.mcp(ctx, h.tool, c, args)
}
