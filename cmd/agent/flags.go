package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/trace"
)

// checkedFlag is a flag whose value is validated during flag parsing.
type checkedFlag struct {
	kind  string // in help
	text  string
	parse func(text string) error
}

func (o *checkedFlag) String() string { return o.text }

func (o *checkedFlag) Type() string { return o.kind }

func (o *checkedFlag) Set(text string) error {
	if err := o.parse(text); err != nil {
		return err
	}
	o.text = text
	return nil
}

// statusFlag accepts one of several states.
func statusFlag(flags *pflag.FlagSet, into *string, about string, words ...string) {
	enumFlag(flags, into, "status", about, words...)
}

// enumFlag accepts one of several words.
func enumFlag(flags *pflag.FlagSet, into *string, name, about string, words ...string) {
	flags.Var(&checkedFlag{kind: "word", parse: func(text string) error {
		if !slices.Contains(words, text) {
			return fmt.Errorf("not one of %s", strings.Join(words, ", "))
		}
		*into = text
		return nil
	}}, name, about+": "+strings.Join(words, ", "))
}

func surfaceFlag(flags *pflag.FlagSet, into *string) {
	flags.Var(&checkedFlag{kind: "word", parse: func(text string) error {
		surface, err := trace.ParseSurface(text)
		*into = string(surface)
		return err
	}}, "surface", "only this surface: heartbeat, operate, chat, webhook, flow, eval")
}

// traceFlag accepts a trace id in any form.
func traceFlag(flags *pflag.FlagSet, into *[]trace.ID) {
	flags.Var(&checkedFlag{kind: "id", parse: func(text string) (err error) {
		*into, err = trace.ParseAny(text)
		return err
	}}, "trace", "only this trace")
}

func executionFlag(flags *pflag.FlagSet, into *string) {
	uuidFlag(flags, into, "id", "execution", "only this execution", "not an execution id (uuid); see agent executions ls")
}

// cursorFlag accepts the id after which a page begins.
func cursorFlag(flags *pflag.FlagSet, into *string) {
	const about = "next_cursor of the previous page"
	uuidFlag(flags, into, "cursor", "cursor", about, "not a cursor; use "+about)
}

func uuidFlag(flags *pflag.FlagSet, into *string, kind, name, about, problem string) {
	flags.Var(&checkedFlag{kind: kind, parse: func(text string) error {
		var id pgtype.UUID
		if err := id.Scan(text); err != nil {
			return errors.New(problem)
		}
		*into = text
		return nil
	}}, name, about)
}

// rowID validates one argument, the id of a row.
func rowID(what, lists string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := positionalArgs(1, 1, what+"'s id")(cmd, args); err != nil {
			return err
		}
		if !uuidForm.MatchString(args[0]) {
			return &exitError{exitUsage, hint(fmt.Errorf("%.60q is not the id (uuid) of %s", args[0], what), "see %s", lists)}
		}
		return nil
	}
}

func executionID(cmd *cobra.Command, args []string) error {
	return rowID("an execution", "agent executions ls")(cmd, args)
}

// uuidForm accepts ids with and without dashes.
var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}$`)

// limitFlag sets the page size.
func limitFlag(flags *pflag.FlagSet, into *int, usual int) {
	*into = usual
	flags.Var(&checkedFlag{kind: "n", text: strconv.Itoa(usual), parse: func(text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > activity.MaxLimit {
			return fmt.Errorf("not a number from 1 to %d", activity.MaxLimit)
		}
		*into = n
		return nil
	}}, "limit", "page size")
}

// sinceFlag filters by age. An empty default means no bound.
func sinceFlag(flags *pflag.FlagSet, into *time.Time, name, usual, about string) {
	o := &checkedFlag{kind: "span", parse: func(text string) error {
		d, err := parseSpan(text)
		*into = time.Now().Add(-d)
		return err
	}}
	if usual != "" && o.Set(usual) != nil {
		panic("invalid default duration: " + usual)
	}
	flags.Var(o, name, about+": 90m, 24h, 7d")
}

// spanFlag reads a duration.
func spanFlag(flags *pflag.FlagSet, into *time.Duration, name, usual, about string) {
	o := &checkedFlag{kind: "span", text: usual, parse: func(text string) (err error) {
		*into, err = parseSpan(text)
		return err
	}}
	if o.Set(usual) != nil {
		panic("invalid default duration: " + usual)
	}
	flags.Var(o, name, about+": 90m, 24h, 7d")
}

// lifetimeFlag reads a duration, or 0 for no end.
func lifetimeFlag(flags *pflag.FlagSet, into *time.Duration, name, about string) {
	flags.Var(&checkedFlag{kind: "span", text: "0", parse: func(text string) (err error) {
		if *into = 0; text != "0" {
			*into, err = parseSpan(text)
		}
		return err
	}}, name, about)
}

// maxTTL bounds the lease of a lane.
const maxTTL = 30 * 24 * time.Hour

// ttlFlag sets how long a lane outlives its holder's crash.
func ttlFlag(flags *pflag.FlagSet, into *time.Duration, about string) {
	flags.Var(&checkedFlag{kind: "span", parse: func(text string) error {
		d, err := parseSpan(text)
		if err == nil && (d < time.Second || d > maxTTL) {
			err = errors.New("not from 1s to 30d")
		}
		*into = d
		return err
	}}, "ttl", about)
}

// parseSpan parses a duration: 90m, 24h, 7d.
func parseSpan(text string) (time.Duration, error) {
	number, days := strings.CutSuffix(text, "d")
	if days {
		number += "h"
	}
	d, err := time.ParseDuration(number)
	const longest = 100 * 366 * 24 * time.Hour
	switch {
	case err != nil:
		return 0, errors.New("not a duration; write 90m, 24h or 7d")
	case d <= 0:
		return 0, errors.New("not more than 0; write 90m, 24h or 7d")
	case days && d > longest/24 || d > longest:
		return 0, errors.New("longer than 100 years")
	case days:
		d *= 24
	}
	return d, nil
}

// labelFlag reads labels: name=value, or several with commas. It rejects a repeated name.
func labelFlag(flags *pflag.FlagSet, into *executions.Labels) {
	flags.Var(&checkedFlag{kind: "name=value", parse: func(text string) (err error) {
		pairs := []string{strings.Trim(text, `"`)}
		if strings.Count(text, "=") > 1 {
			if pairs, err = csv.NewReader(strings.NewReader(text)).Read(); err != nil {
				return errors.New(`write name=value, and quote a value with a comma: "name=a, b"`)
			}
		}
		for _, pair := range pairs {
			name, value, ok := strings.Cut(pair, "=")
			if _, twice := (*into)[name]; twice || !ok {
				return fmt.Errorf("%s", map[bool]string{true: name + " is there twice", false: "write name=value"}[twice])
			}
			if *into == nil {
				*into = executions.Labels{}
			}
			(*into)[name] = value
		}
		return nil
	}}, "label", "a label, as name=value; may be repeated")
}
