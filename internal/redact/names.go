package redact

import (
	"slices"
	"strings"
	"sync"
	"unicode"
)

// nameStrength says which values under a name are secret.
type nameStrength int

const (
	ordinary nameStrength = iota // none
	weak                         // strings: tokens, auth
	strong                       // all except true, false, null and "": password
)

// longestName bounds the scanned part of a name, from its end.
const longestName = 256

// strongParts make a name strong anywhere in it, written without separators.
var strongParts = [...]string{
	"password", "passwd", "passphrase", "passcode", "secret", "apikey", "privatekey", "accesskey", "signingkey",
	"encryptionkey", "masterkey", "sessionkey", "accountkey", "sshkey", "hmackey", "authkey", "licensekey",
	"servicekey", "chatkey",
	"authorization", "cookie", "credential", "bearer", "connectionstring", "databaseurl", "postgresurl", "redisurl",
	"sessionid", "sessid", "authtoken", "accesstoken", "refreshtoken", "idtoken",
}

// strongWords make a name strong as one of its words.
var strongWords = [...]string{"dsn", "pwd", "pw", "otp", "cvv", "cvc", "pgpass", "pgpassword"}

// weakWords make a name weak as one of its words.
var weakWords = [...]string{"tokens", "auth", "session", "pass", "jwt"}

// tokenWord makes a name strong, unless it has one of [countingWords].
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

// nameBeginnings is the set of the first three letters of all words that make a name secret, by [trigram]. A collision
// only costs a full check.
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

// mayBeSecret reports false for most ordinary names, at little cost, and true for all others. The name is ASCII.
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
	joined = strings.ReplaceAll(joined, "secretary", "") // has the part secret
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
