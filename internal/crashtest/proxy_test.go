//go:build unix

package crashtest_test

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
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// verdict is what the proxy does with one request of the client.
type verdict int

const (
	pass       verdict = iota
	killBefore         // the server never sees it
	killAfter          // it takes effect, and the client never hears of it
	cutBefore          // the connection breaks before the server sees it
	cutAfter           // the connection breaks when it has taken effect
	terminate          // it is passed on, and the process is asked to stop
	interrupt          // it is passed on, and ^C is pressed
	hold               // it is kept back until Proxy.release, and its answer is delivered
)

// proxy stands between a process and the database. A request is what the client sends up to a Sync, so
// that it waits for an answer: one statement, or a batch that commits together.
type proxy struct {
	t        testing.TB
	listener net.Listener
	target   *pgx.ConnConfig
	signal   func(syscall.Signal) // to the client's process; returns when a killed one is gone
	decide   func(request) verdict
	held     chan request  // what is being kept back
	released chan struct{} // closed: let it go
	ended    chan struct{} // closed: the test is over
	group    sync.WaitGroup

	mu     sync.Mutex
	n      int
	conns  []net.Conn
	closed bool
}

// request is one request: its number, and the statements it executes.
type request struct {
	n   int
	sql string
}

// newProxy makes a proxy for the database of a URL. decide is called for each request, one at a time,
// with numbers from 1; set signal before anything connects.
func newProxy(t testing.TB, target string, decide func(request) verdict) *proxy {
	t.Helper()
	config, err := pgx.ParseConfig(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{
		t: t, listener: listener, target: config, decide: decide,
		held: make(chan request, 1), released: make(chan struct{}), ended: make(chan struct{}),
	}
	p.group.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// url is where the process under test finds the database. Its connections have a name of their own.
func (p *proxy) url(name string) string {
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User:     url.UserPassword(p.target.User, p.target.Password),
		RawQuery: url.Values{"sslmode": {"disable"}, "application_name": {name}}.Encode(),
	}
	return u.String()
}

// holds waits until a request is kept back.
func (p *proxy) holds() {
	p.t.Helper()
	select {
	case <-p.held:
	case <-time.After(patience):
		p.t.Fatal("the request that is to be held up was not made")
	}
}

// release lets go what is held, and everything after it.
func (p *proxy) release() { close(p.released) }

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	conns := p.conns
	p.mu.Unlock()
	p.listener.Close()
	close(p.ended)
	for _, c := range conns {
		c.Close()
	}
	p.group.Wait()
}

// own makes sure that a connection is closed at the end.
func (p *proxy) own(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, c)
	return !p.closed
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
		if strings.HasPrefix(p.target.Host, "/") {
			network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
		}
		server, err := (&net.Dialer{}).DialContext(p.t.Context(), network, address)
		if err != nil {
			client.Close()
			continue
		}
		if !p.own(client) || !p.own(server) {
			client.Close()
			server.Close()
			return
		}
		l := &link{proxy: p, client: client, server: server, statements: map[string]string{}}
		p.group.Go(func() { l.upstream(); l.end() })
		p.group.Go(func() { l.downstream(); l.end() })
	}
}

// step counts a request and asks what to do with it.
func (p *proxy) step(sql string) (request, verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	r := request{p.n, sql}
	return r, p.decide(r)
}

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	statements     map[string]string // prepared, by name
	onAnswer       atomic.Int32      // a verdict: what the answer that comes next leads to
}

func (l *link) end() {
	l.client.Close()
	l.server.Close()
}

// upstream carries what the client says, whole requests at a time.
func (l *link) upstream() {
	in := bufio.NewReader(l.client)
	if !l.startup(in) {
		return
	}
	var batch bytes.Buffer
	var sql []string
	executes := false
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return
		}
		batch.Write(frame)
		body := frame[5:]
		switch kind {
		case 'P':
			name, rest := cString(body)
			l.statements[name], _ = cString(rest)
		case 'B':
			_, rest := cString(body)
			name, _ := cString(rest)
			sql = append(sql, l.statements[name])
		case 'E':
			executes = true
		case 'Q':
			text, _ := cString(body)
			sql, executes = append(sql, text), true
		}
		if kind == 'P' || kind == 'B' || kind == 'D' || kind == 'E' || kind == 'C' {
			continue
		}
		if !l.send(batch.Bytes(), strings.Join(sql, ";\n"), executes) {
			return
		}
		batch.Reset()
		sql, executes = nil, false
	}
}

// send passes one request on, unless the process dies of it.
func (l *link) send(raw []byte, sql string, executes bool) bool {
	if executes {
		switch r, v := l.proxy.step(sql); v {
		case killBefore:
			l.proxy.signal(syscall.SIGKILL)
			return false
		case killAfter:
			l.onAnswer.Store(int32(killAfter))
		case cutBefore:
			return false
		case cutAfter:
			l.onAnswer.Store(int32(cutAfter))
		case hold:
			l.proxy.held <- r
			select {
			case <-l.proxy.released:
			case <-l.proxy.ended:
				return false
			}
		case terminate:
			l.proxy.signal(syscall.SIGTERM)
		case interrupt:
			l.proxy.signal(syscall.SIGINT)
		case pass:
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
		if end := verdict(l.onAnswer.Load()); end != pass {
			if kind != 'Z' {
				continue
			}
			// Ready for the next: what was asked has been done, and committed where it should be.
			if end == killAfter {
				l.proxy.signal(syscall.SIGKILL)
			}
			return
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
		size := binary.BigEndian.Uint32(head)
		code := binary.BigEndian.Uint32(head[4:])
		frame := make([]byte, size)
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
