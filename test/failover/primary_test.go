//go:build unix

package failover_test

import (
	"syscall"
	"testing"
)

// TestAPrimaryIsLostAndItsStandbyPromoted while two processes work.
func TestAPrimaryIsLostAndItsStandbyPromoted(t *testing.T) {
	t.Parallel()
	primary := newServer(t)
	standby := standbyOf(t, primary)
	w := newWorld(t, urlOf(primary, standby), "30s")
	w.serve(2)
	l := w.begin()
	l.atTheWorstMoment()
	primary.stop(syscall.SIGKILL)
	w.unready("database")
	w.open()
	standby.promote()
	l.recovers()
	l.settle()
}
