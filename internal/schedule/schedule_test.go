package schedule_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

func mustLocation(t *testing.T, name string) *time.Location {
	t.Helper()
	loc, err := schedule.Location(name)
	require.NoError(t, err)
	return loc
}

func at(t *testing.T, s string) time.Time {
	t.Helper()
	parsed, err := time.Parse(time.RFC3339, s)
	require.NoError(t, err)
	return parsed
}

func TestNext(t *testing.T) {
	for name, c := range map[string]struct{ spec, zone, after, want string }{
		"half hour":      {"*/30 * * * *", "", "2026-01-01T10:00:00Z", "2026-01-01T10:30:00Z"},
		"strictly after": {"0 10 * * *", "", "2026-01-01T10:00:00Z", "2026-01-02T10:00:00Z"},
		"just before":    {"0 10 * * *", "", "2026-01-01T09:59:59.999Z", "2026-01-01T10:00:00Z"},
		"zone given":     {"0 9 * * *", "Europe/Madrid", "2026-01-01T00:00:00Z", "2026-01-01T08:00:00Z"},
		"zone in expression": {
			"CRON_TZ=Asia/Tokyo 0 9 * * *", "Europe/Madrid", "2026-01-01T01:00:00Z",
			"2026-01-02T00:00:00Z",
		},
		"short zone":         {"TZ=UTC 0 9 * * *", "Europe/Madrid", "2026-01-01T00:00:00Z", "2026-01-01T09:00:00Z"},
		"name in zone":       {"@daily", "Europe/Madrid", "2026-01-01T00:00:00Z", "2026-01-01T23:00:00Z"},
		"name, own zone":     {"CRON_TZ=Asia/Tokyo @daily", "", "2026-01-01T00:00:00Z", "2026-01-01T15:00:00Z"},
		"interval":           {"@every 90m", "", "2026-01-01T10:00:00Z", "2026-01-01T11:30:00Z"},
		"leap day":           {"0 0 29 2 *", "", "2025-01-01T00:00:00Z", "2028-02-29T00:00:00Z"},
		"surrounding space":  {"  0 9 * * MON ", "", "2026-01-01T00:00:00Z", "2026-01-05T09:00:00Z"},
		"left out in spring": {"30 2 * * *", "Europe/Madrid", "2026-03-28T12:00:00Z", "2026-03-30T00:30:00Z"},
		"midnight is gone":   {"0 0 * * *", "America/Santiago", "2026-09-05T12:00:00Z", "2026-09-07T03:00:00Z"},
		"autumn, first":      {"30 2 * * *", "Europe/Madrid", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z"},
		"autumn, second":     {"30 2 * * *", "Europe/Madrid", "2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := schedule.Parse(c.spec, mustLocation(t, c.zone))
			require.NoError(t, err)
			got := s.Next(at(t, c.after))
			assert.Truef(t, got.Equal(at(t, c.want)), "Next = %v, want %s", got, c.want)
		})
	}
}

