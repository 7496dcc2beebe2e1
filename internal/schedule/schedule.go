// Package schedule computes the next time of recurring work.
//
// A schedule is five cron fields (minute, hour, day of month, month, day of week), a name such
// as @daily, or an interval such as @every 30m. A schedule may name its own time zone with
// CRON_TZ=Europe/Madrid in front; otherwise it runs in the zone it is parsed with.
//
// [Parse] promises that it never panics, for any expression, and that an accepted expression fires. It refuses an
// expression that no calendar meets (31 February). It also refuses an interval under a second or with a minus sign,
// which cron would silently turn into one second. An error names the wrong field and shows a correct one.
//
// Daylight saving: a time that the clocks skip does not happen that day (30 2 * * * is skipped on one day of spring in
// Europe). A time that they repeat happens twice. Work that must not miss or repeat a day runs in UTC, which is the
// default of the runtime. The program contains the zones, so machines without a zone database have them.
//
// A [Schedule] is an immutable value; it is safe for concurrent use.
package schedule

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	_ "time/tzdata" // zones for machines without a zone database

	"github.com/robfig/cron/v3"
)

// maxLength is the number of bytes of the longest expression.
const maxLength = 256

// Schedule is a recurring time. The zero value is never due; others come from [Parse].
type Schedule struct {
	spec string
	cron cron.Schedule
	zone *time.Location
}

// Parse reads a cron expression. Its times are in the zone that it names, else in loc, or in UTC if loc is nil. The
// error names the wrong part and shows a correct one.
func Parse(spec string, loc *time.Location) (Schedule, error) {
	if loc == nil {
		loc = time.UTC
	}
	s, err := parse(strings.TrimSpace(spec), loc)
	if err != nil {
		if len(spec) > maxLength {
			spec = spec[:maxLength] + "…"
		}
		return Schedule{}, fmt.Errorf("parse schedule %q: %w", spec, err)
	}
	return s, nil
}

// Next returns the next due time after the given one, in the schedule's zone; the zero time if there is none within
// five years.
func (s Schedule) Next(after time.Time) time.Time {
	if s.cron == nil {
		return time.Time{}
	}
	return s.cron.Next(after.In(s.zone))
}

// String is the expression as it was given.
func (s Schedule) String() string { return s.spec }

// Location is the zone of the schedule's times.
func (s Schedule) Location() *time.Location {
	if s.zone == nil {
		return time.UTC
	}
	return s.zone
}

// Location finds a time zone by its IANA name; empty means UTC. "Local" is refused, because it
// means something else on each machine.
func Location(name string) (*time.Location, error) {
	if name == "" {
		return time.UTC, nil
	}
	const hint = `use a name such as "Europe/Madrid" or "UTC"`
	if name == "Local" {
		return nil, fmt.Errorf("find time zone %q: it differs from machine to machine; %s", name, hint)
	}
	loc, err := time.LoadLocation(name)
	if err != nil {
		return nil, fmt.Errorf("find time zone %q: unknown; %s", name, hint)
	}
	return loc, nil
}

// parse reads an expression without surrounding space.
func parse(spec string, loc *time.Location) (Schedule, error) {
	if len(spec) > maxLength {
		return Schedule{}, fmt.Errorf("it is longer than %d bytes", maxLength)
	}
	rest, loc, err := cutZone(spec, loc)
	if err != nil {
		return Schedule{}, err
	}
	if err := check(rest); err != nil {
		return Schedule{}, err
	}
	parsed, err := guarded(rest)
	if err != nil {
		return Schedule{}, err
	}
	if fields, ok := parsed.(*cron.SpecSchedule); ok {
		fields.Location = loc
	}
	s := Schedule{spec: spec, cron: parsed, zone: loc}
	if !fires(s) {
		return Schedule{}, errors.New(
			`no day meets it, so it would never run: the month lacks the day of month; "0 0 28 2 *" is a day that exists`)
	}
	return s, nil
}

