package mcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestSkillNamesAreValidAndUnique(t *testing.T) {
	t.Parallel()
	valid := regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	seen := make(map[string]string)
	long := strings.Repeat("x", 80)
	for _, server := range []string{"a", "a-b", strings.Repeat("s", 24)} {
		for _, tool := range []string{
			"get", "get.it", "get_it", "get/it", "get it", "gét", "日本", "本日", long, long + "1", long[:60], long[:38],
			"a__b", "_", "..", "/",
		} {
			name := skillName(server, tool)
			assert.Truef(t, valid.MatchString(name) && strings.HasPrefix(name, "mcp__"+server+"__"),
				"%s/%s is named %q", server, tool, name)
			other, taken := seen[name]
			assert.Truef(t, !taken, "%s/%s and %s are both named %s", server, tool, other, name)
			seen[name] = server + "/" + tool
		}
	}
	assert.Equal(t, "mcp__files__read_file", skillName("files", "read_file"))
}

func TestValidate(t *testing.T) {
	t.Parallel()
	url := "https://example.com/mcp"
	for name, c := range map[string]struct {
		d    Definition
		want []string // prefixes of the problems; empty for a valid name
	}{
		"http": {Definition{Name: "a", URL: url, Headers: map[string]any{
			"Authorization": "Bearer ${TOKEN}",
			"X-Region":      "eu",
		}}, nil},
		"stdio": {Definition{
			Name: "a", Command: []string{"npx", "-y", "x"},
			Env: map[string]any{"API_KEY": "file:/run/secrets/key", "LEVEL": "debug"},
		}, nil},
		"nothing": {Definition{}, []string{"name: ", "url: is empty"}},
		"names": {
			Definition{Name: "A_b", Transport: "smoke", Scope: "all", Trust: "blind", TimeoutMS: 1},
			[]string{"name: ", "scope: ", "timeout_ms: ", "transport: ", "trust: "},
		},
		"literal header": {
			Definition{Name: "a", URL: url, Headers: map[string]any{"Authorization": "Bearer abcdef123456"}},
			[]string{"headers.Authorization: do not write a secret"},
		},
		"literal env": {Definition{
			Name: "a", Command: []string{"x"},
			Env: map[string]any{"GITHUB_TOKEN": "abcdef123456"},
		}, []string{"env.GITHUB_TOKEN: do not write a secret"}},
		"secret by look": {Definition{Name: "a", URL: url, Headers: map[string]any{"X-Thing": "ghp_" +
			strings.Repeat("a1B2", 9)}}, []string{"headers.X-Thing: do not write a secret"}},
		"secret argument": {
			Definition{Name: "a", Command: []string{"x", "--token=ghp_" + strings.Repeat("a1B2", 9)}},
			[]string{"command[1]: looks like a secret"},
		},
		"secret in url": {Definition{Name: "a", URL: url + "?api_key=abcdef123456"}, []string{"url: must hold no user"}},
		"user in url":   {Definition{Name: "a", URL: "https://u:p@example.com/"}, []string{"url: must hold no user"}},
		"not a url":     {Definition{Name: "a", URL: "ftp://example.com"}, []string{"url: must begin with"}},
		"both":          {Definition{Name: "a", URL: url, Command: []string{"x"}}, []string{"command: "}},
		"half reference": {
			Definition{Name: "a", URL: url, Headers: map[string]any{"X-A": "${env:A}"}},
			[]string{"headers.X-A: write a reference"},
		},
		"file not whole": {
			Definition{Name: "a", URL: url, Headers: map[string]any{"X-A": "file:secret"}},
			[]string{"headers.X-A: write a whole path"},
		},
		"own header": {
			Definition{Name: "a", URL: url, Headers: map[string]any{"Host": "1"}},
			[]string{"headers.Host: is no header"},
		},
		"number": {
			Definition{Name: "a", Command: []string{"x"}, Env: map[string]any{"N": 1}},
			[]string{"env.N: must be text"},
		},
		"env name": {
			Definition{Name: "a", Command: []string{"x"}, Env: map[string]any{"A B": "x"}},
			[]string{"env.A B: is not the name"},
		},
		"pattern": {Definition{Name: "a", URL: url, Include: []string{"[", ""}}, []string{"include[0]: ", "include[1]: "}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			if err := Validate(c.d); err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			require.Equal(t, len(c.want), len(got), got, c.want)
			for i, want := range c.want {
				assert.Truef(t, strings.HasPrefix(got[i], want), "problem %q, want %q", got[i], want)
			}
		})
	}
}

