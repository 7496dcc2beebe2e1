package redact_test

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const jwt = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.s5GmHq1wCkzTlUS0S9xyPg"

func TestJSONByName(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"password":     {`{"password":"x"}`, `{"password":"[redacted]"}`},
		"number":       {`{"passcode":1234}`, `{"passcode":"[redacted]"}`},
		"object":       {`{"credentials":{"u":"a"}}`, `{"credentials":"[redacted]"}`},
		"array":        {`{"cookies":["a=b"]}`, `{"cookies":"[redacted]"}`},
		"deep":         {`[[{"a":{"api_key":"x"}}]]`, `[[{"a":{"api_key":"[redacted]"}}]]`},
		"says nothing": {`{"password":"","secret":null,"token":true}`, `{"password":"","secret":null,"token":true}`},
		"counts": {
			`{"token_usage":{"prompt_tokens":3,"total_tokens":9},"max_tokens":5,"fencing_token":7}`,
			`{"fencing_token":7,"max_tokens":5,"token_usage":{"prompt_tokens":3,"total_tokens":9}}`,
		},
		"tokens counted": {`{"tokens":512}`, `{"tokens":512}`},
		"tokens held":    {`{"tokens":["abc"]}`, `{"tokens":"[redacted]"}`},
		"auth looked in": {`{"auth":{"user":"u","password":"p"}}`, `{"auth":{"password":"[redacted]","user":"u"}}`},
		"json in string": {
			`{"body":"{\"a\":[{\"client_secret\":\"x\"}]}"}`,
			`{"body":"{\"a\":[{\"client_secret\":\"[redacted]\"}]}"}`,
		},
		"twice in string": {`{"b":"\"{\\\"pwd\\\":\\\"x\\\"}\""}`, `{"b":"\"{\\\"pwd\\\":\\\"[redacted]\\\"}\""}`},
		"kept as written": {`{"body":"{ \"b\": 1, \"a\": 2 }"}`, `{"body":"{ \"b\": 1, \"a\": 2 }"}`},
		"names":           {`{"sk-abcdefghijkl":1,"sk-mnopqrstuvwx":2}`, `{"[redacted]":1,"[redacted] 2":2}`},
		"name and value": {
			`{"env":[{"name":"PGPASSWORD","value":"x"},{"name":"PGHOST","value":"db"}]}`,
			`{"env":[{"name":"PGPASSWORD","value":"[redacted]"},{"name":"PGHOST","value":"db"}]}`,
		},
		"key and value": {`{"Key":"api_key","Value":"x"}`, `{"Key":"api_key","Value":"[redacted]"}`},
		"counted value": {`{"name":"tokens","value":512}`, `{"name":"tokens","value":512}`},
		"flags": {
			`["psql","--password","x","-h","db","--token=y","--token"]`,
			`["psql","--password","[redacted]","-h","db","--token=[redacted]","--token"]`,
		},
		"curl":            {`["/usr/bin/curl","-sSu","bob:x","https://a"]`, `["/usr/bin/curl","-sSu","bob:[redacted]","https://a"]`},
		"mysql":           {`["mysql","-px","-p","shop",1]`, `["mysql","-p[redacted]","-p","shop",1]`},
		"sudo":            {`["sudo","-u","mysql","mysql","-px","shop"]`, `["sudo","-u","mysql","mysql","-p[redacted]","shop"]`},
		"env":             {`["env","A=1","timeout","5","curl","-u","a:b"]`, `["env","A=1","timeout","5","curl","-u","a:[redacted]"]`},
		"sqlcmd":          {`["SQLCMD.EXE","-P","x"]`, `["SQLCMD.EXE","-P","[redacted]"]`},
		"docker":          {`["docker","login","-p","x"]`, `["docker","login","-p","[redacted]"]`},
		"docker, glued":   {`["docker","login","-phunter"]`, `["docker","login","-p[redacted]"]`},
		"another flag":    {`["vault","login","-path=gh","-print"]`, `["vault","login","-path=gh","-print"]`},
		"sshpass":         {`["sshpass","-passw0rd","ssh"]`, `["sshpass","-p[redacted]","ssh"]`},
		"helm":            {`["helm","registry","login","-p","x"]`, `["helm","registry","login","-p","[redacted]"]`},
		"cut beside more": {`"key='…[cut 5 bytes] password=x"`, `"key='…[cut 5 bytes] password=[redacted]"`},
		"list in prose":   {`["- password","x","-","--","y"]`, `["- password","x","-","--","y"]`},
		"whole string":    {`"Bearer abcdef123"`, `"Bearer [redacted]"`},
	} {
		t.Run(name, func(t *testing.T) {
			assert.NoDiff(t, c.want, string(redact.JSON(json.RawMessage(c.in), 0)))
		})
	}
}

