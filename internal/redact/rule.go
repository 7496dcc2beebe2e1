package redact

import (
	"regexp"
	"strings"
	"sync/atomic"
)

// rule describes one kind of secret that is known by its look.
type rule struct {
	name string
	// keywords are in lower case and have three bytes or more. The rule runs only where the text holds one of them,
	// in any letter case.
	keywords []string
	// back is how many bytes before the keyword the secret begins.
	back int
	// bounded means that no letter, digit or underscore stands right before the match.
	bounded bool
	// look is an expression that is matched at that place. Its first group is the secret; without one, all of it is.
	look string
	// find replaces look where an expression does not do. There is no secret when from equals to.
	find func(s string, at int) (from, to int)
}

// rules are all kinds. They are never written to.
var rules = func() []rule {
	var all []rule
	for _, some := range [][]rule{keyBlocks, parameters, tokens, commands, gitleaks} {
		all = append(all, some...)
	}
	return all
}()

// compiled holds the expressions of the rules that a text has needed so far.
var compiled = make([]atomic.Pointer[regexp.Regexp], len(rules))

// expression is the compiled look of a rule.
func expression(number int) *regexp.Regexp {
	if done := compiled[number].Load(); done != nil {
		return done
	}
	done := regexp.MustCompile(`\A(?:` + rules[number].look + `)`)
	compiled[number].Store(done)
	return done
}

// secretAt finds the secret of a rule whose keyword stands at index i of s. None begins before from.
func secretAt(s string, from, i, number int) (start, end int) {
	r := &rules[number]
	at := i - r.back
	if at < from || r.bounded && !boundary(s, at) {
		return i, i
	}
	if r.find != nil {
		return r.find(s, at)
	}
	found := expression(number).FindStringSubmatchIndex(s[at:])
	if found == nil {
		return i, i
	}
	start, end = at+found[0], at+found[1]
	if len(found) > 2 && found[2] >= 0 {
		start, end = at+found[2], at+found[3]
	}
	for end < len(s) && isWord(s[end-1]) && isWord(s[end]) {
		end++ // a longer secret than the rule knows
	}
	if insideBase64(s, at, end) {
		return i, i
	}
	return start, end
}

// boundary reports whether a word can begin at index i of s: after anything that is no letter, digit or underscore, and
// after an escape of JSON or of a URL.
func boundary(s string, i int) bool {
	if i == 0 || !isWord(s[i-1]) {
		return true
	}
	return i >= 2 && s[i-2] == '\\' && strings.IndexByte("nrtbf", s[i-1]) >= 0 ||
		i >= 3 && s[i-3] == '%' && isHex(s[i-2:i]) ||
		i >= 6 && s[i-6:i-4] == `\u` && isHex(s[i-4:i])
}

// insideBase64 reports whether a match is a piece of a long base64 text, as of a picture, in which every prefix occurs
// by chance.
func insideBase64(s string, from, to int) bool {
	const long = 64
	if from < long || s[from-1] != '+' && s[from-1] != '/' {
		return false
	}
	for _, b := range []byte(s[from-long : to]) {
		if !isBase64(b) {
			return false
		}
	}
	return true
}

func isLetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }
func isDigit(b byte) bool  { return b >= '0' && b <= '9' }
func isWord(b byte) bool   { return isLetter(b) || isDigit(b) || b == '_' }
func isToken(b byte) bool  { return isWord(b) || b == '-' }
func isBase64(b byte) bool { return isLetter(b) || isDigit(b) || b == '+' || b == '/' }

// isHex reports whether s consists of hexadecimal digits.
func isHex(s string) bool {
	for _, b := range []byte(s) {
		if !isDigit(b) && (b|0x20 < 'a' || b|0x20 > 'f') {
			return false
		}
	}
	return true
}
