// Package examples holds the example workspaces that come with the program.
//
// They are built into the binary, so that `agent dev` and `agent demo` have a workspace wherever they run. A workspace
// is data: package workspace reads and applies it.
package examples

import (
	"embed"
	"io/fs"
)

//go:embed caretaker onboarding orders
var files embed.FS

// Caretaker is the workspace of an agent that looks after the PostgreSQL it lives in.
func Caretaker() (fs.FS, error) { return fs.Sub(files, "caretaker") }

// Onboarding is the workspace of agents that take a candidate through their onboarding, in one thread and in Spanish.
func Onboarding() (fs.FS, error) { return fs.Sub(files, "onboarding") }

// Orders is a shop's order desk: the folder workspace, and the SQL of the shop's own database.
func Orders() (fs.FS, error) { return fs.Sub(files, "orders") }
