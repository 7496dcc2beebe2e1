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
	exitBusy        = 75
	exitInterrupted = 130
)

// exitError ends the program with a code. A nil cause is silent: what there was to say has been said.
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

// usageError is a mistake in how the program was called or configured.
func usageError(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// hinted is an error with what to do about it. In text the hint follows the error, in JSON it has its own key.
type hinted struct {
	error
	hint string
}

func (e *hinted) Error() string { return e.error.Error() + "; " + e.hint }

func (e *hinted) Unwrap() error { return e.error }

// hint says what to do about an error.
func hint(err error, format string, args ...any) error {
	return &hinted{err, fmt.Sprintf(format, args...)}
}

// traced is an error of a run: its trace tells more.
type traced struct {
	error
	id string
}

func (e *traced) Unwrap() error { return e.error }

// exitCode says with which code an error ends the program: 2 where the caller or the configuration is
// wrong, also when that was found out late.
func exitCode(ctx context.Context, err error) int {
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		return exit.code
	case ctx.Err() != nil:
		return exitInterrupted
	}
	if badWorkspace(err) || postgres.IsCode(err, codeNUL, codeBytes) {
		return exitUsage
	}
	for _, wrong := range []error{
		trace.ErrInvalid, activity.ErrCursor, lanes.ErrInvalid, migrations.ErrOutdated, migrations.ErrOld, migrations.ErrNewer, migrations.ErrChanged,
		threads.ErrEmpty, threads.ErrInvalid,
	} {
		if errors.Is(err, wrong) {
			return exitUsage
		}
	}
	return exitFailed
}

// What PostgreSQL says of texts that it does not store.
const (
	codeNUL   = "22P05" // with U+0000 (untranslatable_character)
	codeBytes = "22021" // no UTF-8 (character_not_in_repertoire)
)

// badWorkspace reports an error of the files, also one that only showed against the database.
func badWorkspace(err error) bool {
	var several workspace.Problems
	var one workspace.Problem
	return errors.As(err, &several) || errors.As(err, &one)
}

// complain reports the error that ends the program, unless it is silent.
func (c *cli) complain(code int, err error) {
	if code == exitInterrupted {
		err = errors.New("interrupted")
	}
	var exit *exitError
	if errors.As(err, &exit) && exit.cause == nil {
		return
	}
	err = advised(err)
	if !c.json {
		c.sayError(err)
		return
	}
	fault := map[string]string{"code": errorWord(code), "message": err.Error()}
	if known, ok := errors.AsType[*hinted](err); ok {
		fault["message"], fault["hint"] = strings.TrimSuffix(err.Error(), "; "+known.hint), known.hint
	} else if todo := postgres.Todo(err); todo != "" {
		fault["message"], fault["hint"] = strings.TrimSuffix(err.Error(), ": "+todo), todo
	}
	if run, ok := errors.AsType[*traced](err); ok {
		fault["trace_id"] = run.id
	}
	// Texts can always be encoded, so there is no error to report.
	text, _ := json.Marshal(map[string]any{"error": fault})
	c.say("%s", text)
}

// sayError tells a person of an error.
func (c *cli) sayError(err error) {
	for _, line := range errorLines(err) {
		c.say("agent: %s", printable(line))
	}
}

// advised adds what to do about a database, or a machine, in trouble, unless the error says what to do already.
func advised(err error) error {
	if _, known := errors.AsType[*hinted](err); errors.Is(err, agents.ErrNotFound) && !known {
		return hint(err, "see agent agents ls")
	}
	what, todo := postgres.Trouble(err)
	switch postgres.Code(err) {
	case codeNUL:
		what, todo = "PostgreSQL stores no text with the character U+0000", `leave \u0000 out`
	case codeBytes:
		what, todo = "PostgreSQL stores no text that is not UTF-8", "write it in UTF-8"
	}
	if _, known := errors.AsType[*hinted](err); known || what == "" || postgres.Todo(err) != "" || strings.Contains(err.Error(), todo) {
		return err
	}
	return hint(err, "%s: %s", what, todo)
}

// errorLines is an error as lines: one, except where there is a list of problems.
func errorLines(err error) []string {
	var settings *config.Error
	var files workspace.Problems
	var story *differs
	if errors.As(err, &settings) || errors.As(err, &files) || errors.As(err, &story) {
		return strings.Split(err.Error(), "\n")
	}
	return []string{err.Error()}
}

// errorWord is an exit code for programs that read JSON.
func errorWord(code int) string {
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

// crashed makes an error of a panic: one line for the user, the stack for the debug log.
func (c *cli) crashed(ctx context.Context, reason any) error {
	log, err := logging.New(c.err, c.environ["AGENT_LOG_FORMAT"], c.environ["AGENT_LOG_LEVEL"])
	if err == nil {
		log.DebugContext(ctx, "panic", "reason", reason, "stack", string(debug.Stack()))
	}
	return hint(fmt.Errorf("a mistake in agent itself: %.200s", fmt.Sprint(reason)),
		"please report it, with what AGENT_LOG_LEVEL=debug shows")
}
