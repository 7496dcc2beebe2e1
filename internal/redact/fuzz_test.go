package redact_test

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// seeded are secrets with their telling context; %s in a place means one of them.
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

// allSeeded are those and all of the tests, in one order.
func allSeeded() []secretText {
	all := slices.Clone(seeded)
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		all = append(all, secrets[name])
	}
	return all
}

// No secret survives, whatever stands around it, however deep it is and wherever the cut falls.
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

// Any text and any JSON gives valid output within the limit, and twice is the same as once.
func FuzzStable(f *testing.F) {
	for _, s := range []string{
		"", "{}", `{"password":1}`, "password=…[cut 5 bytes]", "password=[redac", "Authorization: …[cut 1 bytes]", `{"a":"{\"token\":\"x\"}"}`,
		"\x00\xff", "password: {[", `\"secret\":\"`, `"`, `{"tokens":["`, "--token", "key: x", `"auth":[1,"a"]`, "Cookie: [redacted] x", `{"\u0000":1e99999}`,
		"password: |\n", "password:\n  x", "a: |\n  password: >\n    x", "<password>x", "<password>x</password>", "<token/>", "curl -u a:b", "curl -u 'a:", "mysql -p'",
		"密码：x", "пароль: x", "pass\u200bword: x", "ghp_\u200b0123456789", "Private-Lines: 1", "\u00ad\u00ad=", "mot de passe : x", "--密码 x", "a.bcdefg.h", ":AA",
	} {
		f.Add(s, uint16(64))
		f.Add(s, uint16(1000))
		f.Add(strings.Repeat(s, 200), uint16(100))
	}
	f.Add("pAssword=\xe2\x80"+strings.Repeat("0", 300), uint16(1000)) // a name that is secret only when it is made shorter
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
	if secret != "" && strings.Contains(got, secret) {
		t.Errorf("Text(%q) = %q shows %s", s, got, secret)
	}
	if len(got) > effective(limit) || !utf8.ValidString(got) || strings.Contains(got, "\x00") {
		t.Errorf("Text(%q, %d) = %q", s, limit, got)
	}
	if again := redact.Text(got, limit); again != got {
		t.Errorf("Text(%q) again = %q", got, again)
	}
}

func checkJSON(t *testing.T, v any, secret string, limit int) {
	t.Helper()
	got := redact.JSON(v, limit)
	if secret != "" && strings.Contains(string(got), secret) {
		t.Errorf("JSON(%q) = %s shows %s", v, got, secret)
	}
	if len(got) > effective(limit) || !json.Valid(got) || !utf8.Valid(got) || strings.Contains(string(got), "\x00") {
		t.Errorf("JSON(%q, %d) = %d bytes: %s", v, limit, len(got), got)
	}
	if again := redact.JSON(got, limit); string(again) != string(got) {
		t.Errorf("JSON(%s) again = %s", got, again)
	}
}

func effective(limit int) int {
	if limit <= 0 {
		return redact.DefaultLimit
	}
	return max(limit, redact.MinLimit)
}
