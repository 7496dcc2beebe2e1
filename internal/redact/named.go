package redact

import (
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// scrubNamed redacts values under the name of a secret in text: name=value, "name": "value", \"name\":\"value\", name:
// value, --name value.
func scrubNamed(s string) string {
	var out strings.Builder
	done := 0 // s up to here is written
	for at := 0; at < len(s); {
		next, width := signAt(s[at:])
		if next < 0 {
			break
		}
		at += next
		name, value := pairAt(s, done, at, width)
		how := classify(name)
		if how == ordinary {
			at += width
			continue
		}
		from, to := valueAt(s, value, name, how)
		if from < to {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done = to
		}
		at = max(to, value)
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// signAt finds the first sign in s that may join a name to a value, and its width: = : - and the wide signs of
// Chinese and Japanese. The index is -1 for none.
func signAt(s string) (i, width int) {
	const wideColon, wideEquals = "：", "＝"
	for i := range len(s) {
		switch s[i] {
		case '=', ':', '-':
			return i, 1
		case wideColon[0]:
			if strings.HasPrefix(s[i:], wideColon) || strings.HasPrefix(s[i:], wideEquals) {
				return i, len(wideColon)
			}
		}
	}
	return -1, 0
}

// pairAt returns the name before the sign at index i, and where the value begins. It searches back to from. The name
// is empty if the sign joins nothing.
func pairAt(s string, from, i, width int) (name string, value int) {
	if s[i] == '-' {
		return flagAt(s, i)
	}
	value = i + width
	if value < len(s) && (s[i] == '=' && s[value] == '>' || s[i] == ':' && s[value] == '=') {
		value++
	}
	value += blanks(s[value:])

	end := from + len(strings.TrimRight(s[from:i], wideBlanks))
	end = from + len(strings.TrimSuffix(s[from:end], "]"))
	if end > from && strings.IndexByte("\"'`", s[end-1]) >= 0 {
		end--
	}
	end = from + len(strings.TrimRight(s[from:end], `\`))
	end = from + len(strings.TrimSuffix(s[from:end], "]"))
	start := end
	for start > from && end-start < longestName && isLongName(s[start-1]) {
		start--
	}
	start += afterPunctuation(s[start:end])
	return qualified(s[from:start], s[start:end]), value
}

// flagAt returns the name of the command-line flag at index i and where its value begins, when
// only blanks are between them.
func flagAt(s string, i int) (name string, value int) {
	if i > 0 && !isSpace(s[i-1]) {
		return "", i
	}
	start := i + 1
	if start < len(s) && s[start] == '-' {
		start++
	}
	end := start
	for end < len(s) && end-start < longestName && isLongName(s[end]) {
		end++
	}
	gap := blanks(s[end:])
	if gap == 0 {
		return "", i
	}
	return s[start:end], end + gap
}

// blanks counts the spaces and tabs at the front of s.
func blanks(s string) int { return len(s) - len(strings.TrimLeft(s, " \t")) }

// wideBlanks are the blanks between a name and its sign, with those of French.
const wideBlanks = " \t\u00a0\u202f"

// isName reports whether b can stand in a name.
func isName(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '_' || b == '.' || b == '-'
}

// afterPunctuation is where the last name in s begins, after the punctuation of a script that writes no blanks.
func afterPunctuation(s string) int {
	if isASCII(s) {
		return 0
	}
	for i := len(s); i > 0; {
		r, size := utf8.DecodeLastRuneInString(s[:i])
		if r > unicode.MaxASCII && unicode.In(r, unicode.P, unicode.Z) && i < len(s) {
			return i
		}
		i -= size
	}
	return 0
}

// isLongName reports whether b can stand in a name of any language.
func isLongName(b byte) bool { return isName(b) || b >= 0x80 }

// qualified extends the last word of a name by the preceding words of that name, since prose writes "API key: …".
func qualified(before, name string) string {
	const longest = 64
	before = before[max(0, len(before)-longest):]
	for range phraseEnds[strings.ToLower(name)] {
		before = strings.TrimRight(before, " ")
		start := strings.LastIndexAny(before, " \t\r\n\"'(,;") + 1
		before, name = before[:start], before[start:]+name
	}
	return name
}

// valueAt finds the part of s, from i on, that is the value of a secret name. When from equals to, there is no secret.
func valueAt(s string, i int, name string, how nameStrength) (from, to int) {
	rest := s[i:]
	slashes := len(rest) - len(strings.TrimLeft(rest, `\`))
	if length := yamlEnd(s, i); length > 0 {
		return yamlScalar(s, i, length)
	}
	switch {
	case rest == "" || strings.HasPrefix(rest, cutPrefix):
		return i, i
	case slashes < len(rest) && strings.IndexByte("\"'`", rest[slashes]) >= 0:
		open := rest[:slashes+1]
		from, to = i+len(open), i+len(open)+closing(rest[len(open):], open)
	case strings.HasPrefix(rest, Marker):
		tail := rest[len(Marker):]
		if strings.Trim(tail[:bareEnd(tail)], ",.}])") == "" {
			return i, i + len(Marker)
		}
		from, to = i, i+len(Marker)+bareEnd(tail)
	case isHeader(name), isEscapedBlock(rest):
		from, to = i, i+lineEnd(rest)
	case rest[0] == '{' || rest[0] == '[':
		if how == weak {
			return i, i
		}
		from, to = i, i+bracketEnd(rest)
	default:
		from, to = i, i+bareEnd(rest)
	}
	if spared(s[from:to], how) {
		return i, i
	}
	return from, to
}

// cutPrefix starts every [cutMark].
const cutPrefix = "…[cut "

// spared reports whether a value in text is no secret despite its name.
func spared(value string, how nameStrength) bool {
	trimmed := strings.TrimRight(value, ",.}])")
	switch strings.ToLower(trimmed) {
	case "", "true", "false", "null", "nil", "none", "{", "[":
		return true
	}
	if value == Marker || strings.HasPrefix(value, cutPrefix) {
		return true
	}
	_, err := strconv.ParseFloat(trimmed, 64)
	return how == weak && err == nil
}

// isHeader reports whether a name's value extends to the end of its line.
func isHeader(name string) bool {
	name = strings.ToLower(name)
	return strings.HasSuffix(name, "authorization") || strings.HasSuffix(name, "cookie")
}

// closing returns the index in s of the quote that closes open, or the length of s.
func closing(s, open string) int {
	quote := open[len(open)-1]
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '\\':
			run := i
			for i < len(s) && s[i] == '\\' {
				i++
			}
			if i < len(s) && s[i] == quote && i-run < len(open) && len(open) > 1 {
				return run
			}
			if (i-run)%2 == 0 && len(open) == 1 {
				i-- // paired backslashes escape each other
			}
		case quote:
			return i
		}
	}
	return len(s)
}

// bareEnd returns the length of the unquoted value at the front of s.
func bareEnd(s string) int {
	if end := strings.IndexAny(s, " \t\r\n&;\"'`<>"); end >= 0 {
		return end
	}
	return len(s)
}

// lineEnd is the length of a header's value at the front of s.
func lineEnd(s string) int {
	if end := strings.IndexAny(s, "\r\n\"'`"); end >= 0 {
		return end
	}
	return len(s)
}

// bracketEnd returns the length of the bracketed value at the front of s; all of s if it is unclosed.
func bracketEnd(s string) int {
	open := 0
	for i := range len(s) {
		switch s[i] {
		case '{', '[':
			open++
		case '}', ']':
			open--
		}
		if open == 0 {
			return i + 1
		}
	}
	return len(s)
}

// isSpace reports whether b separates words on a command line.
func isSpace(b byte) bool { return b == ' ' || b == '\t' || b == '\n' || b == '"' || b == '\'' }

// nameStrength rates how surely a name denotes a secret.
type nameStrength int

const (
	ordinary nameStrength = iota
	weak                  // only strings are secret: tokens, auth
	strong                // everything but true, false, null and "" is secret: password
)

// longestName bounds the scanned part of a name, from its end.
const longestName = 256

// strongParts make a name secret anywhere in it, written without separators.
var strongParts = [...]string{
	"password", "passwd", "passphrase", "passcode", "secret", "apikey", "privatekey", "accesskey", "signingkey",
	"encryptionkey", "masterkey", "sessionkey", "accountkey", "sshkey", "hmackey", "authkey", "licensekey",
	"servicekey", "chatkey",
	"authorization", "cookie", "credential", "bearer", "connectionstring", "databaseurl", "postgresurl", "redisurl",
	"sessionid", "sessid", "authtoken", "accesstoken", "refreshtoken", "idtoken",
}

// strongWords make a name secret as one of its words.
var strongWords = [...]string{"dsn", "pwd", "pw", "otp", "cvv", "cvc", "pgpass", "pgpassword"}

// weakWords do so for strings only.
var weakWords = [...]string{"tokens", "auth", "session", "pass", "jwt"}

// tokenWord makes a name secret without [countingWords].
const tokenWord = "token"

// countingWords beside "token" denote a count or a description.
var countingWords = [...]string{
	"usage", "count", "counts", "limit", "limits", "budget", "type", "max", "min", "prompt", "completion", "total",
	"input", "output", "cached", "reasoning", "fencing", "cost", "price", "rate", "expires", "expiry", "ttl",
	"per", "details", "used",
}

// Key reports whether a name denotes a secret. Letter case, accents, invisible characters, dashes, underscores, dots
// and spaces do not matter. Token counts (token_usage, max_tokens) and fencing tokens are no secrets.
func Key(name string) bool { return classify(name) != ordinary }

// Hides reports whether a value under a name is a secret. In contrast to [Key] it excludes true, false, nil, "", and
// numbers that may be counts.
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

// classify returns the strength of a name. It ignores invisible characters and maps letters that resemble Latin ones.
func classify(name string) nameStrength {
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

// mayBeSecret cheaply excludes most ordinary names. The name is ASCII.
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

// classifyPlain returns the strength of a normalized name.
func classifyPlain(name string) nameStrength {
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

func hasWord(list, wanted []string) bool {
	for _, word := range list {
		if slices.Contains(wanted, word) {
			return true
		}
	}
	return false
}

// words splits a name at separators and camel-case humps, in lower case.
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

// Words for passwords and API keys in other languages. Ambiguous words are omitted: clave and chave (key), parola
// (word), jeton (token, coin).

// foreignWords make a name secret as the beginning or end of one of its words.
const foreignWords = `passwort passworte passwörter kennwort kennwörter zugangsdaten geheimschlüssel contraseña contraseñas
	contrasenya senha senhas credenciais wachtwoord wachtwoorden lösenord adgangskode passord salasana lykilorð пароль hasło heslo
	jelszó geslo lozinka zaporka şifre salasõna slaptažodis`

// foreignPhrases make a name secret anywhere in it, written without separators.
const foreignPhrases = `motdepasse motsdepasse clésecrète cléprivée cléapi clédapi apischlüssel privaterschlüssel
	clavesecreta claveprivada clavedeacceso clavedeapi claveapi frasedecontraseña chavesecreta chaveprivada chavedeacesso
	chavedeapi chaveapi palavrapasse chiavesegreta chiaveprivata chiaveapi paroladordine geheimesleutel mậtkhẩu katasandi
	katalaluan ключдоступа секретныйключ κωδικόςπρόσβασης पासवर्ड পাসওয়ার্ড رمزعبور كلمةالمرور كلمةالسر گذرواژه סיסמה סיסמא`

// foreignEnds make a name secret at its end. Their scripts have no blanks, so a whole sentence may precede a sign:
// 密码错误: (wrong password:) precedes no password.
const foreignEnds = `密码 密碼 口令 密钥 密鑰 暗証番号 パスワード 秘密鍵 비밀번호 패스워드 รหัสผ่าน`

// particles may stand between such a word and the sign.
const particles = "是为為はが는은가"

// phraseEnds are the last words of names of several words, with the number of words before them that belong to the
// name.
var phraseEnds = map[string]int{
	"key": 1, "passe": 2, "acceso": 2, "acesso": 2, "api": 2, "secreta": 1, "secrète": 1, "privada": 1,
	"privée": 1, "sandi": 1,
	"laluan": 1, "khẩu": 1, "πρόσβασης": 1, "доступа": 1, "المرور": 1, "السر": 1, "عبور": 1,
}

// asWords normalizes the given words like [words] and [plain].
func asWords(given string) func() []string {
	return sync.OnceValue(func() []string {
		list := strings.Fields(given)
		for i, word := range list {
			list[i] = strings.Join(words(plain(word)), "")
		}
		return list
	})
}

var (
	foreignWordList   = asWords(foreignWords)
	foreignPhraseList = asWords(foreignPhrases)
	foreignEndList    = asWords(foreignEnds)
	particleList      = sync.OnceValue(func() string { return plain(particles) })
)

// isForeign reports whether a name is secret in another language. It gets the words, and the name without separators.
func isForeign(list []string, joined string) bool {
	for _, phrase := range foreignPhraseList() {
		if strings.Contains(joined, phrase) {
			return true
		}
	}
	ended := strings.TrimRight(joined, particleList())
	for _, end := range foreignEndList() {
		if strings.HasSuffix(ended, end) || strings.HasSuffix(joined, end) {
			return true
		}
	}
	for _, secret := range foreignWordList() {
		for _, word := range list {
			if strings.HasPrefix(word, secret) || strings.HasSuffix(word, secret) {
				return true
			}
		}
	}
	return false
}
