package pgserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

const guardLockLimit = 5 * time.Second

// GuardMain turns this process into the guard of a server if it was started as a guard, and then does not return. main
// calls GuardMain first, and so does TestMain of every test that uses a server.
func GuardMain() {
	if !isGuard(os.Args) {
		return
	}
	if err := runGuard(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err) // the server's log
		os.Exit(1)
	}
	os.Exit(0)
}

// runGuard runs the server until its last user is gone, the guard gets SIGTERM, or the server ends. It stays on one
// thread, because the kernel ties the server's life to the thread that started it.
func runGuard(in io.Reader, out io.WriteCloser) error {
	runtime.LockOSThread()
	signal.Ignore(syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	var o order
	if err := json.NewDecoder(in).Decode(&o); err != nil {
		return fmt.Errorf("read the order: %w", err)
	}
	l := o.layout()
	alone, err := lockGuard(l)
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, guardHello)
	if err = errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("greet the starter: %w", err)
	}
	users, err := openLock(l.path(usersLock), l.user)
	if err != nil {
		return err
	}
	err = serveUntilUnused(l, o, signals, users)
	return errors.Join(err, cleanUp(l), alone.close(), users.close())
}

// lockGuard acquires guard.lock. Other processes sometimes probe the lock, so one refusal does not mean a second guard.
func lockGuard(l layout) (*flock, error) {
	lock, err := openLock(l.path(guardLock), l.user)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(guardLockLimit); ; {
		ok, err := lock.try(syscall.LOCK_EX)
		if ok {
			return lock, nil
		}
		if err != nil || time.Now().After(deadline) {
			return nil, errors.Join(errors.New("another guard is at work in "+l.root), err)
		}
		<-time.After(pollEvery)
	}
}

// serveUntilUnused starts the server. It ends the server when the kernel grants users exclusively: then no process uses
// the server.
func serveUntilUnused(l layout, o order, signals <-chan os.Signal, users *flock) error {
	cmd := exec.Command(o.Program, o.Args...)
	cmd.Dir = l.root
	cmd.Env = serverEnv()
	cmd.Stdout = os.Stderr
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = l.user.Attributes()
	dieWithParent(cmd.SysProcAttr)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	unused := make(chan error, 1)
	go func() { unused <- users.apply(syscall.LOCK_EX) }()
	select {
	case err := <-ended:
		return err
	case <-signals:
		return shutDown(cmd.Process, ended)
	case err := <-unused:
		return errors.Join(err, shutDown(cmd.Process, ended))
	}
}

// shutDown ends the server. It disconnects every client first. After a while it stops the server without a checkpoint.
func shutDown(server *os.Process, ended <-chan error) error {
	for _, attempt := range []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGINT, fastLimit}, {syscall.SIGQUIT, killLimit}, {syscall.SIGKILL, killLimit}} {
		if err := server.Signal(attempt.signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("signal the server: %w", err)
		}
		select {
		case err := <-ended:
			return err
		case <-time.After(attempt.limit):
			fmt.Fprintf(os.Stderr, "guard: the server did not end within %s of %s\n", attempt.limit, attempt.signal)
		}
	}
	return errors.New("the server does not stop")
}

func cleanUp(l layout) error {
	err := removeSocketDir(l)
	if !l.keep {
		err = errors.Join(err, os.RemoveAll(l.root))
	}
	return err
}
