package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

const (
	startLock = "start.lock"
	usersLock = "users.lock"
	guardLock = "guard.lock"
)

// flock is a lock of the kernel on a file. It ends with the process that holds it.
type flock struct{ file *os.File }

// openLock opens the file for one lock. It creates a missing file, owned by owner (nil: by us).
func openLock(path string, owner *Account) (*flock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := owner.chown(path); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &flock{file: f}, nil
}

func lockPolling(ctx context.Context, path string, owner *Account, mode int) (*flock, error) {
	l, err := openLock(path, owner)
	if err != nil {
		return nil, err
	}
	err = poll(ctx, func() (bool, error) { return l.try(mode) })
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", path, errors.Join(err, l.file.Close()))
	}
	return l, nil
}

// try acquires the lock if it is free.
func (l *flock) try(mode int) (bool, error) {
	err := l.apply(mode | syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

func (l *flock) apply(mode int) error {
	for {
		err := syscall.Flock(int(l.file.Fd()), mode)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

// close releases the lock, even while a starting child still shares the file. A second call does nothing.
func (l *flock) close() error {
	err := l.apply(syscall.LOCK_UN)
	if errors.Is(err, syscall.EBADF) || errors.Is(err, os.ErrClosed) {
		return nil
	}
	return errors.Join(err, l.file.Close())
}

// isLocked reports whether a process holds the lock exclusively. It acquires the lock for a moment. So a process that
// tries for the exclusive lock without a wait must retry.
func isLocked(path string) (bool, error) {
	free, err := tryLock(path, syscall.LOCK_SH)
	return !free, err
}

// othersUse reports whether a process holds a shared lock, and no process an exclusive lock.
func othersUse(path string) (bool, error) {
	if unused, err := tryLock(path, syscall.LOCK_EX); err != nil || unused {
		return false, err
	}
	return tryLock(path, syscall.LOCK_SH)
}

// tryLock reports whether the lock is free now; a missing file is a free lock.
func tryLock(path string, mode int) (free bool, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	l := &flock{file: f}
	free, err = l.try(mode)
	return free, errors.Join(err, l.close())
}

// poll calls done until it reports true or an error, or ctx ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}
