package flows

import (
	"fmt"
	"regexp"
	"strconv"
	"time"
)

// durationPattern is the syntax of a duration; JSONSchema uses it, too.
const durationPattern = `^([0-9]+(\.[0-9]+)?(ms|s|m|h|d|w))+$`

var (
	durationRegexp     = regexp.MustCompile(durationPattern)
	durationPartRegexp = regexp.MustCompile(`([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)`)
)

// parseDuration parses a duration such as 90m, 24h, 7d or 1d12h.
func parseDuration(text string) (time.Duration, error) {
	if !durationRegexp.MatchString(text) {
		return 0, fmt.Errorf("%q is not a duration: write 30s, 90m, 24h or 7d", text)
	}
	units := map[string]time.Duration{
		"ms": time.Millisecond, "s": time.Second, "m": time.Minute, "h": time.Hour, "d": 24 * time.Hour,
		"w": 7 * 24 * time.Hour,
	}
	total := 0.0
	for _, part := range durationPartRegexp.FindAllStringSubmatch(text, -1) {
		n, err := strconv.ParseFloat(part[1], 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration: %w", text, err)
		}
		total += n * float64(units[part[2]])
	}
	const century = 100 * 365 * 24 * time.Hour
	if total > float64(century) {
		return 0, fmt.Errorf("%q is longer than a century", text)
	}
	return time.Duration(total), nil
}

// formatDuration formats a duration in its input syntax: 7d, 24h, 90m.
func formatDuration(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d > day && d%day == 0:
		return fmt.Sprintf("%dd", d/day)
	case d >= time.Hour && d%time.Hour == 0:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d >= time.Minute && d%time.Minute == 0:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return d.String()
}
