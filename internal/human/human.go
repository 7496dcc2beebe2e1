// Package human formats money, durations, sizes and counts for people. The Engine Room, the command line and the trace
// story use it, so a value reads the same everywhere. engineroom/assets/human.js does the same in the browser; both are
// tested against testdata/examples.json. Only the browser formats distances in time: they change while a page is open.
//
// The rules:
//
//   - Money has two decimals: $0.00, $0.05, $1,234.50. An amount that rounds to less than a cent has four: $0.0042.
//     A smaller amount, which rounds to less than $0.0001, is <$0.0001. Zero is $0.00.
//   - A number below ten has one decimal, without a trailing zero: 5.9 s, 6 s, 1.5 kB. From ten on it is whole.
//   - A duration from a minute on has two units; a zero unit is left out: 3 min 20 s, 2 h, 3 d 4 h.
//   - Durations and sizes are truncated, not rounded, so that a running clock and a stored duration agree.
//   - A distance in time has one unit in the past ("3 min ago") and two in the future ("in 2 min 5 s", "due").
package human

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Money formats dollars.
func Money(usd float64) string {
	switch {
	case math.IsNaN(usd) || math.IsInf(usd, 0):
		return "–"
	case usd == 0:
		return "$0.00"
	case usd < 0:
		return "-" + Money(-usd)
	case usd < 0.00005:
		return "<$0.0001"
	case usd < 0.00995:
		return fmt.Sprintf("$%.4f", usd)
	}
	whole, cents, _ := strings.Cut(strconv.FormatFloat(usd, 'f', 2, 64), ".")
	return "$" + group(whole) + "." + cents
}

// Cost formats the cost of tokens. Tokens without a cost mean that the model has no price, or is free.
func Cost(usd float64, tokens int64) string {
	switch {
	case usd != 0:
		return Money(usd)
	case tokens > 0:
		return "no price"
	}
	return "–"
}

// Count formats a number with separators: 12,345.
func Count(n int64) string {
	digits, negative := strings.CutPrefix(strconv.FormatInt(n, 10), "-") // -n overflows for the smallest int64
	if negative {
		return "-" + group(digits)
	}
	return group(digits)
}

// Counted formats a number with its noun: 1 call, 1,200 calls.
func Counted(n int64, noun string) string { return Count(n) + " " + Plural(n, noun) }

// Plural returns a noun in the number of n.
func Plural(n int64, noun string) string {
	if n == 1 {
		return noun
	}
	return noun + "s"
}

// group separates thousands.
func group(digits string) string {
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// Bytes formats a size: 512 B, 1.5 kB, 32 MB.
func Bytes(n int64) string {
	const k = 1000
	switch {
	case n < k:
		return strconv.FormatInt(n, 10) + " B"
	case n < k*k:
		return tenths(n/(k/10)) + " kB"
	case n < k*k*k:
		return tenths(n/(k*k/10)) + " MB"
	}
	return tenths(n/(k*k*k/10)) + " GB"
}

// tenths formats a number of tenths: one decimal below ten, unless it is zero.
func tenths(n int64) string {
	if n >= 100 || n%10 == 0 {
		return Count(n / 10)
	}
	return fmt.Sprintf("%d.%d", n/10, n%10)
}

// Percent formats a share between 0 and 1: 12 %, <1 %, >99 %.
func Percent(share float64) string {
	switch {
	case math.IsNaN(share):
		return "–"
	case share > 0 && share < 0.01:
		return "<1 %"
	case share > 0.99 && share < 1:
		return ">99 %"
	}
	return fmt.Sprintf("%.0f %%", share*100)
}

// Duration formats a duration: 250 ms, 5.9 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. A negative one is 0 ms.
func Duration(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d <= 0:
		return "0 ms"
	case d < time.Millisecond:
		return "<1 ms"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < time.Minute:
		return tenths(int64(d/(100*time.Millisecond))) + " s"
	case d < time.Hour:
		return pair(d, time.Minute, "min", time.Second, "s")
	case d < day:
		return pair(d, time.Hour, "h", time.Minute, "min")
	}
	return pair(d, day, "d", time.Hour, "h")
}

// Millis formats a duration in milliseconds.
func Millis(ms int64) string { return Duration(milliseconds(float64(ms))) }

// Seconds formats a duration in seconds.
func Seconds(s float64) string { return Duration(milliseconds(math.Round(s * 1000))) }

// milliseconds converts to a duration between 0 and the largest one.
func milliseconds(ms float64) time.Duration {
	const limit = float64(math.MaxInt64 / time.Millisecond)
	if !(ms > 0) { // or not a number
		return 0
	}
	return time.Duration(min(ms, limit-1)) * time.Millisecond
}

// pair formats a duration in two units. It leaves the smaller one out if it is zero.
func pair(d, big time.Duration, bigName string, small time.Duration, smallName string) string {
	text := Count(int64(d/big)) + " " + bigName
	if rest := d % big / small; rest > 0 {
		text += fmt.Sprintf(" %d %s", rest, smallName)
	}
	return text
}

// Cut returns the first n characters of a text and the number of omitted ones. It returns the whole text if that is not
// longer.
func Cut(n int, s string) string {
	if len(s) <= n {
		return s
	}
	count := 0
	for i := range s {
		if count == n {
			omitted := utf8.RuneCountInString(s[i:])
			note := fmt.Sprintf("… (%s more characters)", Count(int64(omitted)))
			if omitted <= utf8.RuneCountInString(note) {
				return s
			}
			return s[:i] + note
		}
		count++
	}
	return s
}
