//go:build !unix

// Package pgserver runs a PostgreSQL of the agent's own on Unix systems; here it only says so.
package pgserver

import (
	"context"
	"errors"
	"log/slog"
)

// ErrNoBinaries reports that the machine has no server binaries that fit.
var ErrNoBinaries = errors.New("no own PostgreSQL on this system: set DATABASE_URL to a running server")

// Binaries is a folder that holds postgres and initdb of one version.
type Binaries struct {
	Dir     string
	Major   int
	Version string
}

// FindBinaries returns ErrNoBinaries.
func FindBinaries(func(string) string) (Binaries, error) { return Binaries{}, ErrNoBinaries }

// Config says which server is wanted.
type Config struct {
	Dir            string
	Ephemeral      bool
	Durable        bool
	BinDir         string
	NoInstall      bool
	Database       string
	Owner          string
	MaxConnections int
	Logger         *slog.Logger
	Progress       func(line string)
}

// Server is a running server; there is none here.
type Server struct{}

// GuardMain does nothing.
func GuardMain() {}

// Start returns ErrNoBinaries.
func Start(context.Context, Config) (*Server, error) { return nil, ErrNoBinaries }

// URL is empty.
func (*Server) URL() string { return "" }

// Adopted is false.
func (*Server) Adopted() bool { return false }

// Dir is empty.
func (*Server) Dir() string { return "" }

// Binaries are none.
func (*Server) Binaries() Binaries { return Binaries{} }

// Done is never closed.
func (*Server) Done() <-chan struct{} { return nil }

// Stop does nothing.
func (*Server) Stop(context.Context) error { return nil }