func TestKey(t *testing.T) {
	for _, name := range []string{
		"password", "Password", "PASSWD", "db_password", "passphrase", "secret", "clientSecret", "client-secret",
		"token", "accessToken",
		"access_token", "refresh-token", "id_token", "X-Auth-Token", "csrftoken", "api_key", "apikey", "apiKey",
		"API-Key", "x-api-key",
		"OPENAI_API_KEY", "Authorization", "proxy-authorization", "Cookie", "Set-Cookie", "private_key", "privateKey",
		"aws_secret_access_key",
		"access_key", "session", "session_id", "dsn", "SENTRY_DSN", "database_url", "DATABASE_URL",
		"AGENT_ADMIN_TOKEN", "AGENT_CHAT_KEY",
		"PGPASSWORD", "credentials", "otp", "pwd", "signing_key", "connectionString", "my.api.key", "api key", "jwt",
	} {
		assert.Truef(t, redact.Key(name), "Key(%q) = false", name)
	}
	for _, name := range []string{
		"", "token_usage", "prompt_tokens", "completion_tokens", "total_tokens", "max_tokens", "maxTokens",
		"token_count", "fencing_token",
		"fencingToken", "token_type", "input_tokens", "key", "keys", "primary_key", "foreign_key", "dedupe_key",
		"waiting_key", "author", "authority",
		"secretary", "passenger", "passed", "compass", "tokenizer", "lane", "url", "keyboard", "assessment",
		"sessions_total", "idempotency_key",
	} {
		assert.Truef(t, !redact.Key(name), "Key(%q) = true", name)
	}
}

