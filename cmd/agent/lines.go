package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
)

// longestLine bounds a line of the input, in bytes.
const longestLine = 1 << 20

// eachLine calls do with each line of the input that is not blank, until do wants no more, there is none, or ctx ends.
func (c *cli) eachLine(ctx context.Context, do func(line string) (more bool, err error)) error {
	lines, failed, stop := readLines(c.in)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return &exitError{exitInterrupted, nil}
		case line, more := <-lines:
			if !more {
				return failed()
			}
			if strings.TrimSpace(line) == "" {
				continue
			}
			if more, err := do(line); err != nil || !more {
				return err
			}
		}
	}
}

// readLines reads in a goroutine, because a read cannot be interrupted: after stop it ends with the next line or with
// the process. When lines is closed, failed says whether it could be read to its end.
func readLines(in io.Reader) (lines <-chan string, failed func() error, stop func()) {
	out, ended := make(chan string), make(chan struct{})
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, longestLine)
	go func() {
		defer close(out)
		for scanner.Scan() {
			select {
			case out <- scanner.Text():
			case <-ended:
				return
			}
		}
	}()
	failed = func() error {
		if err := scanner.Err(); err != nil {
			return fmt.Errorf("read messages: %w", err)
		}
		return nil
	}
	return out, failed, func() { close(ended) }
}

// readLine reads one line and nothing behind it.
func readLine(in io.Reader) string {
	var line []byte
	for char := make([]byte, 1); len(line) < longestLine; {
		if n, err := in.Read(char); n == 0 || err != nil || char[0] == '\n' {
			break
		}
		line = append(line, char[0])
	}
	return string(line)
}
