package redact_test

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// hex and letters fill the shapes of tokens. No token of these tests is real. The source contains none as a whole,
// because code hosts reject texts of that shape.
const (
	hex     = "0123456789abcdef0123456789abcdef"
	letters = "Zq81xLm0Kk77Zq81xLm0Kk77Zq81xLm0Kk77Zq81xLm0Kk77"
)

// secretText is a text with a part that must be hidden.
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

	"yaml block":      {"user: bob\npassword: |\n  hunter2\n  hunter3\nname: x", "hunter"},
	"yaml folded":     {"password: >-\n\n  hunter2\n", "hunter2"},
	"yaml deeper":     {"a:\n  - api_key: |2 # the key\n      hunter2\n    name: x", "hunter2"},
	"yaml next line":  {"password:\n  hunter2\nname: x", "hunter2"},
	"yaml escaped":    {`"password: |\n  hunter2\n"`, "hunter2"},
	"yaml crlf":       {"password: |\r\n  hunter2\r\nname: x", "hunter2"},
	"yaml tab":        {"\tpassword: |\n\t\thunter2", "hunter2"},
	"curl":            {"curl -u bob:hunter2 https://example.com", "hunter2"},
	"curl quoted":     {`curl -sS -u "bob:hunter 2" https://example.com`, "hunter"},
	"curl long":       {"curl --user=bob:hunter2 https://example.com", "hunter2"},
	"curl proxy":      {"/usr/bin/curl https://x -L --proxy-user 'bob:hunter2'", "hunter2"},
	"curl joined":     {"curl -sSubob:hunter2 https://x", "hunter2"},
	"curl on lines":   {"curl \\\n  -H 'Accept: */*' \\\n  -u bob:hunter2 \\\n  https://x", "hunter2"},
	"curl cut":        {`curl -u 'bob:hunter2`, "hunter2"},
	"curl of windows": {"curl.exe -u bob:hunter2", "hunter2"},
	"curl capital":    {`C:\bin\CURL.EXE -u bob:hunter2`, "hunter2"},
	"mysql":           {"mysql -u root -phunter2 shop", "hunter2"},
	"mysql quoted":    {"mysqldump -uroot -p'hunter 2' shop", "hunter"},
	"mariadb":         {"mariadb -h db -phunter2", "hunter2"},
	"redis":           {"redis-cli -h cache -a hunter2 ping", "hunter2"},
	"sshpass":         {"sshpass -p hunter2 ssh bob@example.com", "hunter2"},
	"docker":          {"docker login -u bob -p hunter2 registry.example.com", "hunter2"},
	"docker global":   {"docker --config /x login -u bob -phunter2", "hunter2"},
	"oc":              {"oc login https://x -u bob -p hunter2", "hunter2"},
	"oc token":        {"oc login --token hunter2 https://x", "hunter2"},
	"login password":  {"tool login -u bob -password hunter2 https://x", "hunter2"},
	"putty": {"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 2\nAAAA\nPrivate-Lines: " +
		"1\nhunter2\nPrivate-MAC: 00ff", "hunter2"},
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

// closed names the secrets that are recognized only with the text that follows them.
var closed = []string{"xml cdata", "xml nested", "url with at", "url with at last"}

func TestSecretIsRemovedInEveryContext(t *testing.T) {
	for name, c := range secrets {
		t.Run(name, func(t *testing.T) {
			texts := []string{c.text, "before\n" + c.text + "\nafter", "{\"a\": \"\n" + c.text}
			if !slices.Contains(closed, name) {
				ending := c.text[:strings.LastIndex(c.text, c.secret)+len(c.secret)]
				texts = append(texts, ending, "{\"a\": \"\n"+ending)
			}
			for _, text := range texts {
				if got := redact.Text(text, 0); strings.Contains(got, c.secret) || !strings.Contains(got, redact.Marker) {
					t.Errorf("Text(%q) = %q", text, got)
				}
			}
			checkJSON(t, map[string]any{"a": []any{c.text, map[string]string{c.text: c.text}}}, c.secret, 0)
		})
	}
}

