package redact_test

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
)

// pieces are what a rule begins, joins or ends with.
var pieces = []string{
	"password", "token", "key", "a", "x1", "пароль", "密码", "mot de passe", "Authorization", "tokens", "auth", "=", ":", "：", "->", "--", "-", " ",
	"\n", "\t", "  ", "|", ">", "\"", "'", "`", "\\", "\\n", "\\\"", "{", "}", "[", "]", "<", ">", "</", "/>", "<password>", "</password>", "<auth>",
	"://", "postgres://", "https://", "@", "/", "?", "&", "?key=", "&sig=", "curl ", "-u ", "a:b", "mysql ", "-p", "Bearer ", "Basic ", "eyJabcdef.",
	"ghp_", "sk-", "abcdefghij", "0123456789", "0123456789abcdef0123456789abcdef", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----",
	"Private-Lines: 1", "Private-MAC: 00", "\u200b", "\u00ad", "\u0301", "é", "\u00a0", "[redacted]", "[redac", "…[cut 5 bytes]", ",", ";", ".", "#",
	"true", "null", "1", "\x00", "\xff", "name", "value",
}

// Texts of such pieces come through twice as they come through once, and hide what they hide alone.
func TestPiecesInAnyOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(8, 24))
	some := func(most int) string {
		var b strings.Builder
		for range random.IntN(most) {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		return b.String()
	}
	all := allSeeded()
	for range 4000 {
		limit := []int{64, 200, 1000, 0}[random.IntN(4)]
		text := some(20)
		checkText(t, text, "", limit)
		checkJSON(t, map[string]any{text: []any{text, some(4)}, some(3): some(6), "name": some(3), "value": some(3)}, "", limit)
		s := all[random.IntN(len(all))]
		around := some(10) + "\n" + s.text + "\n" + some(10)
		if strings.Count(around, s.secret) == strings.Count(s.text, s.secret) {
			checkText(t, around, s.secret, limit)
			if b, err := json.Marshal(around); err == nil {
				checkText(t, "said "+string(b), "", limit)
			}
		}
		if t.Failed() {
			return
		}
	}
}
