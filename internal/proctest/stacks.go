package proctest

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"
)

// dumpTimeout bounds the wait for a process's stacks.
const dumpTimeout = 20 * time.Second

// goroutineStacks ends a running process and returns the stacks of its goroutines. The result is empty if the process
// had ended, was stopped, or prints no stacks.
func (p *Process) goroutineStacks() string {
	if !p.Running() || p.Cmd.Process.Signal(syscall.SIGQUIT) != nil {
		return ""
	}
	select {
	case <-p.ended:
	case <-time.After(dumpTimeout):
		return ""
	}
	return stacks(p.Err.String())
}

// stacks puts each stack of a goroutine dump on one line, innermost function first, without functions of the runtime.
// It merges equal stacks.
func stacks(dump string) string {
	_, dump, found := strings.Cut(dump, "SIGQUIT: quit\n")
	if !found {
		return ""
	}
	times := map[string]int{}
	for block := range strings.SplitSeq(dump, "\n\n") {
		state, frames := "", []string(nil)
		for line := range strings.SplitSeq(block, "\n") {
			switch {
			case strings.HasPrefix(line, "goroutine "):
				_, state, _ = strings.Cut(line, " [")
				state = strings.TrimRight(state, "]:")
			case state == "", strings.HasPrefix(line, "\t"), strings.HasPrefix(line, "created by "):
			case strings.HasPrefix(line, "runtime."):
			default:
				frames = append(frames, function(line))
			}
		}
		if len(frames) > 0 { // not a goroutine of the runtime
			times[state+": "+strings.Join(frames, " < ")]++
		}
	}
	lines := make([]string, 0, len(times))
	for line, n := range times {
		lines = append(lines, fmt.Sprintf("%d × %s", n, line))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// function returns the function's name in a line such as "example.com/mod/pkg.(*T).do(0xc000, {0x1, 0x2})", without the
// module.
func function(line string) string {
	if i := strings.LastIndex(line, "("); i > 0 {
		line = line[:i]
	}
	return line[strings.LastIndex(line, "/")+1:]
}
