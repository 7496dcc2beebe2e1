// Package credentials checks the secrets of requests: the admin token as a bearer token or at the login, chat keys, API
// tokens, login links, and the bearer tokens of webhooks.
//
// It promises:
//
//   - It compares a secret by digest, and with all secrets of its kind. So the duration reveals neither their text nor
//     their length.
//   - It counts failures by kind and by the client's address (see internal/clientip). A valid secret does not reset the
//     count. After freeTries failures, each further failure doubles the address's wait, up to maxWait. During the wait,
//     it rejects attempts from the address with [Wait]. It forgets an address that has not failed for forgetAfter.
//   - A valid [Strong] secret passes even during the wait: nobody can guess it, and its owner may share the address
//     with an attacker. A weaker secret has to wait.
//   - Its memory is bounded. It forgets the oldest address first. The failures of one address do not delay another.
//   - It logs failures, at most one line per kind and logEvery. A line has the number of unlogged failures before it.
//
// The program checks its secrets with [Weak] at the start, and a webhook's bearer token before each comparison.
package credentials

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"math"
	"strings"
	"time"
)

// Kind is the use of a secret. Each kind has its own counts, so a valid secret of one kind does not help to guess
// another kind.
type Kind string

// Kinds of secrets.
const (
	Admin Kind = "admin token"
	Chat  Kind = "chat key"
	Token Kind = "API token"
	Hook  Kind = "bearer token of a webhook"
)

// Key is an accepted secret. The zero value accepts nothing.
type Key struct {
	Name   string
	digest [sha256.Size]byte
	strong bool
	set    bool
}

// NewKey returns the key of a secret. An empty secret accepts nothing.
func NewKey(name, secret string) Key {
	return Key{Name: name, digest: sha256.Sum256([]byte(secret)), strong: Strong(secret), set: secret != ""}
}

// Same reports whether two keys have the same secret.
func (k Key) Same(other Key) bool { return k.digest == other.digest }

// Wait is the error of an attempt during the wait after earlier failures.
type Wait struct{ For time.Duration }

// Error returns the remaining wait as a sentence.
func (w *Wait) Error() string {
	return fmt.Sprintf("too many failed attempts from this address; try again in %d s", w.Seconds())
}

// Seconds returns the wait in seconds, rounded up.
func (w *Wait) Seconds() int { return int((w.For + time.Second - 1) / time.Second) }

// find returns the key of a secret. Its duration does not depend on the key.
func find(secret string, keys []Key) (key Key, found bool) {
	digest, at := sha256.Sum256([]byte(secret)), -1
	for i := range keys {
		equal := subtle.ConstantTimeCompare(digest[:], keys[i].digest[:])
		at = subtle.ConstantTimeSelect(equal, i, at)
	}
	if at < 0 || !keys[at].set {
		return Key{}, false
	}
	return keys[at], true
}

const (
	// MinLength is the minimum length of a secret in bytes.
	MinLength = 16
	// minDistinct is the minimum number of different bytes in a secret.
	minDistinct = 8
	// strongBits is the entropy of an unguessable secret. It is below 128, because a random text may lack digits.
	strongBits = 120
)

// placeholders are the beginnings of the placeholders in examples.
var placeholders = []string{"replace", "change", "your-", "your_", "example", "<"}

// Weak returns why a secret is too weak; "" if it is not. It detects only obvious weakness: no program can distinguish
// a random text from an invented one.
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

// Strong reports whether a secret may have the entropy of an unguessable one: its length times the bits of its
// alphabets.
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

// repeated reports whether a text repeats a shorter one. The last repetition may be incomplete.
func repeated(text string) bool {
	for n := 1; n <= len(text)/2; n++ {
		if strings.HasPrefix(text, text[n:]) {
			return true
		}
	}
	return false
}

// alphabet returns the size of the alphabet of a secret: the sum of its character classes, or 16 for hexadecimal
// digits.
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
			other = 4 // separators: invented texts use few different ones
		}
	}
	return lower + upper + digit + other
}