// A server's text has no part of a secret, even if the limit cuts the secret, or if another secret begins it.
func TestNoPartOfASecretStays(t *testing.T) {
	t.Parallel()
	redactText := redact.Secrets([]string{"hunter", "hunter2-long"})
	assert.Equal(t, "it is [secret]!", redactText("it is hunter2-long!"))
	conn := &connection{redact: redactText}
	text := conn.redactError(errors.New(strings.Repeat("x", 890) + " hunter2-long"))
	assert.Truef(t, !strings.Contains(text.Error(), "hunte"), "got %s", text.Error())
	var out bytes.Buffer
	log := &lineLogger{log: slog.New(slog.NewTextHandler(&out, nil)), redactText: redactText}
	_, err := log.Write([]byte(strings.Repeat("x", maxStderrLine-4) + "hunter2-long\n"))
	require.NoError(t, err)
	assert.Truef(t, !strings.Contains(out.String(), "hunt"), "got %s", out.String())
}

func TestLastLineOfAChildNeedsNoNewline(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p, err := startProcess([]string{"/bin/sh", "-c", "printf 'no key'>&2"}, nil, slog.New(slog.NewTextHandler(&out, nil)),
		redact.Secrets(nil))
	require.NoError(t, err)
	<-p.exited
	p.stop()
	assert.Contains(t, out.String(), `line="no key"`)
}

func TestCloseEndsCallsThatWaitForAConnection(t *testing.T) {
	t.Parallel()
	c := NewClient(Options{Pool: pgtest.DB(t)})
	_, err := Put(t.Context(), c.opts.Pool, Definition{Name: "test", URL: "http://127.0.0.1:1"})
	require.NoError(t, err)
	s, err := c.slot("test")
	require.NoError(t, err)
	s.lock <- struct{}{} // as Close keeps it
	c.cancelBase()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err = c.connection(ctx, "test")
	failure, ok := errors.AsType[*skills.CallError](err)
	assert.Truef(t, ok && failure.Class == skills.ClassUnavailable && strings.Contains(failure.Message, "closed"),
		"a waiting call: %v", err)
	failure, ok = errors.AsType[*skills.CallError](s.recordFailure(c.baseCtx, "test", context.Canceled))
	assert.Truef(t, ok && strings.Contains(failure.Message, "closed"), "a connection that Close ended: %+v", failure)
}

func TestResponseOfTheLimitIsRead(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{3, 4} {
		var tooLong atomic.Bool
		body := boundedBody{ReadCloser: io.NopCloser(strings.NewReader("four")), remaining: limit, responseTooLong: &tooLong}
		_, err := io.ReadAll(&body)
		assert.Truef(t, (err != nil) == (limit < 4) && tooLong.Load() == (limit < 4), "limit %d: %v", limit, err)
	}
}

// The process that opened the row died before it started the execution.
func TestReopenedCallIsNotPruned(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	skill := skills.Skill{Name: "add", Revision: 1}
	first, err := openCall(t.Context(), pool, skill, "hash")
	require.NoError(t, err)
	pgtest.Exec(t, pool, `update agent_mcp_calls set created_at = now() - interval '8 days'`)
	again, err := openCall(t.Context(), pool, skill, "hash")
	require.NoError(t, err)
	NewClient(Options{Pool: pool}).prune(t.Context())
	collected, err := collectAnswer(t.Context(), pool, again)
	assert.Truef(t, err == nil && again == first && collected, "opened %s and %s: collected %v, %v", first, again,
		collected, err)
}
