package main

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestHealthcheck(t *testing.T) {
	t.Parallel()
	_, port, _ := strings.Cut(testkit.FreeAddress(t), ":") // the port stays free after the program has stopped
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=0.0.0.0:"+port, "AGENT_LOG_LEVEL=info")
	s := p.start("serve", "--migrate")
	at, err := url.Parse(s.find(t, `msg=serving listen=(\S+)`))
	require.NoError(t, err)
	for _, listen := range []string{"0.0.0.0:", ":", "127.0.0.1:", "localhost:"} {
		check := newProgramWithoutDatabase(t, "AGENT_LISTEN="+listen+at.Port(), "AGENT_WORKERS=garbage",
			"DATABASE_URL=garbage")
		if got := check.run("healthcheck"); got.code != 0 || !strings.HasSuffix(got.out, ":"+at.Port()+"/healthz: ok\n") {
			t.Errorf("listening on %s: exit %d, %s%s", listen, got.code, got.out, got.err)
		}
	}
	check := newProgramWithoutDatabase(t, "AGENT_LISTEN=:"+at.Port())
	pgtest.Eventually(t, func() bool { return check.run("healthcheck", "--ready").code == 0 }, "it is ready")
	s.stop()
	<-s.ended
	check.mustFail(1, "check that agent serve runs with this AGENT_LISTEN", "healthcheck")
	newProgramWithoutDatabase(t, "AGENT_LISTEN=8080").mustFail(2, "AGENT_LISTEN", "healthcheck")
}

// An unready process reports the failed checks.
func TestHealthcheckFailures(t *testing.T) {
	t.Parallel()
	all, own := "[::]", "[::1]:0"
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", own)
	if err != nil { // no IPv6 here
		all, own = "0.0.0.0", "127.0.0.1:0"
		listener, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp", own)
		require.NoError(t, err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.Copy(w, bytes.NewBufferString(
			`{"status": "unready", "checks": {"database": {"ok": false, "detail": "no answer"}, "schema": {"ok": true}}}`))
	})}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	got := newProgramWithoutDatabase(t, "AGENT_LISTEN="+all+":"+port).run("healthcheck", "--ready")
	assert.Truef(t, got.code == 1 && strings.Contains(got.err, "503 Service Unavailable (database: no answer)"),
		"exit %d, %s", got.code, got.err)
}
