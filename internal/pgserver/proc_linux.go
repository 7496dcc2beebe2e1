package pgserver

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

const smallShm = 256 << 20

// servesFrom reports whether pid is a living process that works in the data directory, as a postmaster does.
func servesFrom(pid int, data string) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	if _, after, ok := bytes.Cut(stat, []byte(") ")); ok && len(after) > 0 && (after[0] == 'Z' || after[0] == 'X') {
		return false
	}
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil {
		return false
	}
	if real, err := filepath.EvalSymlinks(data); err == nil {
		data = real
	}
	return cwd == data
}

// dieWithParent makes the kernel request a fast shutdown of the server when its guard dies. The kernel watches the
// thread that started the server: see runGuard.
func dieWithParent(attributes *syscall.SysProcAttr) { attributes.Pdeathsig = syscall.SIGINT }

// bootID differs after every start of the machine.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(text))
}

// sharedMemoryIsSmall reports a small /dev/shm. Most containers have 64 MB.
func sharedMemoryIsSmall() bool {
	var fs syscall.Statfs_t
	if err := syscall.Statfs("/dev/shm", &fs); err != nil {
		return true
	}
	return int64(fs.Blocks)*int64(fs.Bsize) < smallShm //nolint:unconvert // the types differ by architecture
}