func TestForeignAndObfuscatedNames(t *testing.T) {
	for _, name := range []string{
		"contraseña", "CONTRASEÑA", "contrasenaUsuario", "passwort", "db_kennwort", "motDePasse", "mot_de_passe",
		"senha", "wachtwoord",
		"hasło", "şifre", "пароль", "密码", "密碼", "パスワード", "비밀번호", "كلمة المرور", "סיסמה", "clave_secreta", "chaveDeApi",
		"pass\u200bword", "\ufeffpassword", "to\u00adken", "api\u2063key", "secre\ufe0ft", "pаsswоrd", "ｓｅｃｒｅｔ",
	} {
		assert.Truef(t, redact.Key(name), "Key(%q) = false", name)
	}
	for _, name := range []string{
		"clave", "palabra_clave", "chave_primaria", "parola", "bypass_order", "compassOrder", "chosen_hash",
		"license_hash", "schlüssel",
		"größe", "наименование", "названиеПоля", "密码错误", "名前", "이름", "العنوان", "\u200bname", "naïve",
		"Übersicht", "mot", "passe",
	} {
		assert.Truef(t, !redact.Key(name), "Key(%q) = true", name)
	}
}

func TestOnlySecretOfCommandIsRemoved(t *testing.T) {
	for in, want := range map[string]string{
		"curl -sS -u bob:hunter2 https://example.com/a":  "curl -sS -u bob:[redacted] https://example.com/a",
		"curl -u a:b x; curl -u c:d y":                   "curl -u a:[redacted] x; curl -u c:[redacted] y",
		"mysql -u root -phunter2 -P 3306 shop":           "mysql -u root -p[redacted] -P 3306 shop",
		"mysql -u root -p shop":                          "mysql -u root -p shop",
		"<a><password>x</password><b>y</b></a>":          "<a><password>[redacted]</password><b>y</b></a>",
		"password: |\n  x\n  y\nname: z":                 "password: |\n  [redacted]\nname: z",
		"bot 1234567890:" + "AAE" + letters[:32] + " up": "bot 1234567890:[redacted] up",
	} {
		assert.Equal(t, want, redact.Text(in, 0), in)
	}
}

