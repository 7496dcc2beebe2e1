package skills

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/schema"
)

func TestPublicAddresses(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]bool{
		"1.1.1.1": true, "93.184.216.34": true, "2606:4700::1111": true, "2a00:1450::1": true,
		"127.0.0.1": false, "127.9.9.9": false, "10.1.2.3": false, "172.16.0.1": false, "192.168.1.1": false,
		"169.254.169.254": false, "0.0.0.0": false, "0.1.2.3": false, "100.64.1.1": false, "198.18.0.1": false,
		"224.0.0.1": false, "255.255.255.255": false, "240.0.0.1": false, "192.0.2.1": false,
		"::1": false, "::": false, "fe80::1": false, "fc00::1": false, "fd12::1": false, "ff02::1": false,
		"::127.0.0.1": false, "64:ff9b::7f00:1": false, "2002:7f00:1::": false, "2001::1": false,
		"2001:db8::1": false, "fec0::1": false,
	} {
		assert.Equal(t, want, isPublic(netip.MustParseAddr(address).Unmap()), address)
	}
}

func TestGuardAllowsAddressInBrackets(t *testing.T) {
	t.Parallel()
	g, err := newGuard([]string{"[::1]"})
	require.NoError(t, err)
	assert.NoError(t, g.control("tcp", "[::1]:80", nil))
}

// A name that resolves to a private address is rejected at the dial.
func TestControlChecksDialledAddress(t *testing.T) {
	t.Parallel()
	g, err := newGuard(nil)
	require.NoError(t, err)
	for address, refused := range map[string]bool{
		"127.0.0.1:80": true, "[::ffff:10.0.0.1]:80": true,
		"[fe80::1%eth0]:80": true, "1.1.1.1:443": false, "name:80": true,
	} {
		err := g.control("tcp", address, nil)
		assert.Truef(t, (err != nil) == refused, "%s: %v", address, err)
	}
	err = g.control("tcp", "10.1.2.3:80", nil)
	want := "10.1.2.3 is not a public address; if the skill may reach it, add it to AGENT_ALLOW_PRIVATE_HTTP"
	assert.Truef(t, strings.Contains(redact.Text(err.Error(), 0), want), "refused with %q, want %q", err, want)
}

func TestNoRedirectFromHTTPSToHTTP(t *testing.T) {
	t.Parallel()
	request := func(scheme string) *http.Request {
		return &http.Request{URL: &url.URL{Scheme: scheme, Host: "example.com"}}
	}
	via := []*http.Request{request("http")}
	require.NoError(t, checkRedirect(request("https"), via))
	assert.Error(t, checkRedirect(request("http"), append(via, request("https"))))
}

// A dial waits while no file descriptor is free, for example after a burst of connections.
func TestDialWaitsForFileDescriptor(t *testing.T) {
	t.Parallel()
	local, remote := net.Pipe()
	defer remote.Close()
	defer local.Close()
	for name, test := range map[string]struct {
		errs  []error
		tries int
		want  error
	}{
		"first try": {errs: []error{nil}, tries: 1},
		"limit of the process": {
			errs:  []error{&net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.EMFILE)}, nil},
			tries: 2,
		},
		"limit of the machine": {
			errs:  []error{&net.OpError{Op: "dial", Err: os.NewSyscallError("socket", syscall.ENFILE)}, nil},
			tries: 2,
		},
		"limit at name resolution": {
			errs:  []error{&net.DNSError{UnwrapErr: os.NewSyscallError("socket", syscall.EMFILE)}, nil},
			tries: 2,
		},
		"another error": {errs: []error{syscall.ECONNREFUSED, nil}, tries: 1, want: syscall.ECONNREFUSED},
	} {
		t.Run(name, func(t *testing.T) {
			tries := 0
			conn, err := retryDial(t.Context(), func() (net.Conn, error) {
				tries++
				return local, test.errs[tries-1]
			})
			assert.Truef(t, tries == test.tries && errors.Is(err, test.want) && (err != nil || conn == local),
				"%d tries, %v", tries, err)
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err := retryDial(ctx, func() (net.Conn, error) {
		cancel()
		return nil, syscall.EMFILE
	})
	assert.ErrorIs(t, err, syscall.EMFILE)
}

// FuzzArguments searches for panics, for schemas that read external documents, and for accepted arguments that cannot
// be stored.
func FuzzArguments(f *testing.F) {
	for _, schema := range []string{
		`{"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "default": 2}}, "required": ["n"]}`,
		`{"type": "object", "properties": {"s": {"type": "string", "pattern": "^(a+)+$", "format": "date-time"}}}`,
		`{"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}`,
		`{"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}`,
		`{"type": "object", "properties": {"l": {"type": "array", "uniqueItems": true, "items": {"multipleOf": 0.01}}}}`,
		`{"type": "object", "properties": {"s": {"pattern": "("}}}`,
		`{"type": "object", "$schema": "http://json-schema.org/draft-04/schema#", "id": "x"}`,
		`{"type": "object", "$dynamicRef": "#x", "$dynamicAnchor": "x"}`,
		`{"type": "object", "properties": {"s": {"const": "\ud800"}}}`,
	} {
		for _, args := range []string{
			``, `{}`, `{"n": 1}`, `{"n": 1e400, "s": "aaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}`,
			`{"s": "\u0000"}`, `{"s":"\ud800"}`, `[1]`, "{\"s\":\"\xff\"}",
		} {
			f.Add(schema, args)
		}
	}
	f.Fuzz(func(t *testing.T, text, args string) {
		var parameters map[string]any
		if json.Unmarshal([]byte(text), &parameters) != nil || len(args) > 1<<12 {
			return
		}
		raw, _, problems := resolveParameters(Definition{Parameters: parameters})
		if len(problems) > 0 {
			return
		}
		compiled, err := compile(raw)
		require.NoError(t, err, raw, "is resolved but does not compile")
		assert.Truef(t, !bytes.Contains(raw, []byte("\x00")) && !bytes.Contains(raw, []byte(`\u0000`)),
			"%s cannot be stored", raw)
		value, wrong := decodeArgs(json.RawMessage(args))
		if len(wrong) > 0 {
			return
		}
		if object, ok := value.(map[string]any); ok {
			value = schema.WithDefaults(compiled, object)
		}
		if compiled.Validate(value) != nil {
			return
		}
		stored, err := json.Marshal(value)
		assert.Truef(t, err == nil && !bytes.Contains(stored, []byte(`\u0000`)),
			"%s accepts %s, stored as %s, %v", raw, args, stored, err)
	})
}

func TestNULInNameIsRejected(t *testing.T) {
	t.Parallel()
	_, found := decodeArgs(json.RawMessage(`{"a": {"b\u0000": 1}}`))
	assert.NoDiff(t, []Violation{{Path: "/a", Message: "has a NUL character in a name"}}, found)
}

func TestSecretThatBeginsWithAnotherIsRedacted(t *testing.T) {
	t.Parallel()
	assert.Equal(t, "[secret] [secret]", redact.Secrets([]string{"abcd", "abcdefgh"})("abcdefgh abcd"))
	for _, written := range []string{`a/b"c<d`, `a\/b\"c<d`, `a/b\"c<d`, `a/b\"c\u003cd`, `a\/b\"c\u003cd`} {
		assert.Equal(t, `{"echo":"[secret]"}`, redact.Secrets([]string{`a/b"c<d`})(`{"echo":"`+written+`"}`))
	}
}
