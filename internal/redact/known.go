package redact

import (
	"encoding/json"
	"slices"
	"strings"
)

// minKnownSecret is the length of the shortest secret that [Secrets] redacts, in bytes. A shorter text, such as a
// version in a header, is part of many words.
const minKnownSecret = 4

// Secrets returns a function that redacts the given secrets in a text, also as a text of JSON has them. A secret may
// begin with another one, so the longest counts.
func Secrets(secrets []string) func(string) string {
	var forms, pairs []string
	for _, secret := range secrets {
		if len(secret) >= minKnownSecret {
			forms = append(forms, writtenForms(secret)...)
		}
	}
	slices.Sort(forms)
	for _, form := range slices.Backward(slices.Compact(forms)) {
		pairs = append(pairs, form, "[secret]")
	}
	return strings.NewReplacer(pairs...).Replace
}

// writtenForms returns a secret and its forms inside a string of JSON. Servers may also escape the characters of HTML,
// or slashes.
func writtenForms(secret string) []string {
	forms := []string{secret, strings.Trim(string(encode(secret)), `"`)}
	if html, err := json.Marshal(secret); err == nil {
		forms = append(forms, strings.Trim(string(html), `"`))
	}
	for _, form := range forms[1:] {
		forms = append(forms, strings.ReplaceAll(form, "/", `\/`))
	}
	return forms
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
