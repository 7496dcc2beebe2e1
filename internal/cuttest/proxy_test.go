package cuttest_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
)

// proxy stands between the parts of a process and the database.
type proxy struct {
	t        testing.TB
	listener net.Listener
	target   *pgx.ConnConfig
	ledger   *ledger
	group    sync.WaitGroup

	mu     sync.Mutex
	conns  []net.Conn
	closed bool
}

// newProxy makes a proxy for the database of a URL, whose ledger says what is cut.
func newProxy(t testing.TB, target string, l *ledger) *proxy {
	t.Helper()
	config, err := pgx.ParseConfig(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, listener: listener, target: config, ledger: l}
	p.group.Go(p.accept)
	return p
}

// url is where the process under test finds the database.
func (p *proxy) url() string {
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User: url.UserPassword(p.target.User, p.target.Password), RawQuery: "sslmode=disable",
	}
	return u.String()
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	conns := p.conns
	p.mu.Unlock()
	p.listener.Close()
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
	network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
	if strings.HasPrefix(p.target.Host, "/") {
		network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
	}
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
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
		l := &link{ledger: p.ledger, client: client, server: server, statements: map[string]string{}}
		p.group.Go(func() { l.upstream(); l.end() })
		p.group.Go(func() { l.downstream(); l.end() })
	}
}

// link is one connection through the proxy.
type link struct {
	ledger         *ledger
	client, server net.Conn
	statements     map[string]string // prepared, by name
	last           string            // the last statement of the transaction that is open
	cut            atomic.Bool       // at the server's next readiness, before the client hears of it
}

func (l *link) end() {
	l.client.Close()
	l.server.Close()
}

// upstream carries what the client says, up to where it waits for an answer.
func (l *link) upstream() {
	in := bufio.NewReader(l.client)
	if !l.startup(in) {
		return
	}
	var m message
	for {
		kind, frame, err := readFrame(in)
		if err != nil {
			return
		}
		m.raw.Write(frame)
		l.read(&m, kind, frame[5:])
		if strings.IndexByte("PBDEC", kind) >= 0 { // more follows before the client waits
			continue
		}
		if !l.send(&m) {
			return
		}
		m = message{}
	}
}

// message is what the client sends before it waits for an answer.
type message struct {
	raw      bytes.Buffer
	prepared []string // statements that it has the server read
	executed []string // statements that it has the server carry out
}

// read takes one frame into the message that it belongs to.
func (l *link) read(m *message, kind byte, body []byte) {
	switch kind {
	case 'P':
		name, rest := cString(body)
		text, _ := cString(rest)
		l.statements[name] = tidy(text)
		m.prepared = append(m.prepared, tidy(text))
	case 'B':
		_, rest := cString(body)
		name, _ := cString(rest)
		m.executed = append(m.executed, l.statements[name])
	case 'Q':
		text, _ := cString(body)
		m.executed = append(m.executed, tidy(text))
	}
}

// name is what the message is called, but for how often it came before; empty for one that asks for nothing.
func (l *link) name(m *message) string {
	if len(m.executed) == 0 {
		if len(m.prepared) == 0 {
			return ""
		}
		return "prepare: " + strings.Join(m.prepared, "; ")
	}
	name := strings.Join(slices.Compact(m.executed), "; ")
	switch word, _, _ := strings.Cut(name, " "); word {
	case "commit", "rollback":
		name += " after: " + l.last
	default:
		l.last = name
	}
	return name
}

// send passes a message on, unless it is to be cut.
func (l *link) send(m *message) bool {
	if name := l.name(m); name != "" {
		switch l.ledger.note(name) {
		case before:
			return false
		case after:
			l.cut.Store(true)
		case pass:
		}
	}
	_, err := l.server.Write(m.raw.Bytes())
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
		if l.cut.Load() {
			if kind == 'Z' { // ready for the next: what was asked has been done, and committed where it should be
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
	const sslRequest, gssRequest, cancelRequest = 80877103, 80877104, 80877102
	for {
		head, err := in.Peek(8)
		if err != nil {
			return false
		}
		code := binary.BigEndian.Uint32(head[4:])
		frame := make([]byte, binary.BigEndian.Uint32(head))
		if _, err := io.ReadFull(in, frame); err != nil {
			return false
		}
		if code == sslRequest || code == gssRequest {
			if _, err := l.client.Write([]byte{'N'}); err != nil {
				return false
			}
			continue
		}
		if code != cancelRequest {
			switch l.ledger.note("connect") {
			case before:
				return false
			case after:
				l.cut.Store(true)
			case pass:
			}
		}
		_, err = l.server.Write(frame)
		return err == nil
	}
}

var errFrame = errors.New("not a message of the protocol")

// readFrame reads one frame: a kind, a length that counts itself, and a body.
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

// tidy is a statement on one line.
func tidy(sql string) string { return strings.Join(strings.Fields(sql), " ") }
