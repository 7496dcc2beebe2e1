package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/trace"
)

// option is the value of a flag that is checked where flags are: before anything else happens.
type option struct {
	kind  string // what help shows as its type
	text  string
	parse func(text string) error
}

func (o *option) String() string { return o.text }

func (o *option) Type() string { return o.kind }

func (o *option) Set(text string) error {
	if err := o.parse(text); err != nil {
		return err
	}
	o.text = text
	return nil
}

// statusFlag is a flag that takes one of a few states.
func statusFlag(flags *pflag.FlagSet, into *string, about string, words ...string) {
	wordFlag(flags, into, "status", about, words...)
}

// wordFlag is a flag that takes one of a few words.
func wordFlag(flags *pflag.FlagSet, into *string, name, about string, words ...string) {
	flags.Var(&option{kind: "word", parse: func(text string) error {
		if !slices.Contains(words, text) {
			return fmt.Errorf("not one of %s", strings.Join(words, ", "))
		}
		*into = text
		return nil
	}}, name, about+": "+strings.Join(words, ", "))
}

// surfaceFlag is a flag that takes a surface.
func surfaceFlag(flags *pflag.FlagSet, into *string) {
	flags.Var(&option{kind: "word", parse: func(text string) error {
		surface, err := trace.ParseSurface(text)
		*into = string(surface)
		return err
	}}, "surface", "only what began there: heartbeat, operate, chat, webhook, flow")
}

// traceFlag is a flag that takes a trace id in any form.
func traceFlag(flags *pflag.FlagSet, into *[]trace.ID) {
	flags.Var(&option{kind: "id", parse: func(text string) (err error) {
		*into, err = trace.ParseAny(text)
		return err
	}}, "trace", "only this trace")
}

// executionFlag is a flag that takes the id of an execution.
func executionFlag(flags *pflag.FlagSet, into *string) {
	flags.Var(&option{kind: "id", parse: func(text string) error {
		var id pgtype.UUID
		if err := id.Scan(text); err != nil {
			return errors.New("not the id of an execution, which is a uuid: agent executions ls lists them")
		}
		*into = text
		return nil
	}}, "execution", "only of this execution")
}

// executionCursor is where a page of executions ended: an id.
func executionCursor(flags *pflag.FlagSet, into *string) {
	flags.Var(&option{kind: "cursor", parse: func(text string) error {
		var id pgtype.UUID
		if err := id.Scan(text); err != nil {
			return errors.New("not a cursor: take it from the page before")
		}
		*into = text
		return nil
	}}, "cursor", "where the page before ended")
}

// rowID is one argument: the id of a row, which a command lists.
func rowID(what, lists string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		if err := args(1, 1, what+"'s id")(cmd, got); err != nil {
			return err
		}
		if !uuidForm.MatchString(got[0]) {
			return &exitError{exitUsage, hint(fmt.Errorf("%.60q is not the id of %s, which is a uuid", got[0], what), "see %s", lists)}
		}
		return nil
	}
}

// executionID is one argument: the id of an execution.
func executionID(cmd *cobra.Command, got []string) error {
	return rowID("an execution", "agent executions ls")(cmd, got)
}

// uuidForm is how an id is written, with dashes or without.
var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}$`)

// limitFlag is how many rows a listing shows.
func limitFlag(flags *pflag.FlagSet, into *int, usual int) {
	*into = usual
	flags.Var(&option{kind: "n", text: strconv.Itoa(usual), parse: func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > activity.MaxLimit {
			return fmt.Errorf("not a number from 1 to %d", activity.MaxLimit)
		}
		*into = n
		return nil
	}}, "limit", "how many at most")
}

// agoFlag is how far a listing looks back; with no usual it looks back to the beginning.
func agoFlag(flags *pflag.FlagSet, into *time.Time, name, usual, about string) {
	o := &option{kind: "span", parse: func(text string) error {
		d, err := parseSpan(text)
		*into = time.Now().Add(-d)
		return err
	}}
	if usual != "" && o.Set(usual) != nil {
		panic("the usual span is none: " + usual)
	}
	flags.Var(o, name, about+": 90m, 24h, 7d")
}

// maxTTL is the longest that a lane can be taken for.
const maxTTL = 30 * 24 * time.Hour

// ttlFlag is how long a lane outlives its holder's crash.
func ttlFlag(flags *pflag.FlagSet, into *time.Duration, about string) {
	flags.Var(&option{kind: "span", parse: func(text string) error {
		d, err := parseSpan(text)
		if err == nil && (d < time.Second || d > maxTTL) {
			err = errors.New("not from 1s to 30d")
		}
		*into = d
		return err
	}}, "ttl", about)
}

// parseSpan reads a span of time: 90m, 24h, 7d.
func parseSpan(text string) (time.Duration, error) {
	number, days := strings.CutSuffix(text, "d")
	if days {
		number += "h"
	}
	d, err := time.ParseDuration(number)
	const longest = 100 * 366 * 24 * time.Hour
	switch {
	case err != nil || d <= 0:
		return 0, errors.New("not a span of time; write 90m, 24h or 7d")
	case days && d > longest/24 || d > longest:
		return 0, errors.New("longer than 100 years")
	case days:
		d *= 24
	}
	return d, nil
}

// statusWords are the states of an execution.
func statusWords() []string {
	states := []executions.Status{
		executions.Pending, executions.Running, executions.Waiting, executions.Completed, executions.Failed,
		executions.Timeout, executions.Cancelled,
	}
	words := make([]string, len(states))
	for i, s := range states {
		words[i] = string(s)
	}
	return words
}

// ifRevisionFlag is what a change is based on.
func ifRevisionFlag(cmd *cobra.Command, into *int, about string) {
	cmd.Flags().IntVar(into, "if-revision", 0, about)
}

// revisionOf is the revision that a flag names, as package memory has it: 0 where the flag was not given.
func revisionOf(cmd *cobra.Command, named int) (int, error) {
	switch {
	case !cmd.Flags().Changed("if-revision"):
		return 0, nil
	case named < 0:
		return 0, usageError("--if-revision is %d; it can be a revision, or 0 for what must be new", named)
	}
	return cmp.Or(named, memory.Absent), nil
}

// basis is what a change to something that is there is based on.
type basis struct {
	check func(ctx context.Context, tx pgx.Tx, name string, revision int) error // locks it
	named int
}

// basisFlag lets a change be refused when somebody else made one since.
func basisFlag(cmd *cobra.Command, check func(ctx context.Context, tx pgx.Tx, name string, revision int) error) *basis {
	b := &basis{check: check}
	ifRevisionFlag(cmd, &b.named, "change it only if it is at this revision, which show says")
	return b
}

// hold refuses a change that is based on another revision, and keeps others from making one until the transaction ends.
func (b *basis) hold(cmd *cobra.Command, tx pgx.Tx, name string) error {
	if !cmd.Flags().Changed("if-revision") {
		return nil
	}
	if b.named < 1 {
		return usageError("--if-revision is %d; it is a revision that show has said, 1 or more", b.named)
	}
	return b.check(cmd.Context(), tx, name, b.named)
}

// staleHint says how to go on when somebody else has made a change.
func staleHint(err error, show string) error {
	if _, stale := errors.AsType[*postgres.StaleError](err); stale {
		return hint(err, "%s says what it is now; then name that revision with --if-revision", show)
	}
	return err
}
