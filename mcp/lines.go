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

// lines reads the messages of a client, one a line. What is no message is answered here, and passed over: it would be the session's end.
type lines struct {
	io.Closer
	in   *bufio.Reader
	out  io.Writer
	most int    // bytes of a message
	line []byte // what of the last one is still to be read
}

func (l *lines) Read(p []byte) (int, error) {
	for len(l.line) == 0 {
		line, err := l.next()
		if err != nil {
			return 0, err
		}
		if problem := l.problem(line); problem == nil {
			l.line = line
		} else if err := l.refuse(line, problem); err != nil {
			return 0, err
		}
	}
	n := copy(p, l.line)
	l.line = l.line[n:]
	return n, nil
}

// next is the next line that is not blank, with its end. Of one that is too long it is the beginning.
func (l *lines) next() ([]byte, error) {
	for {
		var line []byte
		more := bufio.ErrBufferFull
		for errors.Is(more, bufio.ErrBufferFull) {
			var part []byte
			if part, more = l.in.ReadSlice('\n'); len(line) <= l.most {
				line = append(line, part...)
			}
		}
		if len(bytes.TrimSpace(line)) > 0 {
			return line, nil // an error comes again
		}
		if more != nil {
			return nil, more
		}
	}
}

// problem is what keeps a line from being a message, or several. Those of a batch are the SDK's to judge.
func (l *lines) problem(line []byte) *jsonrpc.Error {
	line = bytes.TrimSpace(line)
	switch {
	case len(line) > l.most:
		return &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: fmt.Sprintf("a message may have %d bytes", l.most)}
	case !json.Valid(line):
		return &jsonrpc.Error{Code: jsonrpc.CodeParseError, Message: "this line is no JSON; send each message on a line of its own"}
	case line[0] == '[':
		return nil
	}
	if _, err := jsonrpc.DecodeMessage(line); err != nil {
		return &jsonrpc.Error{Code: jsonrpc.CodeInvalidRequest, Message: "this is no message of JSON-RPC 2.0: " + err.Error()}
	}
	return nil
}

// refuse answers a line, under its id if it has one.
func (l *lines) refuse(line []byte, problem *jsonrpc.Error) error {
	var asked struct {
		ID json.RawMessage `json:"id"`
	}
	if json.Unmarshal(line, &asked) != nil || len(asked.ID) == 0 || bytes.ContainsAny(asked.ID[:1], "[{tf") {
		asked.ID = json.RawMessage("null")
	}
	answer, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": asked.ID, "error": problem})
	if err != nil {
		return fmt.Errorf("answer a line: %w", err)
	}
	_, err = l.out.Write(append(answer, '\n'))
	return err
}

// oneByOne lets several write, a message at a time.
type oneByOne struct {
	io.WriteCloser
	mu sync.Mutex
}

func (w *oneByOne) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.WriteCloser.Write(p)
}
