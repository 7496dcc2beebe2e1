package mcp

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
)

// lineReader reads the peer's messages, one per line. It skips lines for which the SDK would end the session.
type lineReader struct {
	io.Closer
	in       *bufio.Reader
	maxBytes int    // a longer line is cut, but stays longer
	rest     []byte // unread rest of the current line
	// accept reports whether the SDK reads a line. Its error ends the session.
	accept func(line []byte) (bool, error)
}

func (l *lineReader) Read(p []byte) (int, error) {
	for len(l.rest) == 0 {
		line, err := l.next()
		if err != nil {
			return 0, err
		}
		line = bytes.TrimSpace(line) // the SDK ends the session at a blank after a message
		if ok, err := l.accept(line); err != nil {
			return 0, err
		} else if ok {
			l.rest = append(line, '\n')
		}
	}
	n := copy(p, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// next returns the next non-blank line, with its newline. It cuts a line that is too long.
func (l *lineReader) next() ([]byte, error) {
	for {
		var line []byte
		more := bufio.ErrBufferFull
		for errors.Is(more, bufio.ErrBufferFull) {
			var part []byte
			if part, more = l.in.ReadSlice('\n'); len(line) <= l.maxBytes {
				line = append(line, part...)
			}
		}
		if len(bytes.TrimSpace(line)) > 0 {
			return line, nil // the next read returns the error again
		}
		if more != nil {
			return nil, more
		}
	}
}

// clientLines validates a client's lines, and rejects invalid ones.
type clientLines struct {
	out      io.Writer
	maxBytes int
	batches  bool // the client's version of the protocol has batches
}

func (l *clientLines) accept(line []byte) (bool, error) {
	if problem := l.validate(line); problem != nil {
		return false, reject(l.out, line, problem)
	}
	return true, nil
}

// validate returns why a line is no valid message, or batch of messages; nil for a valid one.
func (l *clientLines) validate(line []byte) *jsonrpc.Error {
	switch {
	case len(line) > l.maxBytes:
		return &jsonrpc.Error{
			Code:    jsonrpc.CodeInvalidRequest,
			Message: fmt.Sprintf("a message may have at most %d bytes", l.maxBytes),
		}
	case !json.Valid(line):
		return &jsonrpc.Error{
			Code:    jsonrpc.CodeParseError,
			Message: "the line is not JSON; send each message on its own line",
		}
	case line[0] == '[' && !l.batches:
		return &jsonrpc.Error{
			Code:    jsonrpc.CodeInvalidRequest,
			Message: "this version of MCP has no batches; send each message on its own line",
		}
	}
	messages := []json.RawMessage{line}
	if line[0] == '[' && (json.Unmarshal(line, &messages) != nil || len(messages) == 0) {
		return &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: "the batch is empty"}
	}
	for _, text := range messages {
		message, err := jsonrpc.DecodeMessage(text)
		if err != nil {
			return &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: "the line is not a JSON-RPC 2.0 message: " +
				err.Error()}
		}
		if request, ok := message.(*jsonrpc.Request); ok && request.Method == "initialize" {
			var params struct{ ProtocolVersion string }
			l.batches = json.Unmarshal(request.Params, &params) == nil && params.ProtocolVersion == lastWithBatches
		}
	}
	return nil
}

// lastWithBatches is the one version of MCP with batches.
const lastWithBatches = "2025-03-26"

// reject responds to a line with an error. The response has the line's id, or null.
func reject(out io.Writer, line []byte, problem *jsonrpc.Error) error {
	var request struct {
		ID json.RawMessage `json:"id"`
	}
	if json.Unmarshal(line, &request) != nil || len(request.ID) == 0 || bytes.ContainsAny(request.ID[:1], "[{tf") {
		request.ID = json.RawMessage("null")
	}
	answer, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": request.ID, "error": problem})
	if err != nil {
		return fmt.Errorf("reject a line: %w", err)
	}
	_, err = out.Write(append(answer, '\n'))
	return err
}

// serializedWriter serializes concurrent writes of messages.
type serializedWriter struct {
	io.WriteCloser
	mu sync.Mutex
}

func (w *serializedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.WriteCloser.Write(p)
}
