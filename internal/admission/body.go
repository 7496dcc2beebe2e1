package admission

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"time"
)

// Grace is the fraction (one in so many) of a body's time by which its sender may be behind the pace.
const Grace = 4

// Small is the announced length, in bytes, up to which a body may use the reserve of [NewBytes].
const Small = 64 << 10

// gcThreshold is the size in bytes from which Close collects garbage before it returns the budget.
const gcThreshold = 4 << 20

// MostUnsized is the maximum size, in bytes, of a body without a length.
const MostUnsized = 8 << 20

// Limits bound a body.
type Limits struct {
	MaxBytes int64         // bytes
	Time     time.Duration // until its last byte
	Budget   *Budget       // of received bytes; nil for no bound
	Shares   []Share
}

// TooLarge reports a body with more bytes than its limit.
type TooLarge struct {
	MaxBytes int64
	Unsized  bool // the limit is the one for a body without a Content-Length
}

func (e *TooLarge) Error() string {
	if e.Unsized {
		return fmt.Sprintf("the body is larger than the %d bytes that one without a Content-Length may have", e.MaxBytes)
	}
	return fmt.Sprintf("the body is larger than %d bytes", e.MaxBytes)
}

// Body is a body in memory. Close returns its part of the budget.
type Body struct {
	raw  []byte
	at   int
	hold *Hold
}

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	if b.at == len(b.raw) {
		return 0, io.EOF
	}
	n := copy(p, b.raw[b.at:])
	b.at += n
	return n, nil
}

// Close returns the memory to the budget. It may be called more than once.
func (b *Body) Close() error {
	large := cap(b.raw) >= gcThreshold
	b.raw, b.at = nil, 0
	if b.hold != nil {
		if large {
			runtime.GC() // the next large body may arrive before the next collection
		}
		b.hold.Release()
		b.hold = nil
	}
	return nil
}

// Bytes returns the rest of a request's body, without a copy if [Read] has read it.
func Bytes(r io.Reader) ([]byte, error) {
	b, ok := r.(*Body)
	if !ok {
		all, err := io.ReadAll(r)
		if err != nil {
			return nil, fmt.Errorf("read body: %w", err)
		}
		return all, nil
	}
	rest := b.raw[b.at:len(b.raw):len(b.raw)]
	b.at = len(b.raw)
	return rest, nil
}

// All returns the whole body of a request, up to a number of bytes, without a copy if [Read] has read it. The error is
// a *[TooLarge], or the connection's.
func All(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if b, ok := r.Body.(*Body); ok {
		if int64(len(b.raw)-b.at) > limit {
			return nil, &TooLarge{MaxBytes: limit}
		}
		return Bytes(b)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, &TooLarge{MaxBytes: large.Limit}
	}
	if err != nil {
		return nil, fmt.Errorf("read body: %w", err)
	}
	return body, nil
}

// Read reads the body of a request and puts a [Body] in its place. While it reads, the request's connection counts as
// idle: [Listen] may close it. The error is [ErrFull], a *[TooLarge], or the connection's; a missed deadline of the
// connection is os.ErrDeadlineExceeded.
func Read(w http.ResponseWriter, r *http.Request, l Limits) error {
	if r.ContentLength > l.MaxBytes {
		return &TooLarge{MaxBytes: l.MaxBytes}
	}
	a := incomingBody{body: r.Body, length: r.ContentLength, limit: l.MaxBytes}
	if a.length < 0 {
		a.limit = min(a.limit, MostUnsized)
	}
	if err := a.probe(l); err != nil {
		return err
	}
	a.pace = pace{control: http.NewResponseController(w), began: time.Now(), limit: l.Time, size: a.limit}
	if a.length >= 0 {
		a.pace.size = a.length
	}
	raw, err := a.read(connOf(r))
	if err != nil {
		if large, ok := errors.AsType[*TooLarge](err); ok {
			large.Unsized = a.limit < l.MaxBytes
		}
		a.release(a.acquired)
		return err
	}
	_ = a.pace.control.SetReadDeadline(time.Time{})
	r.Body, r.ContentLength = &Body{raw: raw, hold: a.hold}, int64(len(raw))
	return nil
}

// pace is the required speed of a body.
type pace struct {
	control *http.ResponseController
	began   time.Time
	limit   time.Duration
	size    int64
}

// setDeadline sets the deadline of the byte after the received ones.
func (p *pace) setDeadline(received int64) {
	if p.limit <= 0 {
		return
	}
	grace := p.limit / Grace
	share := float64(received+1) / float64(max(p.size, received+1))
	// The error means a closed connection, or none; the next read reports it.
	_ = p.control.SetReadDeadline(p.began.Add(grace + time.Duration(share*float64(p.limit-grace))))
}
