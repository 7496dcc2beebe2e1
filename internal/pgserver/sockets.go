//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// makeSockets makes an empty folder for the socket of a server that is about to start. A unix
// socket's path is limited to about a hundred bytes, and a comma in it would be taken for a list, so
// a server far down gets a short folder below /tmp; the name is recorded for those who join.
func makeSockets(l layout) (string, error) {
	if err := removeShort(l); err != nil {
		return "", err
	}
	dir := l.path(runDir)
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if fits(dir) {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return "", err
		}
		return dir, l.user.own(dir)
	}
	dir, err := os.MkdirTemp(shortTemp, socketPattern)
	if err != nil {
		return "", err
	}
	record := l.path(socketsFile)
	if err := os.WriteFile(record, []byte(dir+"\n"), 0o600); err != nil {
		return "", err
	}
	return dir, errors.Join(l.user.own(record), l.user.own(dir))
}

func fits(dir string) bool {
	socket := filepath.Join(dir, fmt.Sprintf(".s.PGSQL.%d", port))
	return len(socket) <= socketPathMax && !strings.ContainsAny(dir, ",\"'\n") && strings.TrimSpace(dir) == dir
}

// recordedSockets is where the running server's socket is.
func recordedSockets(l layout) (string, error) {
	text, err := os.ReadFile(l.path(socketsFile))
	if errors.Is(err, os.ErrNotExist) {
		return l.path(runDir), nil
	}
	return strings.TrimSpace(string(text)), err
}

// removeShort removes the folder below /tmp, if there is one and it is still ours: somebody else may
// have made a folder of that name after the machine cleaned /tmp.
func removeShort(l layout) error {
	dir, err := recordedSockets(l)
	if err != nil || dir == l.path(runDir) {
		return err
	}
	want := os.Geteuid()
	if l.user != nil {
		want = l.user.uid
	}
	uid, err := ownerOf(dir)
	if err == nil && uid == want && filepath.Dir(dir) == shortTemp &&
		strings.HasPrefix(filepath.Base(dir), socketPattern) {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	return os.Remove(l.path(socketsFile))
}
