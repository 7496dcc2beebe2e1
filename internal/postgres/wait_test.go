package postgres_test

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A server that goes down while a connection is made is waited for, as one that is not there is; without ConnectWait
// it is an error at once.
func TestOpenWaitsForAServerThatGoesDownMeanwhile(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var came atomic.Int32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			came.Add(1)
			_, _ = conn.Read(make([]byte, 1024)) // how it begins, so that the end is no reset
			conn.Close()
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		<-done
	})
	url := "postgres://u@" + listener.Addr().String() + "/d?sslmode=disable"
	open := func(wait time.Duration) int32 {
		before := came.Load()
		pool, err := postgres.Open(t.Context(), url, postgres.Options{ConnectWait: wait})
		if err == nil {
			pool.Close()
			t.Fatal("opened a database that is not there")
		}
		assert.Truef(t, strings.Contains(err.Error(), listener.Addr().String()),
			"the error does not name the server: %v", err)
		return came.Load() - before
	}
	once := open(0)
	again := open(2 * time.Second)
	assert.Truef(t, again >= 2*once+1, "tried with %d connections while it may wait, with %d at once", again, once)
}
