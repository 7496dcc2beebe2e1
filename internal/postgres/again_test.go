package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func TestAgain(t *testing.T) {
	t.Parallel()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	broken, other := fmt.Errorf("read: %w", io.ErrUnexpectedEOF), errors.New("another error")
	for name, test := range map[string]struct {
		ctx    context.Context
		errs   []error // of one call after the other; the last one of all further ones
		calls  int
		result error
	}{
		"all is well":               {t.Context(), []error{nil}, 1, nil},
		"broken once":               {t.Context(), []error{broken, nil}, 2, nil},
		"broken for good":           {t.Context(), []error{broken}, 4, broken},
		"another error":             {t.Context(), []error{other}, 1, other},
		"broken, and another error": {t.Context(), []error{broken, other}, 2, other},
		"time ran out":              {t.Context(), []error{context.DeadlineExceeded}, 1, context.DeadlineExceeded},
		"nobody waits any more":     {over, []error{broken}, 1, broken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			err := postgres.Again(test.ctx, func() error {
				calls++
				return test.errs[min(calls, len(test.errs))-1]
			})
			assert.Truef(t, calls == test.calls && errors.Is(err, test.result),
				"%d calls, %v, want %d, %v", calls, err, test.calls, test.result)
		})
	}
}
