package api

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"
)

// impatient serves one route with short limits, and returns a connection to it.
func impatient(t *testing.T, rt route) net.Conn {
	t.Helper()
	s := &server{gate: &gate{}, budgets: newBudgets(), log: slog.New(slog.DiscardHandler), limits: limits{
		request: 50 * time.Millisecond, body: 50 * time.Millisecond, send: 50 * time.Millisecond,
	}}
	rt.access, rt.maxBody = Public, 100
	server := httptest.NewUnstartedServer(nil)
	server.Config = Server(s.wrap(s.serve(rt)), s.log)
	server.Start()
	t.Cleanup(server.Close)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(90 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestAClientThatSendsItsBodySlowlyIsToldSo(t *testing.T) {
	t.Parallel()
	conn := impatient(t, route{handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("the route was called without its body")
	})})
	fmt.Fprint(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusRequestTimeout || !answer.Close {
		t.Errorf("answer is %d, closed %v", answer.StatusCode, answer.Close)
	}
}

// Nobody reads, so at some point the connection takes no more.
func TestAClientThatDoesNotReadIsLeft(t *testing.T) {
	t.Parallel()
	for name, stream := range map[string]bool{"an answer": false, "a stream": true} {
		t.Run(name, func(t *testing.T) {
			failed := make(chan error, 1)
			conn := impatient(t, route{stream: stream, handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				piece := make([]byte, 1<<20)
				for {
					if _, err := w.Write(piece); err != nil {
						failed <- err
						return
					}
				}
			})})
			fmt.Fprint(conn, "GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
			select {
			case err := <-failed:
				if !errors.Is(err, os.ErrDeadlineExceeded) {
					t.Errorf("error is %v", err)
				}
			case <-time.After(90 * time.Second):
				t.Error("it is written to for ever")
			}
		})
	}
}

// A deadline that one request left behind is not the next one's on the same connection.
func TestAConnectionThatWasQuietIsUsedAgain(t *testing.T) {
	t.Parallel()
	conn := impatient(t, route{handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })})
	reader := bufio.NewReader(conn)
	for range 2 {
		fmt.Fprint(conn, "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na")
		answer, err := http.ReadResponse(reader, nil)
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%v, %v", answer, err)
		}
		if _, err := io.Copy(io.Discard, answer.Body); err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
		<-time.After(150 * time.Millisecond) // longer than every limit
	}
}
