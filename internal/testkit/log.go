package testkit

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Log collects what goroutines write while a test reads it.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write adds to it.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String is all of it.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Tail is the last n lines.
func (l *Log) Tail(n int) string {
	lines := strings.SplitAfter(l.String(), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "")
}

// Lines are the lines that contain all words.
func (l *Log) Lines(words ...string) (found []string) {
	for line := range strings.Lines(l.String()) {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			found = append(found, line)
		}
	}
	return found
}

// Records are the lines of a JSON log that have one of the messages.
func (l *Log) Records(tb testing.TB, messages ...string) (found []map[string]any) {
	tb.Helper()
	for line := range strings.Lines(l.String()) {
		var record map[string]any
		require.NoError(tb, json.Unmarshal([]byte(line), &record))
		if message, ok := record["msg"].(string); ok && slices.Contains(messages, message) {
			found = append(found, record)
		}
	}
	return found
}
