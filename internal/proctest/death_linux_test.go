package proctest_test

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestProcessHasItsOwnGroup(t *testing.T) {
	t.Parallel()
	p := proctest.Start(t, time.Minute, t.TempDir(), proctest.Environ(), "sleep", "60")
	group, err := syscall.Getpgid(p.Cmd.Process.Pid)
	require.NoError(t, err)
	assert.True(t, group != syscall.Getpgrp(),
		"who ends the shell that began the tests wakes a process that a test has stopped")
}

// The kernel counts a thread as the parent. Go ends a thread if its goroutine ends while locked to it.
func TestProcessOutlivesStartingThread(t *testing.T) {
	t.Parallel()
	started, thread := make(chan *proctest.Process), 0
	var ask func()
	ask = func() {
		runtime.LockOSThread()                                // and never unlocked
		if thread = syscall.Gettid(); thread == os.Getpid() { // not the first thread, which never ends
			go ask()
			runtime.UnlockOSThread()
			return
		}
		started <- proctest.Start(t, time.Minute, t.TempDir(), proctest.Environ(), "sleep", "60")
	}
	go ask()
	p := <-started
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		_, err := os.Stat("/proc/self/task/" + strconv.Itoa(thread))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		require.True(t, !time.Now().After(deadline), "the thread does not end")
	}
	select {
	case <-p.Ended():
		t.Error("it ended with the thread")
	case <-time.After(100 * time.Millisecond):
	}
}
