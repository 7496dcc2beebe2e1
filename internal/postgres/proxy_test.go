package postgres_test

import (
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// throughPooler returns a connection string for the server of url by way of a proxy that, like
// PgBouncer, announces a process id of its own making.
func throughPooler(t *testing.T, to string) string {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Skipf("needs the server's URL: %v", err)
	}
	socket := u.Query().Get("host")
	if !filepath.IsAbs(socket) {
		t.Skip("needs a server on a unix socket")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var running sync.WaitGroup
	t.Cleanup(func() {
		if err := listener.Close(); err != nil {
			t.Error(err)
		}
		running.Wait()
	})
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return // closed
			}
			running.Go(func() { relay(client, filepath.Join(socket, ".s.PGSQL.5432")) })
		}
	})
	query := u.Query()
	query.Del("host")
	query.Del("port")
	query.Set("sslmode", "disable") // the proxy reads what passes
	u.RawQuery = query.Encode()
	u.Host = listener.Addr().String()
	return u.String()
}

// with is the connection string with one more parameter.
func with(t *testing.T, to, name, value string) string {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil || u.Scheme == "" {
		return to + " " + name + "=" + value
	}
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	return u.String()
}

func relay(client net.Conn, socket string) {
	defer client.Close()
	server, err := net.Dial("unix", socket)
	if err != nil {
		return
	}
	defer server.Close()
	var both sync.WaitGroup
	both.Go(func() {
		defer server.Close()
		_, _ = io.Copy(server, client) // ends with either side
	})
	if disguise(client, server) == nil {
		_, _ = io.Copy(client, server)
	}
	client.Close()
	both.Wait()
}

// disguise relays the server's messages up to BackendKeyData, whose process id it changes.
func disguise(client io.Writer, server io.Reader) error {
	for {
		head := make([]byte, 5)
		if _, err := io.ReadFull(server, head); err != nil {
			return err
		}
		body := make([]byte, binary.BigEndian.Uint32(head[1:])-4)
		if _, err := io.ReadFull(server, body); err != nil {
			return err
		}
		const backendKeyData = 'K'
		if head[0] == backendKeyData {
			binary.BigEndian.PutUint32(body, binary.BigEndian.Uint32(body)+1)
		}
		if _, err := client.Write(append(head, body...)); err != nil {
			return err
		}
		if head[0] == backendKeyData {
			return nil
		}
	}
}
