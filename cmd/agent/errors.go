package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// Exit codes; see the package comment.
const (
	exitFailed      = 1
	exitUsage       = 2
	exitUndecided   = 3
	exitBusy        = 75
	exitInterrupted = 130
	exitPipe        = 141 // as a shell reports a process that SIGPIPE ended
)

// exitError ends the program with an exit code. A nil cause prints nothing, because the message was printed before. An
// interrupt is printed with any cause.
type exitError struct {
	code  int
	cause error
}

func (e *exitError) Error() string {
	if e.cause == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.cause.Error()
}

func (e *exitError) Unwrap() error { return e.cause }

// usageError is a mistake in arguments or configuration.
func usageError(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// hintedError is an error with a next step. Text output appends the hint; JSON has a separate key.
type hintedError struct {
	error
	hint string
}

func (e *hintedError) Error() string { return e.error.Error() + "; " + e.hint }

func (e *hintedError) Unwrap() error { return e.error }

func hint(err error, format string, args ...any) error {
	return &hintedError{err, fmt.Sprintf(format, args...)}
}

// tracedError is the error of a run, with its trace id.
type tracedError struct {
	error
	traceID string
}

func (e *tracedError) Unwrap() error { return e.error }

// exitCode maps an error to an exit code: 2 for wrong usage or configuration, also when the database found it.
func exitCode(ctx context.Context, err error) int {
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		return exit.code
	case ctx.Err() != nil:
		return exitInterrupted
	}
	var setting *config.Error
	if errors.As(err, &setting) || badWorkspace(err) || postgres.WrongParameter(err) ||
		postgres.IsCode(err, codeNUL, codeBytes) {
		return exitUsage
	}
	for _, wrong := range []error{
		trace.ErrInvalid, activity.ErrCursor, lanes.ErrInvalid, migrations.ErrOutdated, migrations.ErrOld,
		migrations.ErrNewer, migrations.ErrChanged,
		threads.ErrEmpty, threads.ErrInvalid,
	} {
		if errors.Is(err, wrong) {
			return exitUsage
		}
	}
	return exitFailed
}

// SQLSTATE codes of texts that PostgreSQL does not store.
const (
	codeNUL   = "22P05" // with U+0000 (untranslatable_character)
	codeBytes = "22021" // no UTF-8 (character_not_in_repertoire)
)

// badWorkspace reports an error of the workspace files, also one that only the database revealed.
func badWorkspace(err error) bool {
	var several workspace.Problems
	var one workspace.Problem
	return errors.As(err, &several) || errors.As(err, &one)
}

// reportError prints the error that ends the program, unless it is silent.
func (c *cli) reportError(code int, err error) {
	if code == exitInterrupted {
		err = errors.New("interrupted")
	}
	var exit *exitError
	if errors.As(err, &exit) && exit.cause == nil {
		return
	}
	err = withAdvice(err)
	if !c.json {
		c.printError(err)
		return
	}
	fault := map[string]string{"code": errorCode(code), "message": err.Error()}
	if known, ok := errors.AsType[*hintedError](err); ok {
		fault["message"], fault["hint"] = strings.TrimSuffix(err.Error(), "; "+known.hint), known.hint
	} else if todo := postgres.Todo(err); todo != "" {
		fault["message"], fault["hint"] = strings.TrimSuffix(err.Error(), ": "+todo), todo
	}
	if run, ok := errors.AsType[*tracedError](err); ok {
		fault["trace_id"] = run.traceID
	}
	// Marshal of strings cannot fail.
	text, _ := json.Marshal(map[string]any{"error": fault})
	c.infof("%s", text)
}

func (c *cli) printError(err error) {
	for _, line := range errorLines(err) {
		c.infof("agent: %s", printable(line))
	}
}

// withAdvice adds a next step for database and machine failures, unless the error has one.
func withAdvice(err error) error {
	if _, known := errors.AsType[*hintedError](err); errors.Is(err, agents.ErrNotFound) && !known {
		return hint(err, "see agent agents ls")
	}
	what, todo := postgres.Diagnose(err)
	switch postgres.Code(err) {
	case codeNUL:
		what, todo = "PostgreSQL cannot store the character U+0000", `remove \u0000`
	case codeBytes:
		what, todo = "PostgreSQL stores only UTF-8 text", "encode it as UTF-8"
	}
	if _, known := errors.AsType[*hintedError](err); known || what == "" || postgres.Todo(err) != "" ||
		strings.Contains(err.Error(), todo) {
		return err
	}
	return hint(err, "%s: %s", what, todo)
}

// errorLines splits an error that is a list of problems.
func errorLines(err error) []string {
	var settings *config.Error
	var files workspace.Problems
	var story *storyMismatch
	if errors.As(err, &settings) || errors.As(err, &files) || errors.As(err, &story) {
		return strings.Split(err.Error(), "\n")
	}
	return []string{err.Error()}
}

// errorCode names an exit code in JSON errors.
func errorCode(code int) string {
	switch code {
	case exitUsage:
		return "usage"
	case exitBusy:
		return "lane_busy"
	case exitInterrupted:
		return "interrupted"
	}
	return "failed"
}

// panicError turns a panic into an error of one line. The stack goes to the debug log.
func (c *cli) panicError(ctx context.Context, reason any) error {
	log, err := logging.New(c.err, c.environ["AGENT_LOG_FORMAT"], c.environ["AGENT_LOG_LEVEL"])
	if err == nil {
		log.DebugContext(ctx, "panic", "reason", reason, "stack", string(debug.Stack()))
	}
	return hint(fmt.Errorf("internal error: %.200s", fmt.Sprint(reason)),
		"report it with the output of AGENT_LOG_LEVEL=debug")
}