// ordinary has texts written by the product and by other programs.
var ordinary = []string{
	`{"execution":"ex_01JDKX3V8Q0M6ZC7R2N4T9B5WY","lane":"support/berlin","step":"fetch-invoice","attempt":2,"status":"completed"}`,
	`{"heartbeat":"hb_01JDKX3V8Q0M6ZC7R2N4T9B5WY","operate":"op_01JDKX3V8Q0M6ZC7R2N4T9B5WY","channel":"ch_01JDKX3V8Q0M6ZC7R2N4T9B5WY"}`,
	`{"model":"gpt-4o-mini-2024-07-18","usage":{"prompt_tokens":812,"completion_tokens":12,"total_tokens":824},"finish_reason":"stop"}`,
	`{"idempotency_key":"order-17-2026-11-25","dedupe_key":"wh_01JDKX3V8Q0M6ZC7R2N4T9B5WY:3","fencing_token":7}`,
	"models claude-3-5-sonnet-20241022, gpt-4.1-nano, o3-mini, gemini-2.0-flash-001, llama-3.3-70b-versatile, mistral-large-2411",
	"lanes default, support/berlin, task-runner-eu-west-1, risk-assessment, desk-7, disk_cleanup, ask:web, skills",
	"version v1.2.3-rc.1+build.20261125, v8.30.1, 2.0.0-alpha.1, go1.26.0, PostgreSQL 17.2 (Debian 17.2-1.pgdg120+1)",
	"at 2026-11-25T02:49:48.123456Z, 2026-11-25 02:49:48+00, Wed, 25 Nov 2026 02:49:48 GMT, 1764038988, took 12.5ms",
	"GET https://example.com/v1/invoices/17?expand=lines&page=2#top and http://localhost:8080/lanes/support%2Fberlin",
	"postgres://bob@db.internal:5432/shop?sslmode=verify-full&application_name=agent",
	"select id, payload from agent.executions where lane = $1 and status in ('running', 'waiting') order by created_at limit 50 for update skip locked",
	"create table t (id bigint primary key, key text not null, value jsonb, expires_at timestamptz default now() + interval '1 day');",
	"ERROR: duplicate key value violates unique constraint \"executions_pkey\" (SQLSTATE 23505): Key (id)=(ex_17) already exists.",
	`connect to "db:5432": dial tcp 10.0.0.7:5432: connect: connection refused (is the database up?)`,
	"goroutine 17 [running]:\nmain.(*server).handle(0xc0001234, {0x7f, 0x10})\n\t/src/cmd/agent/main.go:42 +0x1d\ncreated by net/http.(*Server).Serve in goroutine 1",
	"sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 registry.example.com/agent@sha256:4b1d",
	"traceparent 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
	"00000000-0000-4000-8000-000000000000 and urn:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
	"The task asks whether the basket is risk-free; the disk is full. See the docs: section 3, \"Keys and values\".",
	"Please pass the exam. The author, a secretary, passed the compass to a passenger on the second session of 2026.",
	"run `agent lanes list --limit 20` or `docker run -u 1000:1000 -p 80:80 nginx`, then `ssh -p 22 bob@example.com`",
	"mysql -u root -p shop; psql -U postgres -h db -p 5432; zip -r out.zip docs; curl -sS -o out.json https://example.com/u:v",
	"<ul><li>Name</li><li>Value</li></ul> <session/> usage: login <user> <password> [options]",
	"name: bob\nlanes:\n  - support\ndescription: |\n  two lines\n  of text\nkey: value\n",
	"Der Schlüssel liegt unter der Matte. Größe: 12 cm, Öffnungszeiten: 9–17 Uhr. Das Passwort ist abgelaufen.",
	"La palabra clave: ventas. La clave primaria: id. El niño pasó: todo bien. Olvidé mi contraseña.",
	"Le mot du jour : bonjour. Il passe : voilà. L'heure : 12 h. J'ai oublié mon mot de passe.",
	"A chave primária: id. La parola del giorno: ciao. Een sleutel: rood.",
	"Ключ от дома: под ковриком. Время: 12:00. Название: отчёт. Неверный пароль пользователя",
	"请不要把密码告诉别人。时间：12:00。名称：报告。密码错误：用户不存在",
	"パスワードを忘れました。時間：12:00。名前：レポート",
	"비밀번호를 잊었습니다. 시간: 12:00. 이름: 보고서",
	"👩\u200d👩\u200d👧 family, می\u200cخواهم, Auf\u00adlage, שלום\u200f, क्\u200dष",
}

func TestOrdinaryTextIsKept(t *testing.T) {
	texts := append([]string{string(debug.Stack())}, ordinary...)
	for _, text := range texts {
		assert.NoDiff(t, text, redact.Text(text, 1<<20))
		var got string
		err := json.Unmarshal(redact.JSON(map[string]string{"a": text}, 1<<20)[len(`{"a":`):], &got)
		assert.Truef(t, err != nil || got == text, "JSON: got %q", got)
	}
}

