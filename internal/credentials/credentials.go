// Package credentials checks what requests present as secrets: the admin token as a bearer or at the login, chat keys,
// API tokens, login links, and the bearer tokens of webhooks.
//
// It promises:
//
//   - A secret is compared by digest, and all secrets of a kind are compared whichever is right: neither their text
//     nor their length shows in how long that takes.
//   - Wrong tries are counted by kind and by the client's address (see internal/clientip). After freeTries of them
//     each further one costs a wait that doubles up to maxWait; meanwhile tries from there are refused unread with
//     [Wait]. An address without a wrong try for forgetAfter begins again.
//   - A right secret that is [Strong] passes also from an address that has to wait: it cannot be guessed, so the wait
//     would only keep out its owner, who may share the address with who guesses. A weaker one has to wait.
//   - The memory is bounded. An address that is pushed out begins again; no address has to wait for another's tries.
//   - Wrong tries are logged, at most one line per kind and logEvery. A line says how many had none.
//
// [Weak] is what a secret has to pass at the start of the program, and a bearer token of a webhook before it is
// compared.
package credentials

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"math"
	"strings"
	"time"
)

// Kind says what a secret is for. Each kind is counted apart, so that who has one secret gains nothing for another.
type Kind string

// The kinds.
const (
	Admin Kind = "admin token"
	Chat  Kind = "chat key"
	Token Kind = "API token"
	Hook  Kind = "bearer token of a webhook"
)

// Key is a secret that is accepted. The zero value accepts nothing.
type Key struct {
	Name   string
	digest [sha256.Size]byte
	strong bool
	set    bool
}

// NewKey makes a key of its secret. An empty secret accepts nothing.
func NewKey(name, secret string) Key {
	return Key{Name: name, digest: sha256.Sum256([]byte(secret)), strong: Strong(secret), set: secret != ""}
}

// Same reports whether two keys have the same secret.
func (k Key) Same(other Key) bool { return k.digest == other.digest }

// Wait refuses a try because of the wrong ones before it.
type Wait struct{ For time.Duration }

// Error says how long to wait.
func (w *Wait) Error() string {
	return fmt.Sprintf("too many wrong tries came from this address; try again in %d s", w.Seconds())
}

// Seconds is the wait, rounded up.
func (w *Wait) Seconds() int { return int((w.For + time.Second - 1) / time.Second) }

// find looks for the key of a secret, in a time that does not depend on which it is.
func find(secret string, keys []Key) (key Key, found bool) {
	given, at := sha256.Sum256([]byte(secret)), -1
	for i := range keys {
		same := subtle.ConstantTimeCompare(given[:], keys[i].digest[:])
		at = subtle.ConstantTimeSelect(same, i, at)
	}
	if at < 0 || !keys[at].set {
		return Key{}, false
	}
	return keys[at], true
}

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