func TestTextByShape(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"bearer":         {"sent Bearer abc.def-123 to it", "sent Bearer [redacted] to it"},
		"header":         {"Authorization: Basic dXNlcjpwYXNz\nHost: a", "Authorization: [redacted]\nHost: a"},
		"basic":          {"with Basic dXNlcjpwYXNz.", "with Basic [redacted]."},
		"basic in prose": {"Basic authentication is off", "Basic authentication is off"},
		"openai": {
			"Incorrect API key provided: sk-proj-abcDEF1234567890.", "Incorrect API key provided: [redacted].",
		},
		"stripe":         {"sk_live_abcdefgh1234", "[redacted]"},
		"github":         {"ghp_abcdefghijklmnop1234, github_pat_11ABCDEFG0123456", "[redacted], [redacted]"},
		"slack":          {"xoxb-123456789012-abc", "[redacted]"},
		"aws":            {"id AKIAIOSFODNN7EXAMPLE.", "id [redacted]."},
		"jwt":            {"got " + jwt + "!", "got [redacted]!"},
		"pem":            {"a\n-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nb", "a\n[redacted]\nb"},
		"pem cut off":    {"-----BEGIN PRIVATE KEY-----\nMIIE", "[redacted]"},
		"webhook secret": {"whsec_MfKQ9r8GKYqrTwjU", "[redacted]"},
		"join token": {
			"Join: https://h/chat#join=join_a1OITQ-IQxAP1am0hopscywGy-Fhs_mZ9R009ohjJFk, please",
			"Join: https://h/chat#join=[redacted], please",
		},
		"visitor token":  {"vis_AL7lpmnURdkBkIt9D6aOdAyYdYxRGsVmL4xRObSmdgE", "[redacted]"},
		"a capital late": {"join_a1oitq-iqxap1am0hopscywgy-fhs_mZ9R009ohjJ-k.", "[redacted]."},
		"a name": {
			"join_orders_and_their_items_for_the_report_of_may", "join_orders_and_their_items_for_the_report_of_may",
		},
		"dsn": {
			"connect postgres://bob:p@ss/w:rd@db:5432/x?sslmode=off",
			"connect postgres://bob:[redacted]@db:5432/x?sslmode=off",
		},
		"url":             {"https://bob:hunter2@example.com/a", "https://bob:[redacted]@example.com/a"},
		"url no password": {"postgres://bob@db:5432/x", "postgres://bob@db:5432/x"},
		"url with port":   {"http://localhost:8080/a@b", "http://localhost:8080/a@b"},
		"query":           {"GET https://a/b?x=1&access_token=abc&y=2", "GET https://a/b?x=1&access_token=[redacted]&y=2"},
		"signed":          {"https://a/b?sig=abcdefgh123&y=2", "https://a/b?sig=[redacted]&y=2"},
		"key words":       {"host=db user=bob password=hunter2 dbname=x", "host=db user=bob password=[redacted] dbname=x"},
		"quoted":          {`password='hunter 2' x`, `password='[redacted]' x`},
		"broken json":     {`{"password":"hun\"ter2","a":`, `{"password":"[redacted]","a":`},
		"cut json":        {`{"a":1,"client_secret":"hunt`, `{"a":1,"client_secret":"[redacted]`},
		"escaped json":    {`x {\"password\":\"hunter2\",\"a\":1}`, `x {\"password\":\"[redacted]\",\"a\":1}`},
		"object in text":  {`x "credentials":{"a":"b"} y`, `x "credentials":[redacted] y`},
		"inside another":  {"url=https://x/?token=abc", "url=https://x/?token=[redacted]"},
		"flag":            {"psql --password hunter2 -x", "psql --password [redacted] -x"},
		"prose key":       {"API key: abc", "API key: [redacted]"},
		"cookie":          {"Set-Cookie: a=b; Path=/; HttpOnly", "Set-Cookie: [redacted]"},
		"yaml":            {"user: bob\npassword: hunter2\nname: x", "user: bob\npassword: [redacted]\nname: x"},
		"counts":          {"max_tokens=100 fencing_token: 5 tokens: 512", "max_tokens=100 fencing_token: 5 tokens: 512"},
		"prose": {
			"lane heartbeat: busy, held by e1#2 (password authentication failed)",
			"lane heartbeat: busy, held by e1#2 (password authentication failed)",
		},
		"marker then more": {"password=[redacted]hunter2", "password=[redacted]"},
		"nul in a name":    {"pass\x00word=hunter2", "password=[redacted]"},
		"not utf-8":        {"a\xff\xfeb", "a\uFFFDb"},
		"empty":            {"", ""},
		"spaces":           {"  ", "  "},
	} {
		t.Run(name, func(t *testing.T) {
			assert.NoDiff(t, c.want, redact.Text(c.in, 0))
		})
	}
}

func TestNumbersKeepAllDigits(t *testing.T) {
	in := `{"a":12345678901234567890,"b":0.10,"c":1e400,"d":-0}`
	assert.NoDiff(t, in, string(redact.JSON(json.RawMessage(in), 0)))
	for name, n := range map[string]string{"long": strings.Repeat("9", 5000), "exponent": "1e999999"} {
		t.Run(name, func(t *testing.T) {
			got := redact.JSON(json.RawMessage(n), 1<<20)
			assert.Truef(t, string(got) == `"`+n+`"`, "%.40s is kept as a number, which jsonb refuses", got)
		})
	}
}

func TestNULIsRemovedEverywhere(t *testing.T) {
	got := string(redact.JSON(map[string]any{"a\x00b": "c\x00d", "e": "\xff"}, 0))
	assert.Equal(t, `{"ab":"cd","e":"`+"\uFFFD"+`"}`, got)
}

type panics struct{}

func (panics) MarshalJSON() ([]byte, error) { panic("sk-abcdefghijklmnop") }

func TestUnmarshallableValueIsDescribed(t *testing.T) {
	type loop struct{ Next *loop }
	circle := &loop{}
	circle.Next = circle
	for name, v := range map[string]any{
		"channel": make(chan int), "infinity": math.Inf(1), "function": func() {}, "circle": circle, "panic": panics{},
	} {
		t.Run(name, func(t *testing.T) {
			var got struct {
				Type  string `json:"_unstorable"`
				Error string `json:"_error"`
			}
			require.NoError(t, json.Unmarshal(redact.JSON(v, 0), &got))
			assert.Truef(t, got.Type == fmt.Sprintf("%T", v) && got.Error != "" && !strings.Contains(got.Error, "sk-a"),
				"got %+v", got)
		})
	}
}

