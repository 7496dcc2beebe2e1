package redact_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

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
