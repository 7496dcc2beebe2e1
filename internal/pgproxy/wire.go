package pgproxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
)

// The codes of first messages that begin no session.
const (
	sslRequest    = 80877103
	gssRequest    = 80877104
	cancelRequest = 80877102
)

// Requests reads what a client says.
type Requests struct {
	in         *bufio.Reader
	statements map[string]string // prepared, by name
}

// Request is what a client sends before it waits for an answer: one statement, or a batch that commits together.
type Request struct {
	Raw      []byte
	Last     int      // where its last message begins
	Simple   bool     // a query in the simple protocol, such as begin and commit
	Prepared []string // statements that the server is to read
	Bound    []string // statements that it is to carry out
	Executes bool     // it is to carry them out now
}

// NewRequests reads the first message of a session, which it returns, and answers no to encryption before. A message
// that asks for a cancel begins none: IsCancel.
func NewRequests(client io.ReadWriter) (*Requests, []byte, error) {
	in := bufio.NewReader(client)
	for {
		head, err := in.Peek(8)
		if err != nil {
			return nil, nil, err
		}
		code := binary.BigEndian.Uint32(head[4:])
		first := make([]byte, binary.BigEndian.Uint32(head))
		if _, err := io.ReadFull(in, first); err != nil {
			return nil, nil, err
		}
		if code != sslRequest && code != gssRequest {
			return &Requests{in: in, statements: map[string]string{}}, first, nil
		}
		if _, err := client.Write([]byte{'N'}); err != nil {
			return nil, nil, err
		}
	}
}

// Forward passes the first message of a client to the server, and each request to send, until send returns false.
func Forward(client io.ReadWriter, server io.Writer, send func(Request) bool) {
	requests, first, err := NewRequests(client)
	if err == nil {
		_, err = server.Write(first)
	}
	for err == nil {
		var r Request
		if r, err = requests.Next(); err == nil && !send(r) {
			return
		}
	}
}

// IsCancel reports a first message that asks the server to cancel what another session does.
func IsCancel(first []byte) bool { return binary.BigEndian.Uint32(first[4:]) == cancelRequest }

// Next reads the next request.
func (r *Requests) Next() (next Request, err error) {
	for {
		kind, frame, err := readFrame(r.in)
		if err != nil {
			return Request{}, err
		}
		next.Last = len(next.Raw)
		next.Raw = append(next.Raw, frame...)
		r.read(&next, kind, frame[5:])
		if strings.IndexByte("PBDEC", kind) < 0 { // else more follows before the client waits
			return next, nil
		}
	}
}

// read takes one message into its request.
func (r *Requests) read(next *Request, kind byte, body []byte) {
	switch kind {
	case 'P':
		name, rest := cString(body)
		text, _ := cString(rest)
		r.statements[name] = text
		next.Prepared = append(next.Prepared, text)
	case 'B':
		_, rest := cString(body)
		name, _ := cString(rest)
		next.Bound = append(next.Bound, r.statements[name])
	case 'E':
		next.Executes = true
	case 'Q':
		text, _ := cString(body)
		next.Bound, next.Executes, next.Simple = append(next.Bound, text), true, true
	}
}

// Answers passes on what a server says until a connection ends, or an answer is lost: then it returns true at the end
// of that answer, when what was asked has been done, and committed where it should be. lost is asked before each
// message of an answer.
func Answers(server io.Reader, client io.Writer, lost func() bool) bool {
	in := bufio.NewReader(server)
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return false
		}
		if lost() {
			if kind == 'Z' { // ready for the next
				return true
			}
			continue
		}
		if _, err := client.Write(frame); err != nil {
			return false
		}
	}
}

var errFrame = errors.New("not a message of the protocol")

// readFrame reads one message: a kind, a length that counts itself, and a body.
func readFrame(in *bufio.Reader) (kind byte, frame []byte, err error) {
	head, err := in.Peek(5)
	if err != nil {
		return 0, nil, err
	}
	size := binary.BigEndian.Uint32(head[1:])
	if size < 4 || size > 1<<28 {
		return 0, nil, errFrame
	}
	frame = make([]byte, 1+size)
	_, err = io.ReadFull(in, frame)
	return frame[0], frame, err
}

// cString splits a body after its first zero.
func cString(body []byte) (string, []byte) {
	text, rest, _ := bytes.Cut(body, []byte{0})
	return string(text), rest
}
