package redact_test

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// ordinary is what the product itself and the programs around it write.
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
		if diff := cmp.Diff(text, redact.Text(text, 1<<20)); diff != "" {
			t.Errorf("text is changed (-want +got):\n%s", diff)
		}
		var got string
		if err := json.Unmarshal(redact.JSON(map[string]string{"a": text}, 1<<20)[len(`{"a":`):], &got); err == nil && got != text {
			t.Errorf("JSON: got %q", got)
		}
	}
}

// Ids and hashes have random letters, in which a prefix of a token occurs now and then.
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
			if got := redact.Text(text, 0); got != text {
				t.Errorf("Text(%q) = %q", text, got)
			}
		}
	}
}

// A picture has long runs of zeros and of random bytes.
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
		text := strings.Repeat("Zm9vYmFy", 10) + "/" + chance + strings.Repeat("abcdef0123456789", 20) + "/" + strings.Repeat("Zm9v", 9)
		if got := redact.Text(text, 1<<20); got != text {
			t.Errorf("%s: %s", chance, got)
		}
	}
}
