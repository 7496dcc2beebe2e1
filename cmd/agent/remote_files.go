package main

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// openFile opens a file of the caller: on a server, only a file that the caller sent.
func (c *cli) openFile(name string) (io.ReadCloser, error) {
	if c.host == nil {
		return os.Open(name)
	}
	content, sent := c.sent.Files[name]
	if !sent {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.ENOENT}
	}
	return io.NopCloser(bytes.NewReader(content)), nil
}

// writeFile writes the file that outputFlag names, on the caller's machine. Without replace, an existing file is an
// error.
func (c *cli) writeFile(name string, content []byte, replace bool) error {
	out, remote := c.out.(*callerStream)
	if !remote {
		return writeFile(name, content, replace)
	}
	for part := range slices.Chunk(content, maxFrame) {
		if err := out.frames.send(commandFrame{File: part}); err != nil {
			return err
		}
	}
	return out.frames.send(commandFrame{Created: true})
}

// writeFile writes a file. Without replace, an existing file is an error. A failure leaves the old file, or none. With
// replace, a device or the target of a symbolic link is written in place.
func writeFile(path string, content []byte, replace bool) error {
	old, err := os.Lstat(path)
	replace = replace && err == nil
	if replace && !old.Mode().IsRegular() {
		return os.WriteFile(path, content, 0o600)
	}
	var file *os.File
	if replace {
		file, err = os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	} else {
		file, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write file: %w", err)
	}
	_, err = file.Write(content)
	if replace {
		err = errors.Join(err, file.Chmod(old.Mode().Perm()))
	}
	if err = errors.Join(err, file.Close()); err == nil && replace {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write file: %w", err), os.Remove(file.Name()))
	}
	return nil
}

// sentFolder returns the workspace that a caller sent; nil for a command on this machine.
func (c *cli) sentFolder() fs.FS {
	if c.host != nil && c.folder == nil {
		return &zip.Reader{}
	}
	return c.folder
}
