package main

import (
	"context"
	"io"

	"github.com/lanekeeper/lanekeeper/builtins"
)

// serveMCP offers skills to the one client on standard input and output, until it leaves.
func (c *cli) serveMCP(ctx context.Context, s *session) error {
	if terminal(c.in) {
		c.say("this speaks the Model Context Protocol to a program on standard input and output; see agent mcp --help, ^D leaves")
	}
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	return a.beat(ctx, func(ctx context.Context) error { return a.offered.Serve(ctx, readCloser(c.in), writeCloser{c.out}) })
}

// readCloser is the stream a command reads from, closed where it can be, so that a read under way ends.
func readCloser(r io.Reader) io.ReadCloser {
	if closer, ok := r.(io.ReadCloser); ok {
		return closer
	}
	return io.NopCloser(r)
}

// writeCloser is a stream that stays open.
type writeCloser struct{ io.Writer }

func (writeCloser) Close() error { return nil }
