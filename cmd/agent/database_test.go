package main

import (
	"io"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// What a stopped process has locked in the middle of a step keeps others from its executions no longer than its lease does.
func TestATransactionIsLeftAloneForALease(t *testing.T) {
	t.Parallel()
	log, err := logging.New(io.Discard, "text", "error")
	if err != nil {
		t.Fatal(err)
	}
	url := pgtest.EmptyURL(t)
	for lease, want := range map[time.Duration]string{
		time.Second: "5s", 6 * time.Second: "6s", 30 * time.Second: "30s", 10 * time.Minute: "1min",
	} {
		s := &session{config: config.Config{Workers: 1, WorkerLease: lease}, log: log, url: url}
		if err := s.connect(t.Context()); err != nil {
			t.Fatal(err)
		}
		var got string
		err := s.pool.QueryRow(t.Context(), `show idle_in_transaction_session_timeout`).Scan(&got)
		s.close(t.Context())
		if err != nil || got != want {
			t.Errorf("with a lease of %s the server ends it after %q (%v), want %s", lease, got, err, want)
		}
	}
}
