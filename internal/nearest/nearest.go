// Package nearest finds the name that a misspelt one was meant to be, for messages that ask "did you
// mean …?". It compares bytes without regard to letter case, and answers nothing rather than something far
// off: a name is near when few changes, for its length, make one the other.
package nearest

import "strings"

// longest is up to which length, in bytes, a name is compared: what is longer is no slip of the finger.
const longest = 80

// To returns the one of known that is fewest changes away from name; empty when none is near. Of several
// that are equally near it is the first.
func To(name string, known []string) string {
	if name == "" || len(name) > longest {
		return ""
	}
	best, least := "", min(3, (len(name)+1)/2)+1
	for _, k := range known {
		if n := distance(strings.ToLower(name), strings.ToLower(k)); n < least {
			best, least = k, n
		}
	}
	return best
}

// distance counts the single-byte changes that make one name the other.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := corner
			if a[i] != b[j] {
				cost++
			}
			corner = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
