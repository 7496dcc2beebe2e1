package redact

import (
	"slices"
	"strings"
)

// minKnownSecret is the length of the shortest secret that [Secrets] redacts, in bytes. A shorter text, such as a
// version in a header, is part of many words.
const minKnownSecret = 4

// Secrets returns a function that redacts the given secrets in a text. A secret may begin with another one, so the
// longest counts.
func Secrets(secrets []string) func(string) string {
	pairs := make([]string, 0, 2*len(secrets))
	for _, secret := range slices.Backward(slices.Sorted(slices.Values(secrets))) {
		if len(secret) >= minKnownSecret {
			pairs = append(pairs, secret, "[secret]")
		}
	}
	return strings.NewReplacer(pairs...).Replace
}

// Known applies hide, which redacts known secrets, to every string of a decoded JSON value, keys included. It changes
// lists in place. If keys become equal, the value of one of them stays, at random.
func Known(value any, hide func(string) string) any {
	switch v := value.(type) {
	case string:
		return hide(v)
	case []any:
		for i := range v {
			v[i] = Known(v[i], hide)
		}
	case map[string]any:
		hidden := make(map[string]any, len(v))
		for key := range v {
			hidden[hide(key)] = Known(v[key], hide)
		}
		return hidden
	}
	return value
}