// Ids and hashes have random letters. Now and then they contain a prefix of a token.
func TestIdsAndHashesAreKept(t *testing.T) {
	random := rand.New(rand.NewChaCha8([32]byte{24}))
	bytes := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	prefixes := []string{
		"", "hb_", "op_", "ch_", "wh_", "ex_", "id-", "api-", "vol-", "sha256:", "task/", "etag:", "v1.", "#", "commit ",
		"linear ", "heroku: ",
	}
	for range 3000 {
		b := bytes(64)
		var id ulid.ULID
		copy(id[:], b)
		for _, one := range []string{
			id.String(), strings.ToLower(id.String()), fmt.Sprint(random.Uint64()),
			fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16]), fmt.Sprintf("%x", b[:16]),
			fmt.Sprintf("%x", md5.Sum(b)), fmt.Sprintf("%x", sha1.Sum(b)), fmt.Sprintf("%x", sha256.Sum256(b)),
			fmt.Sprintf("%X", sha256.Sum256(b)), fmt.Sprintf("%x", sha512.Sum512(b)), base64.StdEncoding.EncodeToString(b[:32]),
		} {
			text := prefixes[random.IntN(len(prefixes))] + one
			assert.Equal(t, text, redact.Text(text, 0))
		}
	}
}

// An image has long runs of zeros and of random bytes.
func TestPicturesInBase64AreKept(t *testing.T) {
	random := rand.New(rand.NewChaCha8([32]byte{7}))
	for range 20 {
		picture := make([]byte, 60<<10)
		for i := range picture {
			if i/100%3 > 0 {
				picture[i] = byte(random.Uint32() >> (random.Uint32() % 9))
			}
		}
		text := "data:image/png;base64," + base64.StdEncoding.EncodeToString(picture)
		if got := redact.Text(text, 1<<20); got != text {
			at := strings.Index(got, redact.Marker)
			t.Errorf("%.60s… became %s", text[max(0, at-20):], got[max(0, at-20):at+20])
		}
	}
	for _, chance := range []string{"AKIA", "EAAC", "4b1d", "cmVmd", "AKCp", "EZAK", "dapi", "GR1348941"} {
		text := strings.Repeat("Zm9vYmFy", 10) + "/" + chance + strings.Repeat("abcdef0123456789", 20) + "/" +
			strings.Repeat("Zm9v", 9)
		assert.Equal(t, text, redact.Text(text, 1<<20), chance)
	}
}

// seeded are secrets with their context. %s in a place stands for one of them.
var seeded = []secretText{
	{"Bearer Zq81xLm0Kk77", "Zq81xLm0Kk77"},
	{"sk-Zq81xLm0Kk77aa", "Zq81xLm0Kk77"},
	{"ghp_Zq81xLm0Kk77Zq81xLm0", "Zq81xLm0Kk77"},
	{"xoxb-Zq81xLm0Kk77", "Zq81xLm0Kk77"},
	{"whsec_Zq81xLm0Kk77", "Zq81xLm0Kk77"},
	{"postgres://u:Zq81xLm0Kk77@h/db", "Zq81xLm0Kk77"},
	{"https://u:Zq81xLm0Kk77@h/db", "Zq81xLm0Kk77"},
	{"password=Zq81xLm0Kk77", "Zq81xLm0Kk77"},
	{"Authorization: Digest Zq81xLm0Kk77", "Zq81xLm0Kk77"},
	{`{"api_key": "Zq81xLm0Kk77"}`, "Zq81xLm0Kk77"},
	{`{"a": [{"client_secret": ["Zq81xLm0Kk77"]}]}`, "Zq81xLm0Kk77"},
	{"-----BEGIN PRIVATE KEY-----\nZq81xLm0Kk77\n-----END PRIVATE KEY-----", "Zq81xLm0Kk77"},
}

// allSeeded returns the secrets of seeded and of all tests, in a fixed order.
func allSeeded() []secretText {
	all := slices.Clone(seeded)
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		all = append(all, secrets[name])
	}
	return all
}