func TestParseErrors(t *testing.T) {
	for name, c := range map[string]struct{ in, says string }{
		"empty":             {"", "it is empty"},
		"blank":             {" \t", "it is empty"},
		"zone alone":        {"TZ=UTC", "stands alone"},
		"cron zone alone":   {"CRON_TZ=", "stands alone"},
		"zone empty":        {"TZ= * * * * *", "the time zone is empty"},
		"zone unknown":      {"TZ=Mars/Base * * * * *", `"Europe/Madrid" or "UTC"`},
		"zone local":        {"TZ=Local * * * * *", "differs from machine to machine"},
		"zone twice":        {"TZ=UTC TZ=UTC", "1 fields instead of 5"},
		"zone is a path":    {"TZ=../../etc/passwd * * * * *", "unknown"},
		"four fields":       {"* * * *", "4 fields instead of 5"},
		"seconds":           {"0 */30 * * * *", "6 fields instead of 5"},
		"minute":            {"60 * * * *", `the minute "60" is wrong`},
		"hour":              {"0 24 * * *", `the hour "24" is wrong`},
		"day":               {"0 0 0 * *", `the day of month "0" is wrong`},
		"month":             {"0 0 1 FOO *", `the month "FOO" is wrong`},
		"weekday":           {"0 0 * * 7", `the day of week "7" is wrong`},
		"step 0":            {"*/0 * * * *", `the minute "*/0" is wrong`},
		"step too long":     {"*/90 * * * *", "a step of 90 is longer than the field"},
		"range from star":   {"*-5 * * * *", "a range begins with a number"},
		"empty in list":     {"1,,2 * * * *", "list is empty"},
		"comma":             {", * * * *", "list is empty"},
		"range reversed":    {"0 18-8 * * *", "the hour"},
		"never":             {"0 0 31 2 *", "never run"},
		"never either":      {"0 0 31 4,6,9,11 *", "never run"},
		"never in zone":     {"TZ=Asia/Tokyo 0 0 30 2 *", "never run"},
		"name unknown":      {"@reboot", "@every 30m"},
		"every alone":       {"@every", "@every 30m"},
		"every nothing":     {"@every ", "@every 30m"},
		"every negative":    {"@every -1s", "under one second"},
		"every zero":        {"@every 0s", "under one second"},
		"every half second": {"@every 500ms", "under one second"},
		"every 1.5 s":       {"@every 1500ms", "whole seconds"},
		"every day":         {"@every 1d", "not an interval"},
		"every overflow":    {"@every 999999999h", "not an interval"},
		"long":              {strings.Repeat("1,", 1000) + "1 * * * *", "longer than 256 bytes"},
		"words":             {"every monday at nine please", `the minute "every" is wrong`},
		"nul":               {"\x00 * * * *", "the minute"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := schedule.Parse(c.in, nil)
			require.Truef(t, err != nil, "Parse(%q) accepts it", c.in)
			assert.Contains(t, err.Error(), "parse schedule", c.says)
			assert.Truef(t, len(err.Error()) <= 800, "error has %d bytes", len(err.Error()))
		})
	}
}

func TestLocation(t *testing.T) {
	for in, want := range map[string]string{"": "UTC", "UTC": "UTC", "Europe/Madrid": "Europe/Madrid"} {
		loc, err := schedule.Location(in)
		assert.Truef(t, err == nil && loc.String() == want, "Location(%q) = %v, %v", in, loc, err)
	}
	for _, in := range []string{"Local", "Mars/Base", "../x", "europe madrid"} {
		_, err := schedule.Location(in)
		assert.Truef(t, err != nil && strings.Contains(err.Error(), "Europe/Madrid"), "Location(%q): %v", in, err)
	}
}

func TestZeroValueIsNeverDue(t *testing.T) {
	var s schedule.Schedule
	if !s.Next(time.Now()).IsZero() || s.String() != "" || s.Location() != time.UTC {
		t.Errorf("the zero schedule is due at %v", s.Next(time.Now()))
	}
}

func TestParseKeepsExpressionAndZone(t *testing.T) {
	s, err := schedule.Parse("TZ=Asia/Tokyo 0 9 * * *", nil)
	require.NoError(t, err)
	if s.String() != "TZ=Asia/Tokyo 0 9 * * *" || s.Location().String() != "Asia/Tokyo" ||
		s.Next(time.Now()).Location() != s.Location() {
		t.Errorf("got %q in %v", s, s.Location())
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"*/30 * * * *", "TZ=UTC", "CRON_TZ=", "TZ= ", "0 0 31 2 *", "@every -1s", "@daily", "@every 1h",
		"1-5/2,7 ? * JAN-MAR MON", "*/99999999999999999999 * * * *",
		"TZ=America/Sao_Paulo 0 0 * * *", "TZ=Australia/Lord_Howe */7 2 * * *", "\xff", "@", "1/18446744073709551615 * * * *",
	} {
		f.Add(s)
	}
	from := time.Date(2026, 3, 1, 0, 0, 0, 1, time.UTC)
	f.Fuzz(func(t *testing.T, spec string) {
		s, err := schedule.Parse(spec, nil)
		if err != nil {
			return
		}
		first := s.Next(from)
		second := s.Next(first)
		assert.Truef(t, first.After(from) && second.After(first), "%q is due at %v, then at %v", spec, first, second)
	})
}
