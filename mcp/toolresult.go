package mcp

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/schema"
	"github.com/lanekeeper/lanekeeper/skills"
)

// toolResult converts the state of a call's execution to the result for the client.
func toolResult(execution executions.Execution) *sdk.CallToolResult {
	var result *sdk.CallToolResult
	switch {
	case execution.Status == executions.Completed:
		result = successResult(execution.Result)
	case execution.Status == executions.Waiting && execution.WaitingFor != nil && *execution.WaitingFor == "approval":
		result = pendingResult(*execution.WaitingKey)
	case !execution.Status.Ended() && execution.DedupeKey != nil:
		result = failureResult("the call is still running; call again with the same arguments")
	case !execution.Status.Ended():
		result = failureResult("the call is still running as execution " + execution.ID +
			"; do not call again, since that would be a second call; its trace " + execution.TraceID + " shows the result")
	case execution.ErrorMessage != nil:
		result = failureResult(*execution.ErrorMessage)
	default:
		result = failureResult("the call was " + string(execution.Status))
	}
	result.Meta = sdk.Meta{"lanekeeper/trace-id": execution.TraceID, "lanekeeper/execution-id": execution.ID}
	return result
}

// successResult returns the value as text, and as structured content if it is an object.
func successResult(value json.RawMessage) *sdk.CallToolResult {
	var text string
	var fields map[string]json.RawMessage
	result := &sdk.CallToolResult{}
	switch {
	case json.Unmarshal(value, &text) == nil:
	case json.Unmarshal(value, &fields) == nil && fields != nil:
		text, result.StructuredContent = string(value), value
	default:
		text = string(value)
	}
	result.Content = []sdk.Content{&sdk.TextContent{Text: text}}
	return result
}

// pendingResult returns a result for a call that awaits approval. The result is an error, so a caller does not mistake
// the call for done.
func pendingResult(approval string) *sdk.CallToolResult {
	result := failureResult(fmt.Sprintf("Nothing was done yet: the call awaits approval %s. "+
		"Once an admin has approved it, call again with the same arguments.", approval))
	result.StructuredContent = map[string]string{"status": "pending_approval", "approval_id": approval}
	return result
}

// failureResult returns a result with an error message.
func failureResult(text string) *sdk.CallToolResult {
	return &sdk.CallToolResult{IsError: true, Content: []sdk.Content{&sdk.TextContent{Text: text}}}
}

// readResult converts a tool's result to a skill's result: the structured content if present, otherwise the text. It
// summarizes other content by size and kind. The registry bounds the size. output is the tool's output schema.
func readResult(
	t skills.RemoteTool, result *sdk.CallToolResult, output any, redactText func(string) string,
) (any, error) {
	if len(result.InputRequests) > 0 {
		return nil, &skills.CallError{Class: skills.ClassHandler, Message: fmt.Sprintf(
			"%s/%s asks for input from a person, which this client does not support", t.Server, t.Tool)}
	}
	texts, attachments := splitContent(result.Content)
	text := strings.Join(texts, "\n")
	structured := exactContent(result.StructuredContent, text)
	text = redactText(text)
	if result.IsError {
		text = cmp.Or(text, "the tool failed and gave no message")
		return nil, &skills.CallError{
			Class:   skills.ClassHandler,
			Message: fmt.Sprintf("%s/%s: %s", t.Server, t.Tool, cleanText(text, 900)),
		}
	}
	if problem := outputMismatch(output, result.StructuredContent); problem != "" {
		return nil, &skills.CallError{
			Class: skills.ClassNoAnswer,
			Message: fmt.Sprintf("%s/%s: its result does not match its outputSchema: %s; the call may have taken effect",
				t.Server, t.Tool, cleanText(redactText(problem), 500)),
		}
	}
	switch {
	case structured != nil && len(attachments) == 0:
		return redact.Known(structured, redactText), nil
	case structured != nil:
		return map[string]any{
			"structured": redact.Known(structured, redactText),
			"attached":   redact.Known(attachments, redactText),
		}, nil
	case len(attachments) == 0:
		return text, nil
	case text == "":
		return map[string]any{"attached": redact.Known(attachments, redactText)}, nil
	}
	return map[string]any{"text": text, "attached": redact.Known(attachments, redactText)}, nil
}

// outputMismatch returns how structured content violates an output schema; "" if it does not. A schema that cannot be
// used permits anything.
func outputMismatch(output, structured any) string {
	if output == nil || structured == nil {
		return ""
	}
	raw, err := json.Marshal(output)
	if err != nil || len(raw) > maxDefinition || schema.Depth(raw, maxOutputDepth) > maxOutputDepth {
		return ""
	}
	compiled, err := schema.Compile(raw, func(*jsonschema.Compiler) {})
	if err != nil {
		return ""
	}
	if err := compiled.Validate(structured); err != nil {
		return schema.OneLine(err)
	}
	return ""
}

// exactContent returns structured content without rounded numbers: the SDK rounds those beyond float64. Servers repeat
// the content as text, so the text counts if its rounded form is equal.
func exactContent(structured any, text string) any {
	var rounded any
	if json.Unmarshal([]byte(text), &rounded) != nil || !reflect.DeepEqual(rounded, structured) {
		return structured
	}
	exact, err := exactjson.Decode([]byte(text))
	if err != nil {
		return structured
	}
	return exact
}

// splitContent separates the texts of a result's content and describes the rest.
func splitContent(content []sdk.Content) (texts []string, attachments []any) {
	for _, item := range content {
		switch c := item.(type) {
		case *sdk.TextContent:
			texts = append(texts, c.Text)
		case *sdk.ImageContent:
			attachments = append(attachments, describeBlob("image", c.MIMEType, c.Data))
		case *sdk.AudioContent:
			attachments = append(attachments, describeBlob("audio", c.MIMEType, c.Data))
		case *sdk.ResourceLink:
			attachments = append(attachments, map[string]any{
				"type": "resource_link", "uri": c.URI, "name": cleanText(c.Name, 200), "mime": c.MIMEType,
				"description": cleanText(c.Description, maxSchemaText),
			})
		case *sdk.EmbeddedResource:
			attachments = append(attachments, describeResource(c.Resource))
		default:
			attachments = append(attachments, map[string]any{"type": fmt.Sprintf("%T", item)})
		}
	}
	return texts, attachments
}

// describeResource returns an embedded resource: its text, or a description of its bytes.
func describeResource(r *sdk.ResourceContents) map[string]any {
	if r == nil {
		return map[string]any{"type": "resource"}
	}
	described := map[string]any{"type": "resource", "uri": r.URI, "mime": r.MIMEType, "text": r.Text}
	if len(r.Blob) > 0 {
		described = describeBlob("resource", r.MIMEType, r.Blob)
		described["uri"] = r.URI
	}
	return described
}

// describeBlob describes binary data.
func describeBlob(kind, mime string, data []byte) map[string]any {
	sum := sha256.Sum256(data)
	return map[string]any{"type": kind, "mime": mime, "bytes": len(data), "sha256": hex.EncodeToString(sum[:])}
}

// protocolError returns the message of an error that a reachable server sent. The SDK's own codes, -32003 to -32005,
// mean a lost connection.
func protocolError(err error) (string, bool) {
	e, ok := errors.AsType[*jsonrpc.Error](err)
	if !ok || e.Code <= -32003 && e.Code >= -32005 || errors.Is(err, sdk.ErrConnectionClosed) {
		return "", false
	}
	return fmt.Sprintf("the server refuses the call: %s (%d)", e.Message, e.Code), true
}