// No secret remains, in any context, at any depth, and with any cut.
func FuzzNoSecretSurvives(f *testing.F) {
	all := allSeeded()
	for i := range all {
		f.Add("before ", " after", "name", uint8(i), uint8(2), uint16(100))
		f.Add("", "", "", uint8(i), uint8(0), uint16(4000))
		f.Add(`{"a":"`, `"}`, "sk-x", uint8(i), uint8(5), uint16(64))
	}
	f.Fuzz(func(t *testing.T, before, after, name string, which, depth uint8, limit uint16) {
		s := all[int(which)%len(all)]
		if strings.Contains(before+after+name, s.secret) {
			t.Skip("the secret stands elsewhere too")
		}
		text := before + "\n" + s.text + "\n" + after
		checkText(t, text, s.secret, int(limit))

		var tree any = text
		for d := range depth % 12 {
			switch d % 3 {
			case 0:
				tree = map[string]any{name: tree, "b": 1}
			case 1:
				tree = []any{tree, name}
			default:
				if b, err := json.Marshal(tree); err == nil && len(b) < 1<<14 {
					tree = string(b)
				}
			}
		}
		checkJSON(t, tree, s.secret, int(limit))
		checkJSON(t, map[string]any{text: tree}, s.secret, int(limit))
	})
}

// Any text and any JSON gives valid output within the limit. A second scrub changes nothing.
func FuzzStable(f *testing.F) {
	for _, s := range []string{
		"", "{}", `{"password":1}`, "password=…[cut 5 bytes]", "password=[redac", "Authorization: …[cut 1 bytes]",
		`{"a":"{\"token\":\"x\"}"}`,
		"\x00\xff", "password: {[", `\"secret\":\"`, `"`, `{"tokens":["`, "--token", "key: x", `"auth":[1,"a"]`,
		"Cookie: [redacted] x", `{"\u0000":1e99999}`,
		"password: |\n", "password:\n  x", "a: |\n  password: >\n    x", "<password>x", "<password>x</password>", "<token/>",
		"curl -u a:b", "curl -u 'a:", "mysql -p'",
		"密码：x", "пароль: x", "pass\u200bword: x", "ghp_\u200b0123456789", "Private-Lines: 1", "\u00ad\u00ad=",
		"mot de passe : x", "--密码 x", "a.bcdefg.h", ":AA",
	} {
		f.Add(s, uint16(64))
		f.Add(s, uint16(1000))
		f.Add(strings.Repeat(s, 200), uint16(100))
	}
	f.Add("pAssword=\xe2\x80"+strings.Repeat("0", 300), uint16(1000)) // a name that is secret only after it is shortened
	f.Fuzz(func(t *testing.T, s string, limit uint16) {
		checkText(t, s, "", int(limit))
		checkJSON(t, s, "", int(limit))
		checkJSON(t, json.RawMessage(s), "", int(limit))
		checkJSON(t, map[string]any{s: []any{s, map[string]any{"x": s}}}, "", int(limit))
	})
}

func checkText(t *testing.T, s, secret string, limit int) {
	t.Helper()
	got := redact.Text(s, limit)
	assert.Truef(t, secret == "" || !strings.Contains(got, secret), "Text(%q) = %q shows %s", s, got, secret)
	assert.Truef(t, len(got) <= effective(limit) && utf8.ValidString(got) && !strings.Contains(got, "\x00"),
		"Text(%q, %d) = %q", s, limit, got)
	assert.Equal(t, got, redact.Text(got, limit))
}

func checkJSON(t *testing.T, v any, secret string, limit int) {
	t.Helper()
	got := redact.JSON(v, limit)
	assert.Truef(t, secret == "" || !strings.Contains(string(got), secret), "JSON(%q) = %s shows %s", v, got, secret)
	assert.Truef(t, len(got) <= effective(limit) && json.Valid(got) && utf8.Valid(got) &&
		!strings.Contains(string(got), "\x00"), "JSON(%q, %d) = %d bytes: %s", v, limit, len(got), got)
	again := redact.JSON(got, limit)
	assert.Truef(t, string(again) == string(got), "JSON(%s) again = %s", got, again)
}

func effective(limit int) int {
	if limit <= 0 {
		return redact.DefaultLimit
	}
	return max(limit, redact.MinLimit)
}
