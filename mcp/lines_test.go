package mcp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// An invalid line gets an error, and the next line a response.
func TestServeRejectsInvalidLines(t *testing.T) {
	t.Parallel()
	f := newServerFixture(t)
	ourIn, in := io.Pipe()
	out, ourOut := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- f.server.Serve(context.WithoutCancel(t.Context()), ourIn, ourOut) }()
	t.Cleanup(func() {
		_ = in.Close()
		assert.NoError(t, <-ended, "the session ended with")
	})
	answers := bufio.NewScanner(out)
	answers.Buffer(nil, 4<<20)
	ask := func(line string) (id string, code int) {
		t.Helper()
		_, err := io.WriteString(in, line+"\n")
		require.NoError(t, err)
		require.Truef(t, answers.Scan(), "no answer to %.60s: %v", line, answers.Err())
		var got struct {
			Version string          `json:"jsonrpc"`
			ID      json.RawMessage `json:"id"`
			Error   struct{ Code int }
		}
		err = json.Unmarshal(answers.Bytes(), &got)
		require.Truef(t, err == nil && got.Version == "2.0", "%.60s is answered by %s", line, answers.Bytes())
		return string(got.ID), got.Error.Code
	}
	if id, code := ask(
		`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"x","version":"1"}}}`); id != "1" || code != 0 {
		t.Fatalf("initialize is answered with %s, %d", id, code)
	}
	_, err := io.WriteString(in, "\n \r\n"+`{"jsonrpc":"2.0","method":"notifications/initialized"}`+"\r\n")
	require.NoError(t, err)
	for line, want := range map[string]struct {
		id   string
		code int
	}{
		"hello": {"null", -32700},
		`{"jsonrpc":"2.0","id":"blank","method":"ping"} `: {`"blank"`, 0},
		`{"jsonrpc":`: {"null", -32700},
		"\x00\xff":    {"null", -32700},
		`{}{}`:        {"null", -32700},
		"5":           {"null", -32600},
		"null":        {"null", -32600},
		"[]":          {"null", -32600},
		`[{"jsonrpc":"2.0","id":12,"method":"ping"}]`: {"null", -32600},
		`{"id":7}`:    {"7", -32600},
		`{"id":"s"}`:  {`"s"`, -32600},
		`{"id":[1]}`:  {"null", -32600},
		`{"id":true}`: {"null", -32600},
		`{"jsonrpc":"1.0","id":8,"method":"ping"}`:                                                      {"8", -32600},
		`{"jsonrpc":"2.0","id":9,"method":5}`:                                                           {"9", -32600},
		`{"jsonrpc":"2.0","id":10,"method":"ping","params":{"x":"` + strings.Repeat("x", 1<<20) + `"}}`: {"10", -32600},
		`{"jsonrpc":"2.0","id":11,"method":"ping","params":{"x":"` + strings.Repeat("x", 3<<20) + `"}}`: {"null", -32600},
	} {
		id, code := ask(line)
		assert.Truef(t, id == want.id && code == want.code, "%.60s is answered with %s, %d", line, id, code)
		id, code = ask(`{"jsonrpc":"2.0","id":"after","method":"ping"}`)
		require.Truef(t, id == `"after"` && code == 0, "after %.60s a ping is answered with %s, %d", line, id, code)
	}
}
