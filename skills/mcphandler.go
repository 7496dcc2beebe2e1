package skills

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
)

// RemoteTool is the accepted tool of an mcp: skill. Pin is the hash of its definition. A RemoteCall must refuse a tool
// with another hash.
type RemoteTool struct {
	Server, Tool, Pin string
}

// RemoteCall calls a tool of another program with validated arguments. It returns when ctx ends, and is safe for
// concurrent use.
type RemoteCall func(ctx context.Context, t RemoteTool, c Call, args map[string]any) (any, error)

// mcpHandler calls a tool of an MCP server.
type mcpHandler struct{ tool RemoteTool }

var (
	serverPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,23}$`)
	pinPattern    = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

const maxToolName = 128

// parseMCP reads mcp:SERVER/TOOL and the pin.
func parseMCP(rest string, config json.RawMessage) (handler, fielderr.List) {
	var c struct {
		Pin string `json:"pin"`
	}
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	var problems fielderr.List
	server, tool, _ := strings.Cut(rest, "/")
	if !serverPattern.MatchString(server) || tool == "" || len(tool) > maxToolName ||
		strings.ContainsAny(tool, "\x00\r\n") {
		problems.Add("handler", "mcp:%s must name a server and one of its tools: mcp:server/tool", rest)
	}
	if !pinPattern.MatchString(c.Pin) {
		problems.Add("config.pin", "must be the hash of the accepted tool; declare the server with kind: mcp_server "+
			"and run agent mcp sync, which mounts its tools")
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
