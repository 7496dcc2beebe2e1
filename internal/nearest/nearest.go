// Package nearest finds the intended name behind a misspelt one, for messages that ask "did you mean …?". It compares
// bytes by Levenshtein distance, without regard to letter case, and accepts few changes for the length of the name. A
// name also counts as near when the word is its beginning, up to an underscore.
package nearest

import "strings"

// maxLength bounds the names that are compared, in bytes: a longer one is no typing error.
const maxLength = 80

// To returns the name in known with the smallest distance to name, the first of equals; empty when none is near.
func To(name string, known []string) string {
	if name == "" || len(name) > maxLength {
		return ""
	}
	best, smallest := "", min(3, (len(name)+1)/2)+1
	for _, k := range known {
		word, candidate := strings.ToLower(name), strings.ToLower(k)
		n := distance(word, candidate)
		if len(word) > 2 && strings.HasPrefix(candidate, word+"_") {
			n = min(n, 1)
		}
		if n < smallest {
			best, smallest = k, n
		}
	}
	return best
}

// distance returns the Levenshtein distance of two names.
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
