package logging

import (
	"context"
	"log/slog"
	"slices"
	"sync"
)

// Failures logs the failures of something that is tried again and again, such as a loop's query. Until a try succeeds,
// each different error is logged once, up to maxErrors. The success is logged once. The zero value is ready to use, by
// several goroutines too.
type Failures struct {
	mu     sync.Mutex
	count  int
	logged []string // errors since the last success
}

// maxErrors bounds the errors that are logged before a success.
const maxErrors = 10

// Log logs the result of a try. It ignores an error after the end of ctx.
func (f *Failures) Log(ctx context.Context, log *slog.Logger, what string, err error, attrs ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err == nil:
		if f.count > 0 {
			log.InfoContext(ctx, "working again", append(attrs, "after", what, "failures", f.count)...)
		}
		f.count, f.logged = 0, nil
	case ctx.Err() == nil:
		f.count++
		if text := err.Error(); len(f.logged) < maxErrors && !slices.Contains(f.logged, text) {
			f.logged = append(f.logged, text)
			log.WarnContext(ctx, what, append(attrs, "error", err)...) //nolint:sloglint // a constant of the caller
		}
	}
}
