package mcp

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/skills"
)

// readResult makes a skill's result of a tool's: the structured content where there is some, else the text; what is
// neither is summarised, with its size and kind. A result that says it is an error is one. Its size is bounded by the
// registry.
func readResult(t skills.RemoteTool, result *sdk.CallToolResult, hide func(string) string) (any, error) {
	if len(result.InputRequests) > 0 {
		return nil, &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf(
			"%s/%s asks for input from a person, which is not given", t.Server, t.Tool)}
	}
	texts, others := split(result.Content)
	text := hide(strings.Join(texts, "\n"))
	if result.IsError {
		if text == "" {
			text = "the tool says that it failed, and nothing else"
		}
		return nil, &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf("%s/%s: %s", t.Server, t.Tool, cleanText(text, 900))}
	}
	switch {
	case result.StructuredContent != nil && len(others) == 0:
		return redact.Known(result.StructuredContent, hide), nil
	case result.StructuredContent != nil:
		return map[string]any{"structured": redact.Known(result.StructuredContent, hide), "attached": redact.Known(others, hide)}, nil
	case len(others) == 0:
		return text, nil
	case text == "":
		return map[string]any{"attached": redact.Known(others, hide)}, nil
	}
	return map[string]any{"text": text, "attached": redact.Known(others, hide)}, nil
}

// split takes the texts out of a result's content and describes the rest.
func split(content []sdk.Content) (texts []string, others []any) {
	for _, item := range content {
		switch c := item.(type) {
		case *sdk.TextContent:
			texts = append(texts, c.Text)
		case *sdk.ImageContent:
			others = append(others, blob("image", c.MIMEType, c.Data))
		case *sdk.AudioContent:
			others = append(others, blob("audio", c.MIMEType, c.Data))
		case *sdk.ResourceLink:
			others = append(others, map[string]any{
				"type": "resource_link", "uri": c.URI, "name": cleanText(c.Name, 200), "mime": c.MIMEType,
				"description": cleanText(c.Description, maxSchemaText),
			})
		case *sdk.EmbeddedResource:
			others = append(others, resource(c.Resource))
		default:
			others = append(others, map[string]any{"type": fmt.Sprintf("%T", item)})
		}
	}
	return texts, others
}

// resource is an embedded resource: its text, or what its bytes are.
func resource(r *sdk.ResourceContents) map[string]any {
	if r == nil {
		return map[string]any{"type": "resource"}
	}
	described := map[string]any{"type": "resource", "uri": r.URI, "mime": r.MIMEType, "text": r.Text}
	if len(r.Blob) > 0 {
		described = blob("resource", r.MIMEType, r.Blob)
		described["uri"] = r.URI
	}
	return described
}

// blob describes bytes that are of no use to a model as text.
func blob(kind, mime string, data []byte) map[string]any {
	sum := sha256.Sum256(data)
	return map[string]any{"type": kind, "mime": mime, "bytes": len(data), "sha256": hex.EncodeToString(sum[:])}
}

// protocolError is the message of an error that the server itself sent: it is there, and refuses the call. The SDK has
// codes of its own, from -32003 to -32005, for a connection that is gone.
func protocolError(err error) (string, bool) {
	e, ok := errors.AsType[*jsonrpc.Error](err)
	if !ok || e.Code <= -32003 && e.Code >= -32005 || errors.Is(err, sdk.ErrConnectionClosed) {
		return "", false
	}
	return fmt.Sprintf("the server refuses the call: %s (%d)", e.Message, e.Code), true
}
