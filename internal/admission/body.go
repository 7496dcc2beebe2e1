package admission

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"time"
)

// Grace is the part of a body's time, one in so many, by which its sender may be behind the pace.
const Grace = 4

// firstPiece is how much memory a body gets before its bytes have come.
const firstPiece = 256 << 10

// collected is how large a body is, in bytes, whose memory is collected before it is given back.
const collected = 4 << 20

// MostUnsized is how many bytes a body may have that does not say its length: it is copied as it grows.
const MostUnsized = 8 << 20

// Limits bound a body.
type Limits struct {
	Most   int64         // bytes
	Time   time.Duration // until its last byte
	Budget *Budget       // of bytes in flight; nil for no bound
	Shares []Share
}

// TooLarge reports a body with more bytes than its limit.
type TooLarge struct {
	Most    int64
	Unsized bool // the limit is that of a body without a Content-Length
}

func (e *TooLarge) Error() string {
	if e.Unsized {
		return fmt.Sprintf("the body is larger than the %d bytes that one without a Content-Length may have", e.Most)
	}
	return fmt.Sprintf("the body is larger than %d bytes", e.Most)
}

// Body is a body in memory. It gives back what it took of the budget when it is closed.
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

// Close gives the memory back. It may be called more than once.
func (b *Body) Close() error {
	large := cap(b.raw) >= collected
	b.raw, b.at = nil, 0
	if b.hold != nil {
		if large {
			runtime.GC() // so that what is given back is free: the next large body would come before the next collection
		}
		b.hold.Release()
		b.hold = nil
	}
	return nil
}

// Bytes is what is left of a request's body, without a copy where [Read] has read it.
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

// All is the whole body of a request of at most so many bytes, without a copy where [Read] has read it. The error is a *[TooLarge], or
// the connection's.
func All(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	if b, ok := r.Body.(*Body); ok {
		if int64(len(b.raw)-b.at) > most {
			return nil, &TooLarge{Most: most}
		}
		return Bytes(b)
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if large, is := errors.AsType[*http.MaxBytesError](err); is {
		return nil, &TooLarge{Most: large.Limit}
	}
	if err != nil {
		return nil, fmt.Errorf("read body: %w", err)
	}
	return body, nil
}

// Read reads the body of a request and puts a [Body] in its place. The error is [ErrFull], a *[TooLarge], or the connection's; a
// deadline of the connection that was not met is os.ErrDeadlineExceeded.
func Read(w http.ResponseWriter, r *http.Request, l Limits) error {
	if r.ContentLength > l.Most {
		return &TooLarge{Most: l.Most}
	}
	most := l.Most
	if r.ContentLength < 0 {
		most = min(most, MostUnsized)
	}
	body := &Body{}
	if l.Budget != nil {
		var err error
		take := r.ContentLength
		if take < 0 {
			take = min(firstPiece, most)
		}
		if body.hold, err = l.Budget.Take(take, l.Shares...); err != nil {
			return err
		}
	}
	p := pace{control: http.NewResponseController(w), began: time.Now(), limit: l.Time, size: most}
	if r.ContentLength >= 0 {
		p.size = r.ContentLength
	}
	if err := body.fill(r, most, &p); err != nil {
		if large, is := errors.AsType[*TooLarge](err); is {
			large.Unsized = most < l.Most
		}
		return errors.Join(err, body.Close())
	}
	p.lift()
	r.Body, r.ContentLength = body, int64(len(body.raw))
	return nil
}

// fill reads until the end.
func (b *Body) fill(r *http.Request, most int64, p *pace) error {
	most++ // a byte more tells that there is one
	known := r.ContentLength >= 0
	if known {
		most = min(most, r.ContentLength+1)
	}
	b.raw = make([]byte, 0, min(most, firstPiece))
	for {
		if len(b.raw) == cap(b.raw) {
			if err := b.grow(most, known); err != nil {
				return err
			}
		}
		p.expect(len(b.raw))
		n, err := r.Body.Read(b.raw[len(b.raw):cap(b.raw)])
		b.raw = b.raw[:len(b.raw)+n]
		switch {
		case int64(len(b.raw)) == most && !known:
			return &TooLarge{Most: most - 1}
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("read body: %w", err)
		}
	}
}

// grow makes room for more: for all of a body whose length is known, which has taken that of its budget; else for twice as much, which
// is taken first.
func (b *Body) grow(most int64, known bool) error {
	room := most
	if !known {
		room = min(2*int64(cap(b.raw)), most)
		if b.hold != nil {
			if err := b.hold.Add(room - int64(cap(b.raw))); err != nil {
				return err
			}
		}
	}
	larger := make([]byte, len(b.raw), room)
	copy(larger, b.raw)
	b.raw = larger
	return nil
}

// pace is how a body has to come.
type pace struct {
	control *http.ResponseController
	began   time.Time
	limit   time.Duration
	size    int64
}

// expect sets the time by which the next byte has to come, after so many.
func (p *pace) expect(got int) {
	if p.limit <= 0 {
		return
	}
	grace := p.limit / Grace
	share := float64(int64(got)+1) / float64(max(p.size, int64(got)+1))
	// What cannot be set is a connection that is gone, or none: the next read says so.
	_ = p.control.SetReadDeadline(p.began.Add(grace + time.Duration(share*float64(p.limit-grace))))
}

// lift takes the deadline away.
func (p *pace) lift() { _ = p.control.SetReadDeadline(time.Time{}) }
