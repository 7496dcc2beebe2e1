package models

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// maxAnswerBytes bounds one answer.
const maxAnswerBytes = 32 << 20

var errAnswerTooLong = errors.New("the answer is longer than 32 MiB")

// dataLines reads an event stream and passes on only its data lines, each followed by one blank line.
//
// go-openai counts comments and blank lines against a limit. It prepends comments, event names and ids to the next
// error, which then is invalid JSON. It treats every chunk that begins with the key error as an error, even if the
// value is null. So dataLines drops comments, other fields and runs of blank lines. It adds the field name to a
// document without one. It puts a blank before the key error, so the chunk reaches assembly.add like every other. Lines
// may end in LF, CR or CRLF; the last line may lack an end.
type dataLines struct {
	in      *bufio.Reader
	out     []byte // filtered and unread
	buffer  []byte
	read    int
	skipLF  bool
	err     error
	done    bool   // [DONE] arrived
	partial []byte // an incomplete document without the field name
}

var (
	dataField  = []byte("data:")
	doneMarker = []byte("[DONE]")
	errorKey   = []byte(`{"error"`)
	byteOrder  = []byte("\xef\xbb\xbf")
)

func newDataLines(in io.Reader) *dataLines { return &dataLines{in: bufio.NewReader(in)} }

// Read returns as soon as a line is complete.
func (d *dataLines) Read(p []byte) (int, error) {
	for len(d.out) == 0 {
		if d.err != nil {
			return 0, d.err
		}
		var line []byte
		line, d.err = d.line()
		d.filter(line)
	}
	n := copy(p, d.out)
	d.out = d.out[n:]
	return n, nil
}

// line returns the next line without its end. The line is valid until the next call.
func (d *dataLines) line() ([]byte, error) {
	d.buffer = d.buffer[:0]
	for {
		b, err := d.in.ReadByte()
		if err != nil {
			return d.buffer, err
		}
		if d.read++; d.read > maxAnswerBytes {
			return nil, errAnswerTooLong
		}
		if d.skipLF && b == '\n' {
			d.skipLF = false
			continue
		}
		d.skipLF = b == '\r'
		if b == '\n' || b == '\r' {
			return d.buffer, nil
		}
		d.buffer = append(d.buffer, b)
	}
}

// filter queues the line if it holds data.
func (d *dataLines) filter(line []byte) {
	line = bytes.TrimPrefix(line, byteOrder)
	payload, isData := bytes.CutPrefix(line, dataField)
	if !isData {
		if payload = d.document(line); payload == nil {
			return
		}
	}
	payload = bytes.TrimSpace(payload)
	if len(payload) == 0 {
		return
	}
	d.done = d.done || bytes.Equal(payload, doneMarker)
	d.out = append(d.out[:0], "data: "...)
	if bytes.HasPrefix(payload, errorKey) {
		d.out, payload = append(d.out, "{ "...), payload[1:]
	}
	d.out = append(d.out, payload...)
	d.out = append(d.out, "\n\n"...)
}

// document collects a document without the field name, as some servers send an error, and returns it when complete.
func (d *dataLines) document(line []byte) []byte {
	if len(d.partial) == 0 && !bytes.HasPrefix(line, []byte("{")) && !bytes.HasPrefix(line, []byte("[")) {
		return nil
	}
	d.partial = append(d.partial, line...)
	if len(d.partial) > maxRefusalBytes && len(d.partial) > len(line) {
		d.partial = nil // longer than any error
		return nil
	}
	if !json.Valid(d.partial) {
		return nil
	}
	whole := d.partial
	d.partial = nil
	return whole
}
