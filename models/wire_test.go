package models

import (
	"bytes"
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
)

func filtered(tb testing.TB, in io.Reader) string {
	tb.Helper()
	out, err := io.ReadAll(newDataLines(in))
	if err != nil {
		tb.Fatal(err)
	}
	return string(out)
}

func TestOnlyDataLinesPass(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ in, want string }{
		"data":                    {"data: {}\n\n", "data: {}\n\n"},
		"comment":                 {": PROCESSING\n\ndata: {}\n\n", "data: {}\n\n"},
		"blank lines":             {"\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", "data: 1\n\ndata: 2\n\n"},
		"no blank line between":   {"data: 1\ndata: 2\n", "data: 1\n\ndata: 2\n\n"},
		"no space after colon":    {"data:1\n\n", "data: 1\n\n"},
		"event, id and retry":     {"event: error\nid: 7\nretry: 10\ndata: 1\n\n", "data: 1\n\n"},
		"CRLF":                    {"data: 1\r\n\r\ndata: 2\r\n\r\n", "data: 1\n\ndata: 2\n\n"},
		"CR":                      {"data: 1\r\rdata: 2\r\r", "data: 1\n\ndata: 2\n\n"},
		"no end of line":          {"data: 1", "data: 1\n\n"},
		"byte order mark":         {"\xef\xbb\xbfdata: 1\n\n", "data: 1\n\n"},
		"no field name":           {"{\"error\":{}}\n", "data: { \"error\":{}}\n\n"},
		"error after comment":     {": wait\n\ndata: {\"error\":{}}\n\n", "data: { \"error\":{}}\n\n"},
		"empty data":              {"data:\n\ndata: \n\ndata: 1\n\n", "data: 1\n\n"},
		"unknown field":           {"database: 1\n\ndata: 1\n\n", "data: 1\n\n"},
		"nothing":                 {"", ""},
		"data that has a comment": {"data: : x\n\n", "data: : x\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := filtered(t, strings.NewReader(test.in)); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestEndMarkerIsSeen(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"data: [DONE]\n\n": true, "data:[DONE]": true, "data: {}\n\n": false, ": [DONE]\n": false} {
		lines := newDataLines(strings.NewReader(text))
		if _, err := io.ReadAll(lines); err != nil || lines.done != want {
			t.Errorf("%q: done = %v (%v), want %v", text, lines.done, err, want)
		}
	}
}

func TestLineIsPassedOnBeforeTheNextOneComes(t *testing.T) {
	t.Parallel()
	in, out := io.Pipe()
	go func() {
		if _, err := out.Write([]byte("data: 1\r")); err != nil {
			t.Error(err)
		}
	}()
	p := make([]byte, 64)
	n, err := newDataLines(in).Read(p)
	if err != nil || string(p[:n]) != "data: 1\n\n" {
		t.Errorf("got %q, %v", p[:n], err)
	}
}

func TestAnswerWithoutEndIsRefused(t *testing.T) {
	t.Parallel()
	endless := io.MultiReader(strings.NewReader("data: "), endlessReader{})
	if _, err := io.Copy(io.Discard, newDataLines(endless)); err == nil {
		t.Error("an endless line was read to its end")
	}
}

type endlessReader struct{}

func (endlessReader) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func TestBrokenConnectionStaysBroken(t *testing.T) {
	t.Parallel()
	lines := newDataLines(io.MultiReader(strings.NewReader("data: 1\n"), iotest.ErrReader(io.ErrUnexpectedEOF)))
	out, err := io.ReadAll(lines)
	if string(out) != "data: 1\n\n" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %q, %v", out, err)
	}
}

var dataForm = regexp.MustCompile(`^(?:data: [^\r\n]+\n\n)*$`)

func FuzzDataLines(f *testing.F) {
	for _, seed := range []string{
		"data: {}\n\n", ": c\n\ndata: {\"error\":{\"message\":\"m\"}}\n\n", "id: 1\r\ndata: x\r\n\r\n", "\xef\xbb\xbfdata:1\r\r{\n",
		"data: [DONE]", "data: { \"error\"", "data: \x00\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		once := filtered(t, bytes.NewReader(in))
		if !dataForm.MatchString(once) {
			t.Errorf("%q became %q, which is not data lines alone", in, once)
		}
		if strings.Contains(once, `data: {"error"`) {
			t.Errorf("%q became %q, which go-openai takes for an error of its own", in, once)
		}
		if twice := filtered(t, strings.NewReader(once)); twice != once {
			t.Errorf("filtered twice %q, once %q", twice, once)
		}
		if slow := filtered(t, iotest.OneByteReader(bytes.NewReader(in))); slow != once {
			t.Errorf("byte by byte %q, at once %q", slow, once)
		}
	})
}
