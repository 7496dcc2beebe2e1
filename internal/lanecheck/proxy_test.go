//go:build unix

package lanecheck_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

// cut is where the proxy breaks a connection.
type cut int32

const (
	uncut       cut = iota
	unseen          // the server never sees the request
	uncommitted     // the server has done what was asked, and learns that nobody is there before it commits
	unanswered      // it is committed, and the answer is lost
	cuts
)

// proxy stands between processes and a database, and breaks connections when it is asked to. A request is what a
// client sends up to a Sync.
type proxy struct {
	listener net.Listener
	target   *pgx.ConnConfig
	next     atomic.Int32 // a cut: what happens to the next request about lanes
	done     [cuts]atomic.Int64
	group    sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	config, err := pgx.ParseConfig(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: config, conns: map[net.Conn]struct{}{}}
	p.group.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// url is where processes find the database.
func (p *proxy) url() string {
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User:     url.UserPassword(p.target.User, p.target.Password),
		RawQuery: url.Values{"sslmode": {"disable"}, "application_name": {"lanecheck"}}.Encode(),
	}
	return u.String()
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.listener.Close()
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.group.Wait()
}

func (p *proxy) own(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		c.Close()
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *proxy) drop(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c.Close()
	delete(p.conns, c)
}

func (p *proxy) accept() {
	network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
	if strings.HasPrefix(p.target.Host, "/") {
		network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
	}
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(network, address)
		if err != nil {
			client.Close()
			continue
		}
		if !p.own(client) || !p.own(server) {
			client.Close()
			server.Close()
			return
		}
		l := &link{proxy: p, client: client, server: server, statements: map[string]bool{}}
		p.group.Go(func() { l.upstream(); l.end() })
		p.group.Go(func() { l.downstream(); l.end() })
	}
}

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	statements     map[string]bool // prepared: whether it is about lanes
	inside         bool            // a transaction about lanes has begun
	mute           atomic.Bool     // the answer that comes next is lost, and the connection with it
}

func (l *link) end() {
	l.proxy.drop(l.client)
	l.proxy.drop(l.server)
}

// upstream carries what the client says, whole requests at a time.
func (l *link) upstream() {
	in := bufio.NewReader(l.client)
	if !l.startup(in) {
		return
	}
	var batch bytes.Buffer
	lanes, executes := false, false
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return
		}
		last := batch.Len()
		batch.Write(frame)
		switch body := frame[5:]; kind {
		case 'P':
			name, rest := cString(body)
			l.statements[name] = bytes.Contains(rest, []byte("agent_lock")) || bytes.Contains(rest, []byte("agent_execution"))
		case 'B':
			_, rest := cString(body)
			name, _ := cString(rest)
			lanes = lanes || l.statements[name]
		case 'E':
			executes = true
		case 'Q':
			text, _ := cString(body)
			begins := strings.HasPrefix(text, "begin")
			lanes, executes = l.inside && !begins, true // a commit, too, or a rollback
			l.inside = begins
		}
		if kind == 'P' || kind == 'B' || kind == 'D' || kind == 'E' || kind == 'C' {
			continue
		}
		if !l.send(batch.Bytes(), last, lanes && executes) {
			return
		}
		batch.Reset()
		lanes, executes = false, false
	}
}

// send passes a request on, or breaks the connection at it. last is where its last message begins.
func (l *link) send(raw []byte, last int, cuttable bool) bool {
	if cuttable {
		c := cut(l.proxy.next.Swap(int32(uncut)))
		l.proxy.done[c].Add(1)
		switch c {
		case unseen:
			return false
		case uncommitted:
			_, _ = l.server.Write(raw[:last]) // it is broken in any case
			return false
		case unanswered:
			l.mute.Store(true)
		case uncut, cuts:
		}
	}
	_, err := l.server.Write(raw)
	return err == nil
}

// downstream carries what the server answers.
func (l *link) downstream() {
	in := bufio.NewReader(l.server)
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return
		}
		if l.mute.Load() {
			if kind == 'Z' { // ready for the next: what was asked is committed
				return
			}
			continue
		}
		if _, err := l.client.Write(frame); err != nil {
			return
		}
	}
}

// startup passes the first message, which has no kind, and answers no to encryption.
func (l *link) startup(in *bufio.Reader) bool {
	const sslRequest, gssRequest = 80877103, 80877104
	for {
		head, err := in.Peek(8)
		if err != nil {
			return false
		}
		frame := make([]byte, binary.BigEndian.Uint32(head))
		code := binary.BigEndian.Uint32(head[4:])
		if _, err := io.ReadFull(in, frame); err != nil {
			return false
		}
		if code == sslRequest || code == gssRequest {
			if _, err := l.client.Write([]byte{'N'}); err != nil {
				return false
			}
			continue
		}
		_, err = l.server.Write(frame)
		return err == nil
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
