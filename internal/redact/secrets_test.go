package redact_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// hex and letters fill the shapes of tokens. No token of these tests is one, and none stands in the source as a whole:
// hosts of code refuse what looks like one.
const (
	hex     = "0123456789abcdef0123456789abcdef"
	letters = "Zq81xLm0Kk77Zq81xLm0Kk77Zq81xLm0Kk77Zq81xLm0Kk77"
)

// secretText is a text with the part that must not be seen.
type secretText struct{ text, secret string }

var secrets = map[string]secretText{
	"pypi":            {"pypi-" + "AgEIcHlwaS5vcmc" + letters, letters},
	"pypi cut":        {"pypi-" + "AgEIcHlwaS5vcmc", "cHlwaS5v"},
	"shopify":         {"shp" + "at_" + hex, hex},
	"vault":           {"hv" + "s." + letters[:24], letters[:24]},
	"vault long":      {"hv" + "s." + letters + letters + letters, letters},
	"groq":            {"gs" + "k_" + letters, letters},
	"xai":             {"xa" + "i-" + letters, letters},
	"nvidia":          {"nva" + "pi-" + letters, letters},
	"linear":          {"lin_" + "api_" + letters[:40], letters[:40]},
	"supabase":        {"sb" + "p_" + hex + hex[:8], hex},
	"databricks":      {"da" + "pi" + hex + "-2", hex},
	"telegram":        {"sent by 1234567890:" + "AAE" + letters[:32] + ", ok", letters[:32]},
	"telegram url":    {"https://api.telegram.org/bot1234567890:" + "AAH" + letters[:32] + "/getMe", letters[:32]},
	"telegram escape": {"?bot=1234567890%3A" + "AAH" + letters[:32], letters[:32]},
	"discord":         {"login MTE4NzY1" + "NDMyMTA5ODc2NTQz.G" + "abcde." + letters[:38] + " failed", letters[:38]},
	"discord webhook": {"POST https://discord.com/api/web" + "hooks/1187654321098765432/" + letters + ": 404", letters},
	"discord old":     {"https://discordapp.com/api/v10/web" + "hooks/1187654321098765432/" + letters, letters},
	"slack webhook":   {"https://hooks.slack.com/ser" + "vices/T0000/B0000/" + letters[:24], letters[:24]},
	"teams webhook":   {"https://x.webhook.office.com/webhookb2/" + letters + "/y", letters},
	"twilio":          {"S" + "K" + hex, hex},
	"mailgun":         {"with ke" + "y-" + hex + ".", hex},
	"stripe":          {"rk" + "_live_" + letters, letters},
	"sendgrid":        {"S" + "G." + letters[:22] + "." + letters[:43], letters[:22]},
	"azure":           {"got " + "abc8" + "Q~" + letters[:34], letters[:34]},
	"after escape":    {`{"log": "one\n` + "gh" + "p_" + letters[:36] + `\ntwo"`, letters[:36]},
	"after percent":   {"https://a/b?c=d%3D" + "gh" + "p_" + letters[:36], letters[:36]},
	"after unicode":   {`a\u003d` + "gh" + "p_" + letters[:36], letters[:36]},

	"xml":            {"<user><name>bob</name><password>hunter2</password></user>", "hunter2"},
	"xml attributes": {`<p:Password type="text">hunter 2</p:Password>`, "hunter"},
	"xml cut":        {"<login><password>hunter2", "hunter2"},
	"xml cdata":      {"<clientSecret><![CDATA[hunter2]]></clientSecret>", "hunter2"},
	"xml nested":     {"<credentials>\n<a>x</a>\n<b>hunter2</b>\n</credentials>", "hunter2"},

	"yaml block":       {"user: bob\npassword: |\n  hunter2\n  hunter3\nname: x", "hunter"},
	"yaml folded":      {"password: >-\n\n  hunter2\n", "hunter2"},
	"yaml deeper":      {"a:\n  - api_key: |2 # the key\n      hunter2\n    name: x", "hunter2"},
	"yaml next line":   {"password:\n  hunter2\nname: x", "hunter2"},
	"yaml escaped":     {`"password: |\n  hunter2\n"`, "hunter2"},
	"yaml crlf":        {"password: |\r\n  hunter2\r\nname: x", "hunter2"},
	"yaml tab":         {"\tpassword: |\n\t\thunter2", "hunter2"},
	"curl":             {"curl -u bob:hunter2 https://example.com", "hunter2"},
	"curl quoted":      {`curl -sS -u "bob:hunter 2" https://example.com`, "hunter"},
	"curl long":        {"curl --user=bob:hunter2 https://example.com", "hunter2"},
	"curl proxy":       {"/usr/bin/curl https://x -L --proxy-user 'bob:hunter2'", "hunter2"},
	"curl joined":      {"curl -sSubob:hunter2 https://x", "hunter2"},
	"curl on lines":    {"curl \\\n  -H 'Accept: */*' \\\n  -u bob:hunter2 \\\n  https://x", "hunter2"},
	"curl cut":         {`curl -u 'bob:hunter2`, "hunter2"},
	"curl of windows":  {"curl.exe -u bob:hunter2", "hunter2"},
	"mysql":            {"mysql -u root -phunter2 shop", "hunter2"},
	"mysql quoted":     {"mysqldump -uroot -p'hunter 2' shop", "hunter"},
	"mariadb":          {"mariadb -h db -phunter2", "hunter2"},
	"redis":            {"redis-cli -h cache -a hunter2 ping", "hunter2"},
	"sshpass":          {"sshpass -p hunter2 ssh bob@example.com", "hunter2"},
	"docker":           {"docker login -u bob -p hunter2 registry.example.com", "hunter2"},
	"putty":            {"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 2\nAAAA\nPrivate-Lines: 1\nhunter2\nPrivate-MAC: 00ff", "hunter2"},
	"putty end":        {"Private-Lines: 1\nhunter2\nPrivate-MAC: 00ff", "hunter2"},
	"ssh2":             {"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nhunter2\n---- END SSH2 ENCRYPTED PRIVATE KEY ----", "hunter2"},
	"url with at":      {"parse postgres://bob:hun@ter2@db:5432/shop: bad port", "hun"},
	"url with at last": {"parse postgres://bob:hun@ter2@db:5432/shop: bad port", "ter2"},

	"spanish":        {"contraseña: hunter2", "hunter2"},
	"spanish plain":  {"la contrasena=hunter2", "hunter2"},
	"spanish pieces": {"contrasen\u0303a: hunter2", "hunter2"},
	"german":         {"Passwort: hunter2", "hunter2"},
	"german joined":  {`{"benutzerKennwort": "hunter2"`, "hunter2"},
	"french":         {"mot de passe\u00a0: hunter2", "hunter2"},
	"portuguese":     {"--senha hunter2", "hunter2"},
	"polish":         {"hasło=hunter2", "hunter2"},
	"swedish":        {"Lösenord: hunter2", "hunter2"},
	"russian":        {"Пароль: hunter2", "hunter2"},
	"chinese":        {"密码：hunter2", "hunter2"},
	"chinese is":     {"您的密码是: hunter2", "hunter2"},
	"japanese":       {"パスワード＝hunter2", "hunter2"},
	"korean":         {"비밀번호: hunter2", "hunter2"},
	"thai":           {"รหัสผ่าน: hunter2", "hunter2"},
	"vietnamese":     {"mật khẩu: hunter2", "hunter2"},

	"zero width":    {"pass\u200bword: hunter2", "hunter2"},
	"soft hyphen":   {"pass\u00adword=hunter2", "hunter2"},
	"joiner":        {"api\u2060_key=hunter2", "hunter2"},
	"filler":        {"pass\u3164word=hunter2", "hunter2"},
	"in the token":  {"gh\u200bp_" + letters[:10] + "\u200d" + letters[10:36], letters[10:36]},
	"in the sign":   {"password\u200b:\u200b hunter2", "hunter2"},
	"cyrillic":      {"pаsswоrd: hunter2", "hunter2"},
	"wide letters":  {"ｐａｓｓｗｏｒｄ: hunter2", "hunter2"},
	"styled":        {"𝗽𝗮𝘀𝘀𝘄𝗼𝗿𝗱=hunter2", "hunter2"},
	"upside accent": {"pässwörd: hunter2", "hunter2"},
}

