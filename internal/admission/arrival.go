package admission

import (
	"errors"
	"fmt"
	"io"
	"sync"
)

// The sizes of the pieces of an arriving body. Pieces of the largest size are reused, so bodies of strangers leave no
// garbage.
const (
	firstPiece = 1 << 10
	fullPiece  = 64 << 10
)

var fullPieces = sync.Pool{New: func() any { return new([fullPiece]byte) }}

// joining lets one body at a time be joined: for that moment, memory holds one copy more than the budget counts.
var joining sync.Mutex

// arrival is an arriving body. Its bytes are in pieces until half of an announced length has arrived, or the end; after
// that they are contiguous.
type arrival struct {
	body   io.Reader
	length int64 // -1 if unannounced
	most   int64
	pace   pace
	hold   *Hold // nil for no bound
	held   int64 // of the budget

	pieces [][]byte
	whole  []byte
	got    int64
}

// open refuses a body if nothing is left for its first piece. It holds nothing.
func (a *arrival) open(l Limits) (err error) {
	if l.Budget == nil {
		return nil
	}
	first := int64(firstPiece)
	if a.length >= 0 {
		first = min(first, a.length)
	}
	if a.hold, err = l.Budget.acquire(first, a.length < 0 || a.length > Small, l.Shares); err == nil {
		a.hold.Return(first)
	}
	return err
}

// take acquires more of the budget for the body.
func (a *arrival) take(n int64) error {
	if a.hold != nil {
		if err := a.hold.Add(n); err != nil {
			return err
		}
	}
	a.held += n
	return nil
}

// give returns the budget of the body.
func (a *arrival) give(n int64) {
	if a.hold != nil {
		a.hold.Return(n)
	}
	a.held -= n
}

// read reads until the end. c is the connection; nil if unknown.
func (a *arrival) read(c *conn) ([]byte, error) {
	defer a.free()
	c.done()
	defer c.work()
	// the target of a read without room: for the first byte, before anything is acquired, and for one byte too many
	var spare [1]byte
	for {
		room := a.room()
		if len(room) == 0 {
			room = spare[:]
		}
		a.pace.expect(a.got)
		n, err := a.body.Read(room)
		if n > 0 {
			c.progress()
			if err := a.add(room[:n]); err != nil {
				return nil, err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return a.end()
		case err != nil:
			return nil, fmt.Errorf("read body: %w", err)
		}
	}
}

// room returns the space for the next bytes; none if more must be acquired first.
func (a *arrival) room() []byte {
	if a.whole != nil {
		return a.whole[a.got:]
	}
	if n := len(a.pieces); n > 0 {
		last := a.pieces[n-1]
		return last[len(last):cap(last)]
	}
	return nil
}

// add counts bytes that were read into room, or are spare.
func (a *arrival) add(read []byte) error {
	spare := len(a.room()) == 0
	if spare {
		if a.got == a.most || a.got == a.length {
			return &TooLarge{Most: a.most}
		}
		if err := a.grow(); err != nil {
			return err
		}
		copy(a.room(), read)
	}
	a.got += int64(len(read))
	if a.whole == nil {
		n := len(a.pieces) - 1
		a.pieces[n] = a.pieces[n][:len(a.pieces[n])+len(read)]
	}
	return nil
}

// grow makes room: a piece as large as the received bytes, or the rest of an announced length once half of it has
// arrived.
func (a *arrival) grow() error {
	if a.length >= 0 && 2*a.got >= a.length && a.got > 0 {
		return a.join(a.length)
	}
	end := a.most
	if a.length >= 0 {
		end = a.length
	}
	size := min(max(firstPiece, min(a.got, fullPiece)), end-a.got)
	if err := a.take(size); err != nil {
		return err
	}
	if size == fullPiece {
		a.pieces = append(a.pieces, fullPieces.Get().(*[fullPiece]byte)[:0])
	} else {
		a.pieces = append(a.pieces, make([]byte, 0, size))
	}
	return nil
}

// join makes the body contiguous, with a given number of bytes.
func (a *arrival) join(length int64) error {
	if more := length - a.held; more > 0 {
		if err := a.take(more); err != nil {
			return err
		}
	} else {
		a.give(-more)
	}
	joining.Lock()
	defer joining.Unlock()
	whole := make([]byte, 0, length)
	for _, piece := range a.pieces {
		whole = append(whole, piece...)
	}
	a.free()
	a.whole = whole[:length]
	return nil
}

// end is the whole body.
func (a *arrival) end() ([]byte, error) {
	if len(a.pieces) == 1 {
		return a.pieces[0], nil // the first piece is not reused
	}
	if a.whole == nil {
		if err := a.join(a.got); err != nil {
			return nil, err
		}
	}
	return a.whole[:a.got], nil
}

// free makes the pieces available to others.
func (a *arrival) free() {
	for _, piece := range a.pieces {
		if cap(piece) == fullPiece {
			fullPieces.Put((*[fullPiece]byte)(piece[:fullPiece]))
		}
	}
	a.pieces = nil
}
