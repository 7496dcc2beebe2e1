package pgtest

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"syscall"
)

const (
	// memory is a file system in memory that every Linux has; its size varies.
	memory = "/dev/shm"
	// roomNeeded is the free space that a test server needs in /dev/shm and in memory. The tests of two packages at once
	// use up to 2 GiB.
	roomNeeded = 6 << 30
)

// hasRoom reports whether the data of a test server fits into memory.
func hasRoom() bool {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(memory, &fs); err != nil {
		return false
	}
	free := int64(fs.Bavail) * int64(fs.Bsize) //nolint:unconvert // the types differ by architecture
	return free >= roomNeeded && availableMemory() >= roomNeeded
}

// availableMemory is the number of bytes that the kernel can free without swapping; 0 if unknown.
func availableMemory() (bytes int64) {
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0
	}
	defer func() { _ = file.Close() }()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemAvailable:"); ok {
			var kilobytes int64
			if _, err := fmt.Sscan(rest, &kilobytes); err != nil {
				return 0
			}
			return kilobytes << 10
		}
	}
	return 0
}
