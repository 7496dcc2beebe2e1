package proctest_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

func TestAProcessIsNotInTheGroupOfItsTests(t *testing.T) {
	t.Parallel()
	p := proctest.Start(t, time.Minute, t.TempDir(), proctest.Environ(), "sleep", "60")
	group, err := syscall.Getpgid(p.Cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if group == syscall.Getpgrp() {
		t.Error("who ends the shell that began the tests wakes a process that a test has stopped")
	}
}
