package credentials

import (
	"fmt"
	"math"
	"strings"
)

const (
	// MinLength is the fewest characters of a secret.
	MinLength = 16
	// minDistinct is the fewest different characters of one.
	minDistinct = 8
	// strongBits is what cannot be guessed. It is below 128, because a random text may happen to have no digit.
	strongBits = 120
)

// placeholders begin texts that stand in examples in the place of a secret.
var placeholders = []string{"replace", "change", "your-", "your_", "example", "<"}

// Weak says why a secret is too weak to be one; empty when it is not. It finds what is weak at sight: no program can
// tell a random text from one that somebody made up.
func Weak(secret string) string {
	lower := strings.ToLower(secret)
	switch {
	case len(secret) < MinLength:
		return fmt.Sprintf("it has fewer than %d characters", MinLength)
	case distinct(secret) < minDistinct:
		return fmt.Sprintf("it has fewer than %d different characters", minDistinct)
	case repeated(lower):
		return "it is one text repeated"
	}
	for _, begin := range placeholders {
		if strings.HasPrefix(lower, begin) {
			return fmt.Sprintf("it begins with %q, as the placeholder of an example does", begin)
		}
	}
	return ""
}

// Strong reports whether a secret has room for what cannot be guessed: its length times the bits of the alphabets it
// uses.
func Strong(secret string) bool {
	return Weak(secret) == "" && float64(len(secret))*math.Log2(float64(alphabet(secret))) >= strongBits
}

func distinct(secret string) int {
	var seen [256]bool
	n := 0
	for i := range len(secret) {
		if !seen[secret[i]] {
			seen[secret[i]] = true
			n++
		}
	}
	return n
}

// repeated reports a text that is a shorter one again and again, the last time perhaps in part.
func repeated(text string) bool {
	for n := 1; n <= len(text)/2; n++ {
		if strings.HasPrefix(text, text[n:]) {
			return true
		}
	}
	return false
}

// alphabet is how many characters the kinds of characters in use have; hexadecimal digits count as such.
func alphabet(secret string) int {
	if strings.Trim(secret, "0123456789abcdef") == "" || strings.Trim(secret, "0123456789ABCDEF") == "" {
		return 16
	}
	var lower, upper, digit, other int
	for _, c := range []byte(secret) {
		switch {
		case c >= 'a' && c <= 'z':
			lower = 26
		case c >= 'A' && c <= 'Z':
			upper = 26
		case c >= '0' && c <= '9':
			digit = 10
		default:
			other = 4 // what separates words: made-up texts have them, and few different ones
		}
	}
	return lower + upper + digit + other
}