func TestBytesAndEmptyValues(t *testing.T) {
	for name, c := range map[string]struct {
		in   any
		want string
	}{
		"bytes of json": {[]byte(`{"token":"x"}`), `{"token":"[redacted]"}`},
		"bytes of text": {[]byte("token=x"), `"token=[redacted]"`},
		"bad raw json":  {json.RawMessage(`{"token":"x"`), `"{\"token\":\"[redacted]\""`},
		"nil":           {nil, `null`},
		"nil raw":       {json.RawMessage(nil), `null`},
		"empty raw":     {json.RawMessage{}, `""`},
		"html":          {"<a&b>", `"<a&b>"`},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, c.want, string(redact.JSON(c.in, 0)))
		})
	}
}

func TestLongStringsAreCutFirst(t *testing.T) {
	got := redact.JSON(map[string]any{"status": 200, "body": strings.Repeat("é", 5000)}, 1000)
	var out struct {
		Status int
		Body   string
	}
	require.NoError(t, json.Unmarshal(got, &out))
	kept, mark, _ := strings.Cut(out.Body, "…")
	if want := fmt.Sprintf("[cut %d bytes]", 10000-len(kept)); mark != want || out.Status != 200 || len(kept) < 300 {
		t.Errorf("kept %d bytes with mark %q, want %q", len(kept), mark, want)
	}
}

func TestOversizedValueBecomesPreview(t *testing.T) {
	got := redact.JSON(make([]int, 5000), 200)
	var out struct {
		Truncated bool   `json:"_truncated"`
		Bytes     int    `json:"_bytes"`
		Preview   string `json:"_preview"`
	}
	require.NoError(t, json.Unmarshal(got, &out))
	assert.Truef(t, out.Truncated && out.Bytes == 10001 && strings.HasPrefix(out.Preview, "[0,0,0") && len(got) <= 200,
		"got %s", got)
}

func TestSecretAcrossCutIsRemoved(t *testing.T) {
	for at := range 120 {
		s := strings.Repeat("x", at) + " password=hunter2hunter2hunter2 " + strings.Repeat("y", 200)
		for _, got := range []string{redact.Text(s, 100), string(redact.JSON(map[string]string{"a": s}, 100))} {
			require.Truef(t, !strings.Contains(got, "hunt"), "%d: %s", at, got)
		}
	}
}

func TestDeepAndLongValues(t *testing.T) {
	deep := strings.Repeat(`{"a":`, 5000) + `"password=hunter2"` + strings.Repeat("}", 5000)
	long := strings.Repeat("word ", 1<<19) + " password=hunter2"
	nested := `"sk-abcdefghijklmnop"`
	for range 12 {
		b, err := json.Marshal(nested)
		require.NoError(t, err)
		nested = string(b)
	}
	for name, in := range map[string]string{"deep": deep, "long": long, "nested strings": nested} {
		t.Run(name, func(t *testing.T) {
			got := redact.JSON(json.RawMessage(in), 4<<20)
			assert.Truef(t, json.Valid(got) && !strings.Contains(string(got), "hunter2") &&
				!strings.Contains(string(got), "sk-abc"), "got %d bytes: %.100s", len(got), got)
			text := redact.Text(in, 0)
			assert.Truef(t, len(text) <= redact.DefaultLimit && utf8.ValidString(text) && !strings.Contains(text, "hunter2"),
				"text: %.100s", text)
		})
	}
}

func BenchmarkJSON(b *testing.B) {
	v := map[string]any{
		"status": 200,
		"body":   strings.Repeat(`{"id": 17, "name": "caretaker", "url": "https://example.com/a?b=c"}, `, 100),
	}
	b.SetBytes(int64(len(redact.JSON(v, 1<<20))))
	for b.Loop() {
		redact.JSON(v, 1<<20)
	}
}

func TestKnownSecretIsHiddenAtAnyDepth(t *testing.T) {
	hide := strings.NewReplacer("s3cret", "[secret]").Replace
	got := redact.Known(map[string]any{
		"a s3cret key": 1.5, "list": []any{"the s3cret", nil, map[string]any{"deep": "s3crets3cret"}}, "true": true,
	}, hide)
	want := map[string]any{
		"a [secret] key": 1.5, "list": []any{"the [secret]", nil, map[string]any{"deep": "[secret][secret]"}}, "true": true,
	}
	assert.NoDiff(t, any(want), got)
}

