package models

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
)

// maxAnswerBytes bounds what one answer may send.
const maxAnswerBytes = 32 << 20

var errAnswerTooLong = errors.New("the answer is longer than 32 MiB")

// dataLines reads an event stream and passes on its data lines alone, each followed by one blank line.
//
// go-openai counts comments and blank lines against a limit, glues comments, event names and ids onto the error
// that follows them (which then is no JSON any more), and takes every chunk that begins with the key error for
// an error, also when it is null. So comments, other fields and runs of blank lines end here; a document without
// the field name in front is given one; and a blank goes before the key error, so that the chunk reaches
// assembly.add like every other. Lines may end in LF, CR or CRLF, the last one in nothing.
type dataLines struct {
	in     *bufio.Reader
	out    []byte // filtered and not yet read
	buffer []byte
	taken  int
	skipLF bool
	err    error
	done   bool   // [DONE] has passed
	begun  []byte // a document without the field name that is not whole yet
}

var (
	dataField  = []byte("data:")
	doneMarker = []byte("[DONE]")
	errorKey   = []byte(`{"error"`)
	byteOrder  = []byte("\xef\xbb\xbf")
)

func newDataLines(in io.Reader) *dataLines { return &dataLines{in: bufio.NewReader(in)} }

// Read never holds a line back: it returns as soon as one is complete.
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

// line reads up to the end of a line and returns it without. The line is valid until the next call.
func (d *dataLines) line() ([]byte, error) {
	d.buffer = d.buffer[:0]
	for {
		b, err := d.in.ReadByte()
		if err != nil {
			return d.buffer, err
		}
		if d.taken++; d.taken > maxAnswerBytes {
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

// filter queues the line if it is one of data.
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

// document collects a document that was sent without the field name, as some servers send an error, and returns it
// once it is whole.
func (d *dataLines) document(line []byte) []byte {
	if len(d.begun) == 0 && !bytes.HasPrefix(line, []byte("{")) && !bytes.HasPrefix(line, []byte("[")) {
		return nil
	}
	d.begun = append(d.begun, line...)
	if len(d.begun) > maxRefusalBytes && len(d.begun) > len(line) {
		d.begun = nil // no error is as long
		return nil
	}
	if !json.Valid(d.begun) {
		return nil
	}
	whole := d.begun
	d.begun = nil
	return whole
}
