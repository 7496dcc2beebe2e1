package postgres_test

import (
	"encoding/binary"
	"io"
	"net"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
)

// throughPooler returns a connection string for the server of a URL by way of a proxy that, like PgBouncer, announces a
// process id of its own making.
func throughPooler(t *testing.T, to string) string {
	t.Helper()
	return pgproxy.Listen(t, to, func(client, server net.Conn) pgproxy.Link { return relay{client, server} }).URL("")
}

type relay struct{ client, server net.Conn }

func (r relay) Upstream() { _, _ = io.Copy(r.server, r.client) }

func (r relay) Downstream() {
	if disguise(r.client, r.server) == nil {
		_, _ = io.Copy(r.client, r.server)
	}
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
