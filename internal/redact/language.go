package redact

import (
	"strings"
	"sync"
)

// The words for a password and for an API key in other languages. Words that also mean something ordinary are left
// out: clave and chave (key), parola (word), jeton (token, coin).

// foreignWords make a name secret when one of its words begins or ends with them.
const foreignWords = `passwort passworte passwörter kennwort kennwörter zugangsdaten geheimschlüssel contraseña contraseñas
	contrasenya senha senhas credenciais wachtwoord wachtwoorden lösenord adgangskode passord salasana lykilorð пароль hasło heslo
	jelszó geslo lozinka zaporka şifre salasõna slaptažodis`

// foreignPhrases make a name secret wherever they stand in it, written without separators.
const foreignPhrases = `motdepasse motsdepasse clésecrète cléprivée cléapi clédapi apischlüssel privaterschlüssel
	clavesecreta claveprivada clavedeacceso clavedeapi claveapi frasedecontraseña chavesecreta chaveprivada chavedeacesso
	chavedeapi chaveapi palavrapasse chiavesegreta chiaveprivata chiaveapi paroladordine geheimesleutel mậtkhẩu katasandi
	katalaluan ключдоступа секретныйключ κωδικόςπρόσβασης पासवर्ड পাসওয়ার্ড رمزعبور كلمةالمرور كلمةالسر گذرواژه סיסמה סיסמא`

// foreignEnds make a name secret when it ends with them. Their scripts write no blanks, so a whole sentence may stand
// before a sign, and 密码错误: (wrong password:) is not followed by a password.
const foreignEnds = `密码 密碼 口令 密钥 密鑰 暗証番号 パスワード 秘密鍵 비밀번호 패스워드 รหัสผ่าน`

// particles may stand between such a word and the sign.
const particles = "是为為はが는은가"

// phraseEnds are the last words of names of several words. Prose writes them with blanks, so the given number of words
// before them belongs to the name.
var phraseEnds = map[string]int{
	"key": 1, "passe": 2, "acceso": 2, "acesso": 2, "api": 2, "secreta": 1, "secrète": 1, "privada": 1, "privée": 1, "sandi": 1,
	"laluan": 1, "khẩu": 1, "πρόσβασης": 1, "доступа": 1, "المرور": 1, "السر": 1, "عبور": 1,
}

// asWords are the given words as [words] and [plain] make them of a name.
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

// isForeign reports whether a name, given as its words and without separators, is secret in another language.
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