func TestASecretIsRemovedWhereverItStands(t *testing.T) {
	for name, c := range secrets {
		t.Run(name, func(t *testing.T) {
			for _, around := range []string{"%s", "before\n%s\nafter", "{\"a\": \"\n%s"} {
				text := fmt.Sprintf(around, c.text)
				if got := redact.Text(text, 0); strings.Contains(got, c.secret) || !strings.Contains(got, redact.Marker) {
					t.Errorf("Text(%q) = %q", text, got)
				}
			}
			checkJSON(t, map[string]any{"a": []any{c.text, map[string]string{c.text: c.text}}}, c.secret, 0)
		})
	}
}

func TestNamesInOtherLanguagesAndWithHiddenCharactersAreSecret(t *testing.T) {
	for _, name := range []string{
		"contraseña", "CONTRASEÑA", "contrasenaUsuario", "passwort", "db_kennwort", "motDePasse", "mot_de_passe", "senha", "wachtwoord",
		"hasło", "şifre", "пароль", "密码", "密碼", "パスワード", "비밀번호", "كلمة المرور", "סיסמה", "clave_secreta", "chaveDeApi",
		"pass\u200bword", "\ufeffpassword", "to\u00adken", "api\u2063key", "secre\ufe0ft", "pаsswоrd", "ｓｅｃｒｅｔ",
	} {
		if !redact.Key(name) {
			t.Errorf("Key(%q) = false", name)
		}
	}
	for _, name := range []string{
		"clave", "palabra_clave", "chave_primaria", "parola", "bypass_order", "compassOrder", "chosen_hash", "license_hash", "schlüssel",
		"größe", "наименование", "названиеПоля", "密码错误", "名前", "이름", "العنوان", "\u200bname", "naïve", "Übersicht", "mot", "passe",
	} {
		if redact.Key(name) {
			t.Errorf("Key(%q) = true", name)
		}
	}
}

func TestOnlyTheSecretOfACommandIsRemoved(t *testing.T) {
	for in, want := range map[string]string{
		"curl -sS -u bob:hunter2 https://example.com/a":  "curl -sS -u bob:[redacted] https://example.com/a",
		"curl -u a:b x; curl -u c:d y":                   "curl -u a:[redacted] x; curl -u c:[redacted] y",
		"mysql -u root -phunter2 -P 3306 shop":           "mysql -u root -p[redacted] -P 3306 shop",
		"mysql -u root -p shop":                          "mysql -u root -p shop",
		"<a><password>x</password><b>y</b></a>":          "<a><password>[redacted]</password><b>y</b></a>",
		"password: |\n  x\n  y\nname: z":                 "password: |\n  [redacted]\nname: z",
		"bot 1234567890:" + "AAE" + letters[:32] + " up": "bot 1234567890:[redacted] up",
	} {
		if got := redact.Text(in, 0); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
}
