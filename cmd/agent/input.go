package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
)

// maxLine bounds an input line in bytes.
const maxLine = 1 << 20

// eachLine calls do with each non-blank input line until do returns false, the input ends, or ctx ends.
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

// readLines reads in a goroutine, because a read cannot be interrupted. After stop it ends with the next line or the
// process. failed reports a read error once lines is closed.
func readLines(in io.Reader) (lines <-chan string, failed func() error, stop func()) {
	out, ended := make(chan string), make(chan struct{})
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, maxLine)
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

// readLine reads one line byte by byte, to consume nothing behind it.
func readLine(in io.Reader) string {
	var line []byte
	for char := make([]byte, 1); len(line) < maxLine; {
		if n, err := in.Read(char); n == 0 || err != nil || char[0] == '\n' {
			break
		}
		line = append(line, char[0])
	}
	return string(line)
}

// confirm asks a yes/no question on the terminal. Only y and yes confirm.
func (c *cli) confirm(ctx context.Context, question string) (yes bool, err error) {
	fmt.Fprintf(c.err, "%s [y/N] ", question)
	answered := make(chan string, 1)
	go func() { answered <- readLine(c.in) }() // a read cannot be interrupted; it ends with the process
	select {
	case <-ctx.Done():
		return false, &exitError{exitInterrupted, nil}
	case line := <-answered:
		answer := strings.ToLower(strings.TrimSpace(line))
		return answer == "y" || answer == "yes", nil
	}
}

// maxInput bounds the input in bytes.
const maxInput = 16 << 20

// readJSON reads a JSON value from an argument: the value itself, @file, or - for standard input.
func (c *cli) readJSON(text string) (json.RawMessage, error) {
	raw := []byte(text)
	if text == "-" || len(text) > 1 && text[0] == '@' {
		from := c.in
		if text != "-" {
			file, err := c.openFile(text[1:])
			if err != nil {
				return nil, usageError("read input: %w", err)
			}
			defer file.Close()
			from = file
		}
		var err error
		if raw, err = io.ReadAll(io.LimitReader(from, maxInput+1)); err != nil {
			return nil, usageError("read input: %w", err)
		}
		if len(raw) > maxInput {
			return nil, usageError("read input: more than %d bytes", maxInput)
		}
	}
	if raw = bytes.TrimSpace(raw); !json.Valid(raw) {
		return nil, usageError(`that is not JSON: %.60q; write for example '{"name": "Ana"}', @file, or - for standard input`,
			raw)
	}
	return raw, nil
}

// readInput reads a file that the caller names.
func (c *cli) readInput(path string) ([]byte, error) {
	file, err := c.openFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &exitError{exitUsage, &missingFile{path}}
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	defer file.Close()
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return text, nil
}

// missingFile reports a missing file.
type missingFile struct{ path string }

func (m *missingFile) Error() string { return "there is no file " + m.path }

func (m *missingFile) Is(target error) bool { return target == fs.ErrNotExist }
