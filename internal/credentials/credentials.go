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
