//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// account is the unprivileged user the server runs as when we are root. A nil account stands for
// ourselves.
type account struct {
	name string
	uid  int
	gid  int
}

// serverAccount is nil unless we are root. The user needs an entry in the user database: PostgreSQL
// looks itself up.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			return newAccount(u)
		}
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is neither a user postgres nor nobody: run " +
		"useradd --system postgres")
}

func newAccount(u *user.User) (*account, error) {
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return nil, fmt.Errorf("user %s: %w", u.Username, err)
	}
	return &account{name: u.Username, uid: uid, gid: gid}, nil
}

func (a *account) attributes() *syscall.SysProcAttr {
	attributes := &syscall.SysProcAttr{Setpgid: true}
	if a != nil {
		attributes.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	return attributes
}

// own gives path to the account.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Lchown(path, a.uid, a.gid)
}

func (a *account) ownTree(root string) error {
	if a == nil {
		return nil
	}
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return a.own(path)
	})
}

// blockedAt is the first folder on the way to path that the account may not pass, or "". Folders
// that do not exist yet do not block.
func (a *account) blockedAt(path string) string {
	if a == nil {
		return ""
	}
	var blocked string
	for dir := resolved(path); ; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err == nil && !a.passes(info) {
			blocked = dir
		}
		if dir == filepath.Dir(dir) {
			return blocked
		}
	}
}

// resolved is path with the symbolic links of that part of it that exists followed.
func resolved(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if parent := filepath.Dir(path); parent != path {
		return filepath.Join(resolved(parent), filepath.Base(path))
	}
	return path
}

func (a *account) passes(info os.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return true
	}
	mode := info.Mode().Perm()
	switch {
	case int(stat.Uid) == a.uid:
		return mode&0o100 != 0
	case int(stat.Gid) == a.gid:
		return mode&0o010 != 0
	}
	return mode&0o001 != 0
}

// ownerOf is the uid that path belongs to.
func ownerOf(path string) (int, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("stat %s: no owner", path)
	}
	return int(stat.Uid), nil
}
