// Package pgproxy is a proxy between a process and its database, for tests that break connections.
//
// A Proxy opens a connection to the server for each accepted connection. The test forwards data between the two. When
// one direction ends, the Proxy closes both. Requests and Answers parse the protocol: the requests of a client, and the
// end of each answer. The proxy supports no encryption.
package pgproxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Link forwards the data of one connection. The Proxy calls each method once, in its own goroutine. A method returns
// when its direction ends.
type Link interface {
	Upstream()
	Downstream()
}

// Proxy is a proxy in front of one database.
type Proxy struct {
	listener net.Listener
	target   *pgx.ConnConfig
	link     func(client, server net.Conn) Link
	group    sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

// Listen starts a proxy in front of the database of a URL, and closes it at the end of the test. The proxy calls link
// for each connection, one at a time.
func Listen(tb testing.TB, target string, link func(client, server net.Conn) Link) *Proxy {
	tb.Helper()
	config, err := pgx.ParseConfig(target)
	require.NoError(tb, err)
	listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	p := &Proxy{listener: listener, target: config, link: link, conns: map[net.Conn]struct{}{}}
	p.group.Go(p.accept)
	tb.Cleanup(p.Close)
	return p
}

// URL returns the connection string of the proxy. name is the application_name of its connections; "" for none.
func (p *Proxy) URL(name string) string {
	query := url.Values{"sslmode": {"disable"}}
	if name != "" {
		query.Set("application_name", name)
	}
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User: url.UserPassword(p.target.User, p.target.Password), RawQuery: query.Encode(),
	}
	return u.String()
}

// Close closes all connections, and returns when all Links have returned.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.listener.Close()
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.group.Wait()
}

func (p *Proxy) accept() {
	network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
	if strings.HasPrefix(p.target.Host, "/") {
		network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
	}
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(network, address) //nolint:noctx // it takes no time, and Close waits for it
		if err != nil {
			client.Close()
			continue
		}
		p.keep(client, server)
		l := p.link(client, server)
		p.group.Go(func() { defer p.drop(client, server); l.Upstream() })
		p.group.Go(func() { defer p.drop(client, server); l.Downstream() })
	}
}

// keep registers connections for Close.
func (p *Proxy) keep(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.conns[c] = struct{}{}
		if p.closed {
			c.Close()
		}
	}
}

// drop closes connections.
func (p *Proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

// Codes of first messages that start no session.
const (
	sslRequest    = 80877103
	gssRequest    = 80877104
	cancelRequest = 80877102
)

// Requests reads the requests of a client.
type Requests struct {
	in         *bufio.Reader
	statements map[string]string // prepared, by name
}

// Request is the data that a client sends before it waits for an answer: one statement, or a batch that commits
// together.
type Request struct {
	Raw      []byte
	Last     int      // offset of the last message in Raw
	Simple   bool     // a query in the simple protocol, such as begin and commit
	Prepared []string // statements to parse
	Bound    []string // statements to execute
	Executes bool     // has an Execute message, or is Simple
}

// maxFirst bounds the first message of a session, as the server does.
const maxFirst = 10_000

// NewRequests reads and returns the first message of a session. It declines encryption first. The first message may be
// a cancel request, see IsCancel.
func NewRequests(client io.ReadWriter) (*Requests, []byte, error) {
	in := bufio.NewReader(client)
	for {
		head, err := in.Peek(8)
		if err != nil {
			return nil, nil, err
		}
		code := binary.BigEndian.Uint32(head[4:])
		size := binary.BigEndian.Uint32(head)
		if size < 8 || size > maxFirst {
			return nil, nil, fmt.Errorf("the first message has %d bytes", size)
		}
		first := make([]byte, size)
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

// IsCancel reports whether a first message is a cancel request.
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
		if strings.IndexByte("PBDEC", kind) < 0 { // else the client sends more before it waits
			return next, nil
		}
	}
}

// read adds one message to its request.
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

// Answers forwards the server's messages until a connection ends. Before each message it calls lost. Once lost returns
// true, Answers drops the rest of the answer, and returns true at its end: by then the server has executed, and
// possibly committed, the request.
func Answers(server io.Reader, client io.Writer, lost func() bool) bool {
	in := bufio.NewReader(server)
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return false
		}
		if lost() {
			if kind == 'Z' { // ReadyForQuery
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

// cString returns the text before the first zero byte, and the rest.
func cString(body []byte) (string, []byte) {
	text, rest, _ := bytes.Cut(body, []byte{0})
	return string(text), rest
}
