package main

import (
	"archive/zip"
	"bytes"
	"io"
	"io/fs"
	"os"
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

// sentFolder returns the workspace that a caller sent; nil for a command on this machine.
func (c *cli) sentFolder() fs.FS {
	if c.host != nil && c.folder == nil {
		return &zip.Reader{}
	}
	return c.folder
}
