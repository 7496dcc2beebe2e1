package redact

import (
	_ "embed"
	"encoding/json"
	"regexp"
	"sync/atomic"
)

// rule recognizes one kind of secret by its shape.
type rule struct {
	name string
	// keywords are in lower case, with at least three bytes. The pattern is tried only where a keyword occurs, in any
	// letter case.
	keywords []string
	// back is the number of bytes between the start of the match and the keyword.
	back int
	// bounded rejects a match that follows a letter, a digit or an underscore.
	bounded bool
	// pattern is the expression to match there. Its first group is the secret; without a group, the whole match is.
	pattern string
	// find replaces pattern with code. from equal to to means no secret.
	find func(s string, at int) (from, to int)
}

// rules lists all rules. Their index is their number in keywordTable and compiled.
var rules = func() []rule {
	var all []rule
	for _, some := range [][]rule{{telegram, urlParameters}, commands, readRules(ownJSON), readRules(gitleaksJSON)} {
		all = append(all, some...)
	}
	return all
}()

// ownJSON holds our rules: key files, headers, tokens and webhook addresses.
//
//go:embed rules.json
var ownJSON []byte

// gitleaksJSON holds the gitleaks rules that know the shape of a secret. The file also lists the rules that are left
// out, with the reason. The context of a secret is widened from source code to any text. Entropy and allowlists are
// dropped, so examples are redacted too. To add a rule of a newer version, add its line. Each keyword must be a literal
// part of every match.
//
//go:embed gitleaks/rules.json
var gitleaksJSON []byte

func readRules(text []byte) []rule {
	var file struct {
		Rules []struct {
			Name     string
			Keywords []string
			Back     int
			Bounded  bool
			Look     string
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		panic("redact: read the rules: " + err.Error())
	}
	var list []rule
	for _, r := range file.Rules {
		list = append(list, rule{name: r.Name, keywords: r.Keywords, back: r.Back, bounded: r.Bounded, pattern: r.Look})
	}
	return list
}

// compiled caches the expressions of the rules, by their index in rules.
var compiled = make([]atomic.Pointer[regexp.Regexp], len(rules))

// expression returns the compiled expression of a rule.
func expression(index int) *regexp.Regexp {
	if known := compiled[index].Load(); known != nil {
		return known
	}
	made := regexp.MustCompile(`\A(?:` + rules[index].pattern + `)`)
	compiled[index].Store(made)
	return made
}
