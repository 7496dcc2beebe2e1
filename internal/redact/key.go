package redact

import (
	"slices"
	"strings"
	"sync"
	"unicode"
)

// strength says how sure a name makes it that what is under it is a secret.
type strength int

const (
	ordinary strength = iota
	weak              // strings are secret, numbers and objects are not: tokens, auth
	strong            // everything but true, false, null and "" is secret: password
)

// longestName is how much of a name is looked at, from its end.
const longestName = 256

// strongParts make a name secret wherever they stand in it, written without separators.
var strongParts = [...]string{
	"password", "passwd", "passphrase", "passcode", "secret", "apikey", "privatekey", "accesskey", "signingkey",
	"encryptionkey", "masterkey", "sessionkey", "accountkey", "sshkey", "hmackey", "authkey", "licensekey", "servicekey", "chatkey",
	"authorization", "cookie", "credential", "bearer", "connectionstring", "databaseurl", "postgresurl", "redisurl",
	"sessionid", "sessid", "authtoken", "accesstoken", "refreshtoken", "idtoken",
}

// strongWords make a name secret when they are one of its words.
var strongWords = [...]string{"dsn", "pwd", "pw", "otp", "cvv", "cvc", "pgpass", "pgpassword"}

// weakWords do so for strings only.
var weakWords = [...]string{"tokens", "auth", "session", "pass", "jwt"}

// tokenWord makes a name secret unless [countingWords] stand beside it.
const tokenWord = "token"

// countingWords beside "token" show that tokens are counted or described, not held.
var countingWords = [...]string{
	"usage", "count", "counts", "limit", "limits", "budget", "type", "max", "min", "prompt", "completion", "total",
	"input", "output", "cached", "reasoning", "fencing", "cost", "price", "rate", "expires", "expiry", "ttl", "per", "details", "used",
}

// Key reports whether a value under this name is taken for a secret. Letter case, accents, invisible characters,
// dashes, underscores, dots and spaces do not matter. Names that count tokens (token_usage, max_tokens) and fencing
// tokens are not secret.
func Key(name string) bool { return classify(name) != ordinary }

// Hides reports whether a value under this name is taken for a secret. Unlike [Key] it looks at
// the value too: true, false, nil and "" never are, and a number is not where it may be a count.
func Hides(name string, value any) bool {
	switch v := value.(type) {
	case nil, bool:
		return false
	case string:
		return v != "" && Key(name)
	case int, int64, uint64, float64:
		return classify(name) == strong
	}
	return Key(name)
}

// classify says how secret a name is. It sees through what hides a name: invisible characters, and letters that only
// look like Latin ones.
func classify(name string) strength {
	if len(name) < 2 {
		return ordinary
	}
	if len(name) > longestName {
		name = name[len(name)-longestName:]
	}
	if isASCII(name) {
		if !mayBeSecret(name) {
			return ordinary
		}
		return classifyPlain(name)
	}
	seen := plain(name)
	return max(classifyPlain(seen), classifyPlain(latin(seen)))
}

// nameBeginnings has the first three letters of all words that make a name secret.
var nameBeginnings = sync.OnceValue(func() *[1 << tableBits]bool {
	var begins [1 << tableBits]bool
	for _, list := range [][]string{
		strongParts[:], strongWords[:], weakWords[:], {tokenWord}, foreignWordList(), foreignPhraseList(), foreignEndList(),
	} {
		for _, word := range list {
			if len(word) > 2 {
				begins[trigram(word[0], word[1], word[2])] = true
			}
		}
	}
	return &begins
})

// mayBeSecret is false for most ordinary names, at little cost. The name is ASCII.
func mayBeSecret(name string) bool {
	begins := nameBeginnings()
	var last, last2 byte
	for i := range len(name) {
		b := name[i]
		switch {
		case isLetter(b):
			b |= 0x20
		case !isDigit(b):
			continue // separators do not matter
		}
		if last == 'p' && b == 'w' || begins[trigram(last2, last, b)] {
			return true
		}
		last2, last = last, b
	}
	return false
}

// classifyPlain says how secret a name is that hides nothing.
func classifyPlain(name string) strength {
	list := words(name)
	joined := strings.Join(list, "")
	joined = strings.ReplaceAll(joined, "secretary", "")
	for _, part := range strongParts {
		if strings.Contains(joined, part) {
			return strong
		}
	}
	if hasWord(list, strongWords[:]) || isForeign(list, joined) {
		return strong
	}
	if counted := hasWord(list, countingWords[:]); !counted {
		if hasWord(list, []string{tokenWord}) || strings.HasSuffix(joined, tokenWord) {
			return strong
		}
		if hasWord(list, weakWords[:]) {
			return weak
		}
	}
	return ordinary
}

// hasWord reports whether one of list is one of wanted.
func hasWord(list, wanted []string) bool {
	for _, word := range list {
		if slices.Contains(wanted, word) {
			return true
		}
	}
	return false
}

// words splits a name at separators and at the humps of camel case, in lower case.
func words(name string) []string {
	var list []string
	var word strings.Builder
	flush := func() {
		if word.Len() > 0 {
			list = append(list, word.String())
			word.Reset()
		}
	}
	var last rune
	for _, r := range name {
		switch {
		case !unicode.IsLetter(r) && !unicode.IsDigit(r):
			flush()
		case unicode.IsUpper(r) && unicode.IsLower(last):
			flush()
			fallthrough
		default:
			word.WriteRune(unicode.ToLower(r))
		}
		last = r
	}
	flush()
	return list
}
