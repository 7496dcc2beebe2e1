package schedule

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// field is one of the five parts of a cron expression, with what its error says.
type field struct {
	name    string
	size    int // how many values it has: a larger step is met once and means something else
	allowed string
	example string
}

// fields are in the order in which they are written. They are never changed.
var fields = [...]field{
	{"minute", 60, "0 to 59", `"*/30"`},
	{"hour", 24, "0 to 23", `"9" or "8-18"`},
	{"day of month", 31, "1 to 31", `"1" or "1,15"`},
	{"month", 12, "1 to 12 or JAN to DEC", `"*/3" or "JAN"`},
	{"day of week", 7, "0 (Sunday) to 6 or SUN to SAT", `"1-5" or "MON"`},
}

// check refuses what the cron library would refuse unclearly, or accept as something else.
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
