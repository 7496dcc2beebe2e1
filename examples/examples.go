// Package examples holds the example workspaces that come with the program.
//
// They are built into the binary, so that `agent dev` has a workspace wherever it runs. A workspace is data:
// package workspace reads and applies it.
package examples

import (
	"embed"
	"io/fs"
)

//go:embed caretaker
var files embed.FS

// Caretaker is the workspace of an agent that looks after the PostgreSQL it lives in.
func Caretaker() (fs.FS, error) { return fs.Sub(files, "caretaker") }
