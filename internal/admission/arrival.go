package admission

import (
	"errors"
	"fmt"
	"io"
	"sync"
)

// The sizes of the pieces that an arriving body is kept in. Those of the largest size are used again, so that bodies of
// strangers leave no garbage.
const (
	firstPiece = 1 << 10
	fullPiece  = 64 << 10
)

var fullPieces = sync.Pool{New: func() any { return new([fullPiece]byte) }}

// joining lets one body at a time be joined: for that moment it is in memory once more than its budget says.
var joining sync.Mutex

// arrival is a body that arrives. Its bytes are in pieces until half of an announced length is there, or the end, and
// from then on in whole.
type arrival struct {
	body   io.Reader
	length int64 // -1 where it is not announced
	most   int64
	pace   pace
	hold   *Hold // nil for no bound
	held   int64 // of the budget

	pieces [][]byte
	whole  []byte
	got    int64
}

// open refuses a body for whose first piece nothing is left. It holds nothing.
func (a *arrival) open(l Limits) (err error) {
	if l.Budget == nil {
		return nil
	}
	first := int64(firstPiece)
	if a.length >= 0 {
		first = min(first, a.length)
	}
	if a.hold, err = l.Budget.take(first, a.length < 0 || a.length > Small, l.Shares); err == nil {
		a.hold.Return(first)
	}
	return err
}

// take has the body hold more of the budget.
func (a *arrival) take(n int64) error {
	if a.hold != nil {
		if err := a.hold.Add(n); err != nil {
			return err
		}
	}
	a.held += n
	return nil
}

// give gives back what the body holds.
func (a *arrival) give(n int64) {
	if a.hold != nil {
		a.hold.Return(n)
	}
	a.held -= n
}

// read reads until the end. c is the connection; nil where it is not known.
func (a *arrival) read(c *conn) ([]byte, error) {
	defer a.free()
	c.done()
	defer c.work()
	// what is read where there is no room: the first byte, before which nothing is taken, and one too many
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

// room is where the next bytes go; none where more has to be taken first.
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

// add notes bytes that were read into room, or are spare.
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

// grow makes room: a piece as large as what is there, or the rest of an announced length once half of it is there.
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

// join has the body in whole, of so many bytes.
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
		return a.pieces[0], nil // the first one is not used again
	}
	if a.whole == nil {
		if err := a.join(a.got); err != nil {
			return nil, err
		}
	}
	return a.whole[:a.got], nil
}

// free lets others use the pieces.
func (a *arrival) free() {
	for _, piece := range a.pieces {
		if cap(piece) == fullPiece {
			fullPieces.Put((*[fullPiece]byte)(piece[:fullPiece]))
		}
	}
	a.pieces = nil
}