// pieces are the starts, joints and ends of the rules' matches.
var pieces = []string{
	"password", "token", "key", "a", "x1", "пароль", "密码", "mot de passe", "Authorization", "tokens", "auth", "=", ":",
	"：", "->", "--", "-", " ",
	"\n", "\t", "  ", "|", ">", "\"", "'", "`", "\\", "\\n", "\\\"", "{", "}", "[", "]", "<", ">", "</", "/>",
	"<password>", "</password>", "<auth>",
	"://", "postgres://", "https://", "@", "/", "?", "&", "?key=", "&sig=", "curl ", "-u ", "a:b", "mysql ", "-p",
	"Bearer ", "Basic ", "eyJabcdef.",
	"ghp_", "sk-", "abcdefghij", "0123456789", "0123456789abcdef0123456789abcdef", "-----BEGIN PRIVATE KEY-----",
	"-----END PRIVATE KEY-----",
	"Private-Lines: 1", "Private-MAC: 00", "\u200b", "\u00ad", "\u0301", "é", "\u00a0", "[redacted]", "[redac",
	"…[cut 5 bytes]", ",", ";", ".", "#",
	"true", "null", "1", "\x00", "\xff", "name", "value",
}

// Scrubbing a text of such pieces twice equals scrubbing it once. It hides each secret that it hides alone.
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
		checkJSON(t, map[string]any{text: []any{text, some(4)}, some(3): some(6), "name": some(3), "value": some(3)}, "",
			limit)
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

// A text with many starts of secrets takes time in proportion to its length: about a fifth of a second each. A search
// from each start to the end would take minutes.
func TestTimeIsLinearInText(t *testing.T) {
	const size, most = 1 << 20, 20 * time.Second
	for _, beginning := range []string{
		"<password>", "x<secret></a>", "</password", "curl -u ", "curl ", "mysql -p ", "password: |\n", "password:\n",
		"key=", "é:", "密码:", "postgres://", "http://a:b@", "redis://x@", "-----BEGIN PRIVATE", "Private-Lines:",
		"a.bcdefg.", "eyJaaaaa.", "1234567:AA", "mot de passe ", "hvs.", "<auth>", "<password>…[cut ", "auth:{ ",
		"auth:| ", "auth:| # ", "MTE4NzY1" + "NDMyMTA5ODc2NTQz.G" + "abcde." + letters[:38] + " ",
	} {
		for _, end := range []string{"", " é</password></auth>\n"} { // many starts may have one end
			text := strings.Repeat(beginning, (size-len(end))/len(beginning)) + end
			started := time.Now()
			redact.Text(text, 1000)
			took := time.Since(started)
			assert.Truef(t, took <= most, "%d bytes of %q and %q took %s", len(text), beginning, end, took)
		}
	}
}

// typicalRow is an activity's input as the product writes it, of about 300 bytes.
const typicalRow = `{"execution":"ex_01JDKX3V8Q0M6ZC7R2N4T9B5WY","lane":"support/berlin","step":"fetch-invoice",` +
	`"attempt":2,"started_at":"2026-11-25T02:49:48.123456Z","url":"https://example.com/v1/invoices/17?expand=lines",` +
	`"status":200,"model":"gpt-4o-mini-2024-07-18","usage":{"prompt_tokens":812,"total_tokens":1024},` +
	`"note":"the invoice is due in 14 days"}`

func BenchmarkRow(b *testing.B) {
	row := json.RawMessage(typicalRow)
	b.SetBytes(int64(len(row)))
	for b.Loop() {
		redact.JSON(row, 0)
	}
}

func BenchmarkRow4KiB(b *testing.B) {
	row := json.RawMessage(`[` + strings.Repeat(typicalRow+",", 9) + typicalRow + `]`)
	b.SetBytes(int64(len(row)))
	for b.Loop() {
		redact.JSON(row, 0)
	}
}

func BenchmarkText64KiB(b *testing.B) {
	const line = "2026-11-25T02:49:48Z INFO execution completed id=ex_01JDKX3V8Q0M6ZC7R2N4T9B5WY " +
		"lane=support/berlin attempt=1 took=12ms: the task was risk-free\n"
	text := strings.Repeat(line, 64<<10/len(line)+1)[:64<<10]
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		redact.Text(text, 1<<20)
	}
}
