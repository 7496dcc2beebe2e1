package pgserver

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	dataDir       = "data"
	runDir        = "run"
	logFile       = "postgres.log"
	bootFile      = "boot-id"
	socketsFile   = "socket-dir"
	pointerFile   = "LOCATION"
	superuser     = "postgres"
	port          = 5432
	sweepAge      = time.Minute
	stateDir      = "/var/lib/lanekeeper"
	shortTemp     = "/tmp"
	tempPattern   = "agent-pg-"
	socketPattern = "agent-socket-"
	socketPathMax = 103 // macOS; Linux allows 107
)

// layout has the paths of one server's files.
type layout struct {
	root    string   // the folder of this server: locks, log, data directory
	sockets string   // the folder of its unix socket; known after a start or join
	user    *Account // owner of the files; nil for this process's user
	keep    bool     // false: the guard removes the files when the server stops
}

func (l layout) path(name string) string { return filepath.Join(l.root, name) }
func (l layout) data() string            { return l.path(dataDir) }

// choosePlace chooses the folder of the server's files and creates it.
//
// The folder is config.Dir/<major>. Under root, the server's user may be unable to reach that folder (a project below
// /root) or to own files there (some mounts). Then choosePlace chooses a folder below /var/lib/lanekeeper named after
// the project. The file LOCATION in config.Dir names the folder for later starts.
func choosePlace(config Config, bin Binaries) (layout, error) {
	user, err := ServerAccount()
	if err != nil {
		return layout{}, err
	}
	if blocked := user.blockedAt(bin.Dir); blocked != "" {
		return layout{}, fmt.Errorf("the server runs as user %s, which cannot reach its binaries in %s (%s is closed to it): "+
			"move them or run chmod o+x %s", user.name, bin.Dir, blocked, blocked)
	}
	if config.Ephemeral {
		return placeTemporary(user)
	}
	dir, err := absolute(config.Dir)
	if err != nil {
		return layout{}, err
	}
	major := strconv.Itoa(bin.Major)
	if user == nil {
		l := layout{root: filepath.Join(dir, major), keep: true}
		return l, l.claim()
	}
	return placeAsRoot(config, dir, major, user)
}

// placeAsRoot chooses the folder of a server that root starts for user: the folder that LOCATION names, else dir, else
// a folder below /var/lib/lanekeeper.
func placeAsRoot(config Config, dir, major string, user *Account) (layout, error) {
	if base := followPointer(dir); base != "" {
		l := layout{root: filepath.Join(base, major), user: user, keep: true}
		return l, l.claim()
	}
	l := layout{root: filepath.Join(dir, major), user: user, keep: true}
	reason := ""
	if blocked := user.blockedAt(dir); blocked != "" {
		reason = blocked + " is closed to user " + user.name
	} else if err := l.claim(); err == nil {
		return l, nil
	} else if !errors.Is(err, os.ErrPermission) {
		return l, err
	} else {
		reason = err.Error()
	}
	base := fallbackDir(dir)
	if err := leavePointer(dir, base); err != nil {
		return l, err
	}
	config.Progress("the database's files are in " + base + " (" + reason + ")")
	l.root = filepath.Join(base, major)
	return l, l.claim()
}

// fallbackDir returns the folder below /var/lib that replaces dir.
func fallbackDir(dir string) string {
	project := filepath.Base(filepath.Dir(filepath.Dir(dir))) // <project>/.agent/pg
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(stateDir, project+"-"+hex.EncodeToString(sum[:4]))
}

func followPointer(dir string) string {
	text, err := os.ReadFile(filepath.Join(dir, pointerFile))
	base := strings.TrimSpace(string(text))
	if err != nil || !filepath.IsAbs(base) || !exists(base) {
		return ""
	}
	return base
}

func leavePointer(dir, base string) error {
	if err := makePath(dir); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, pointerFile), []byte(base+"\n"), 0o644)
}

// claim creates the server's folder, owned by the server's user. If another existing user owns the data, the server
// runs as that user.
func (l *layout) claim() error {
	if err := makePath(l.root); err != nil {
		return err
	}
	if err := l.settleOwner(); err != nil {
		return err
	}
	if err := l.user.chown(l.root); err != nil {
		return err
	}
	return os.Chmod(l.root, 0o700)
}

// settleOwner decides which user owns the server's files.
func (l *layout) settleOwner() error {
	uid, err := ownerOf(l.root)
	if err != nil {
		return err
	}
	if l.user == nil {
		if uid != os.Geteuid() {
			return fmt.Errorf("%s belongs to another user (uid %d): run as that user or as root, or remove the folder", l.root,
				uid)
		}
		return nil
	}
	if dataUID, err := ownerOf(l.data()); err == nil {
		uid = dataUID
	}
	if uid == 0 || uid == l.user.uid {
		return nil
	}
	owner, err := user.LookupId(strconv.Itoa(uid))
	if err != nil { // the user belongs to another machine or container: take the files over
		return l.user.OwnTree(l.root)
	}
	l.user, err = newAccount(owner)
	return err
}

func placeTemporary(user *Account) (layout, error) {
	temp := os.TempDir()
	if user.blockedAt(temp) != "" {
		temp = shortTemp
	}
	if err := sweepTemporary(temp); err != nil {
		return layout{}, err
	}
	root, err := os.MkdirTemp(temp, tempPattern)
	if err != nil {
		return layout{}, err
	}
	return layout{root: root, user: user}, user.chown(root)
}

// sweepTemporary removes ephemeral servers whose guard was killed. A new server has no users yet either, so only
// folders older than sweepAge count.
func sweepTemporary(temp string) error {
	marks, err := filepath.Glob(filepath.Join(temp, tempPattern+"*", guardLock))
	if err != nil {
		return err
	}
	for _, mark := range marks {
		root := filepath.Dir(mark)
		info, err := os.Lstat(mark)
		if err != nil || time.Since(info.ModTime()) < sweepAge {
			continue
		}
		if free, err := tryLock(mark, syscall.LOCK_EX); err != nil || !free {
			continue // in use, or owned by another user
		}
		if free, err := tryLock(filepath.Join(root, usersLock), syscall.LOCK_EX); err == nil && free {
			if err := os.RemoveAll(root); err != nil {
				return err
			}
		}
	}
	return nil
}

// makePath is os.MkdirAll with mode 0755 for new folders, under any umask.
func makePath(dir string) error {
	if exists(dir) {
		return nil
	}
	if err := makePath(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return os.Chmod(dir, 0o755)
}