// cutZone removes the zone from the front of an expression.
func cutZone(spec string, loc *time.Location) (string, *time.Location, error) {
	name, found := strings.CutPrefix(spec, "CRON_TZ=")
	if !found {
		name, found = strings.CutPrefix(spec, "TZ=")
	}
	if !found {
		return spec, loc, nil
	}
	end := strings.IndexAny(name, " \t")
	if end < 0 {
		return "", nil, errors.New(
			`the time zone stands alone; put the fields after it, as in "CRON_TZ=Europe/Madrid 0 9 * * *"`)
	}
	if end == 0 {
		return "", nil, errors.New(`the time zone is empty; name one, as in "CRON_TZ=Europe/Madrid 0 9 * * *"`)
	}
	loc, err := Location(name[:end])
	if err != nil {
		return "", nil, err
	}
	return strings.TrimSpace(name[end:]), loc, nil
}

// guarded calls the cron library, whose parser has panicked before.
func guarded(spec string) (parsed cron.Schedule, err error) {
	defer func() {
		if p := recover(); p != nil {
			parsed, err = nil, errors.New(`it is not a cron expression; "*/30 * * * *" is one`)
		}
	}()
	return cron.ParseStandard(spec)
}

// fires reports whether the schedule is ever due. Next looks five years ahead, and any five
// years from 2001 on have their 29 February.
func fires(s Schedule) bool {
	return !s.Next(time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC)).IsZero()
}

// field is one of the five parts of a cron expression, with the hint for its error.
type field struct {
	name    string
	size    int // the number of its values: a larger step fires once and means something else
	allowed string
	example string
}

// fields are in the order of the expression. They never change.
var fields = [...]field{
	{"minute", 60, "0 to 59", `"*/30"`},
	{"hour", 24, "0 to 23", `"9" or "8-18"`},
	{"day of month", 31, "1 to 31", `"1" or "1,15"`},
	{"month", 12, "1 to 12 or JAN to DEC", `"*/3" or "JAN"`},
	{"day of week", 7, "0 (Sunday) to 6 or SUN to SAT", `"1-5" or "MON"`},
}

// check refuses expressions that the cron library would refuse unclearly, or accept with another meaning.
func check(spec string) error {
	if spec == "" {
		return errors.New(`it is empty; "*/30 * * * *" is every half hour`)
	}
	if strings.HasPrefix(spec, "@") {
		return checkName(spec)
	}
	parts := strings.Fields(spec)
	if len(parts) != len(fields) {
		return fmt.Errorf(
			`it has %d fields instead of 5 (minute, hour, day of month, month, day of week); "*/30 * * * *" is every half hour`,
			len(parts))
	}
	for i, f := range fields {
		if err := checkField(parts[i], i); err != nil {
			return fmt.Errorf("the %s %q is wrong (%w): it takes %s, for example %s", f.name, parts[i], err, f.allowed,
				f.example)
		}
	}
	return nil
}

// checkField tries one field with stars for the others.
func checkField(part string, position int) error {
	for item := range strings.SplitSeq(part, ",") {
		if item == "" {
			return errors.New("a part of its list is empty")
		}
		if strings.HasPrefix(item, "*-") || strings.HasPrefix(item, "?-") {
			return errors.New("a range begins with a number")
		}
		_, step, _ := strings.Cut(item, "/")
		if n, err := strconv.Atoi(step); err == nil && n >= fields[position].size {
			return fmt.Errorf("a step of %d is longer than the field", n)
		}
	}
	alone := []string{"*", "*", "*", "*", "*"}
	alone[position] = part
	_, err := guarded(strings.Join(alone, " "))
	return err
}

// checkName checks an expression that begins with @.
func checkName(spec string) error {
	const names = "@hourly, @daily, @weekly, @monthly, @yearly or @every 30m"
	every, found := strings.CutPrefix(spec, "@every ")
	if !found {
		if _, err := guarded(spec); err != nil {
			return fmt.Errorf("there is no schedule of this name; use %s", names)
		}
		return nil
	}
	d, err := time.ParseDuration(every)
	switch {
	case err != nil:
		return fmt.Errorf(`%q is not an interval; "@every 30m" is one, in h, m and s`, every)
	case d < time.Second:
		return fmt.Errorf(`the interval %s is under one second; "@every 30m" is one that works`, d)
	case d%time.Second != 0:
		return fmt.Errorf(`the interval %s is not in whole seconds; "@every 30m" is one that works`, d)
	}
	return nil
}
