package mcp

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"slices"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/skills"
)

// stdioTransport speaks to a child over its input and output.
type stdioTransport struct{ child *process }

// Connect is called once by the SDK; the child runs already.
func (t stdioTransport) Connect(ctx context.Context) (sdk.Connection, error) {
	return (&sdk.IOTransport{Reader: t.child.stdout, Writer: t.child.stdin, MaxLineLength: maxMessage}).Connect(ctx)
}

// childEnv is the environment of a child: what a program needs to start, and what was declared.
func childEnv(declared map[string]string, getenv func(string) string) []string {
	env := make([]string, 0, len(declared)+3)
	for _, name := range []string{"PATH", "HOME", "LANG"} {
		if value := getenv(name); value != "" {
			env = append(env, name+"="+value)
		}
	}
	for name, value := range declared {
		env = append(env, name+"="+value)
	}
	slices.Sort(env)
	return env
}

// httpTransport speaks streamable HTTP through the guarded dialer. It does not go on with a stream that broke: a call
// whose answer was lost has failed.
func httpTransport(r Remote, headers map[string]string, allow []string, tlsConfig *tls.Config) (sdk.Transport, error) {
	client, err := skills.NewGuardedClient(allow, tlsConfig)
	if err != nil {
		return nil, err
	}
	client.Transport = &bounded{next: client.Transport, headers: headers}
	return &sdk.StreamableClientTransport{
		Endpoint: r.URL, HTTPClient: client, MaxRetries: -1, DisableStandaloneSSE: true, MaxEventSize: maxMessage,
	}, nil
}

// bounded adds the declared headers to each request and bounds what is read of each answer.
type bounded struct {
	next    http.RoundTripper
	headers map[string]string
}

func (b *bounded) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	for name, value := range b.headers {
		request.Header.Set(name, value)
	}
	cancel := func() {}
	if request.Method == http.MethodDelete { // the goodbye of a session; nobody waits long for it
		var ctx context.Context
		ctx, cancel = context.WithTimeout(request.Context(), stopPatience)
		request = request.WithContext(ctx)
	}
	response, err := b.next.RoundTrip(request)
	if err != nil {
		cancel()
		return nil, err
	}
	response.Body = &boundedBody{ReadCloser: response.Body, left: maxMessage, done: cancel}
	return response, nil
}

// boundedBody is an answer that ends with an error when it is too long.
type boundedBody struct {
	io.ReadCloser
	left int
	done func()
}

func (b *boundedBody) Close() error {
	defer b.done()
	return b.ReadCloser.Close()
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("the answer has more than %d bytes", maxMessage)
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
