package sse_test

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/sse"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

// texts are inputs that have broken other writers.
var texts = []string{
	"", " ", "a", " a: b ", "a\nb", "a\r\nb", "a\rb", "\n", "\r\n\r\n", "\r", "a\n\nevent: done\ndata: {}\n\n",
	"\nid: 7\nretry: 1", ": a",
	"\rdata: x\r\r", "\x00", "a\x00b", "\xff\xfe", "a\xc3\n", "\xed\xa0\x80", "\ufeff", "\ufeffdata: x",
	"\u2028\u2029\u0085\v\f",
	"日本 🎉 👨‍👩‍👧", "[DONE]", strings.Repeat("x", 5000), strings.Repeat("a\r\n", 500),
}

func TestAppend(t *testing.T) {
	for want, e := range map[string]sse.Event{
		"data: \n\n":                     {},
		"data: {}\n\n":                   {Data: "{}"},
		"event: a\ndata: b\ndata: c\n\n": {Name: "a", Data: "b\r\nc"},
		"retry: 1500\nid: 1 2\nevent: a b\ndata: \ufffd\n\n": {
			ID: "1\n2", Name: "a\rb", Data: "\xff",
			Retry: 1500 * time.Millisecond,
		},
	} {
		assert.Equal(t, want, string(e.Append(nil)), e)
	}
	assert.Equal(t, ": a\n: b\n\nretry: 1000\n\n", string(sse.Retry(sse.Comment(nil, "a\nb"), time.Second)))
}

func TestLongEvent(t *testing.T) {
	long := strings.Repeat("text\n", 1<<20)
	got := ssetest.Read(string(sse.Event{Name: "part", Data: long}.Append(nil)))
	assert.Truef(t, len(got.Events) == 1 && got.Events[0].Data == long, "5 MB came out as %d events", len(got.Events))
}

// FuzzEvent writes any text in every field, and reads it like a client. Nothing is lost or added.
func FuzzEvent(f *testing.F) {
	for i, text := range texts {
		f.Add(text, text, text, text)
		f.Add(texts[(i+3)%len(texts)], texts[(i+5)%len(texts)], text, texts[(i+7)%len(texts)])
	}
	f.Fuzz(func(t *testing.T, id, name, data, comment string) {
		stream := sse.Comment(nil, comment)
		stream = sse.Event{ID: id, Name: name, Data: data}.Append(stream)
		stream = sse.Comment(stream, comment)
		stream = sse.Event{ID: "last", Data: "the end"}.Append(stream)
		assert.True(t, utf8.Valid(stream), "the stream is not UTF-8")
		line := func(s string) string {
			s = strings.NewReplacer("\r\n", " ", "\n", " ", "\r", " ", "\x00", "\ufffd").Replace(s)
			return strings.ToValidUTF8(s, "\ufffd")
		}
		lines := strings.Split(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(data), "\n")
		for i := range lines {
			lines[i] = strings.ToValidUTF8(lines[i], "\ufffd")
		}
		got := ssetest.Read(string(stream))
		want := []ssetest.Event{
			{ID: line(id), Name: line(name), Data: strings.Join(lines, "\n")},
			{ID: "last", Data: "the end"},
		}
		assert.Equal(t, "", cmp.Diff(want, got.Events), id, name, data)
		assert.Truef(t, len(got.Retry)+len(got.Unknown) == 0 && got.Left == "",
			"%q, %q, %q, %q brought %q, %q, %q along", id, name, data, comment, got.Retry, got.Unknown, got.Left)
	})
}
