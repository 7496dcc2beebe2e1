package admission

import (
	"errors"
	"fmt"
	"io"
	"sync"
)

// Sizes of the chunks of an incoming body. A pool reuses full chunks, so large bodies leave no garbage.
const (
	firstChunk = 1 << 10
	fullChunk  = 64 << 10
)

var chunkPool = sync.Pool{New: func() any { return new([fullChunk]byte) }}

// mergeMu allows one merge at a time, because a merge briefly holds a second copy that the budget does not count.
var mergeMu sync.Mutex

// incomingBody is a body while it arrives. Its bytes are in chunks until half of an announced length, or the end, has
// arrived. Then they are in one buffer.
type incomingBody struct {
	body     io.Reader
	length   int64 // -1 if unannounced
	limit    int64
	pace     pace
	hold     *Hold // nil for no bound
	acquired int64 // of the budget

	chunks   [][]byte
	buf      []byte
	received int64
}

// probe rejects a body if the budget has no room for its first chunk. It keeps no part of the budget.
func (a *incomingBody) probe(l Limits) (err error) {
	if l.Budget == nil {
		return nil
	}
	size := int64(firstChunk)
	if a.length >= 0 {
		size = min(size, a.length)
	}
	if a.hold, err = l.Budget.acquire(size, a.length < 0 || a.length > Small, l.Shares); err == nil {
		a.hold.Return(size)
	}
	return err
}

// acquire acquires n bytes of the budget.
func (a *incomingBody) acquire(n int64) error {
	if a.hold != nil {
		if err := a.hold.Add(n); err != nil {
			return err
		}
	}
	a.acquired += n
	return nil
}

// release returns n bytes to the budget.
func (a *incomingBody) release(n int64) {
	if a.hold != nil {
		a.hold.Return(n)
	}
	a.acquired -= n
}

// read reads the whole body. c is the connection; nil if unknown.
func (a *incomingBody) read(c *conn) ([]byte, error) {
	defer a.freeChunks()
	c.markIdle()
	defer c.markActive()
	// overflow is the target of a read without space: for the first byte, and for a byte beyond the limit.
	var overflow [1]byte
	for {
		space := a.space()
		if len(space) == 0 {
			space = overflow[:]
		}
		a.pace.setDeadline(a.received)
		n, err := a.body.Read(space)
		if n > 0 {
			c.touch()
			if err := a.add(space[:n]); err != nil {
				return nil, err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return a.finish()
		case err != nil:
			return nil, fmt.Errorf("read body: %w", err)
		}
	}
}

// space returns the free space for the next bytes; none if the body has to grow first.
func (a *incomingBody) space() []byte {
	if a.buf != nil {
		return a.buf[a.received:]
	}
	if n := len(a.chunks); n > 0 {
		last := a.chunks[n-1]
		return last[len(last):cap(last)]
	}
	return nil
}

// add counts bytes that were read into space, or copies them from overflow.
func (a *incomingBody) add(read []byte) error {
	full := len(a.space()) == 0
	if full {
		if a.received == a.limit || a.received == a.length {
			return &TooLarge{MaxBytes: a.limit}
		}
		if err := a.grow(); err != nil {
			return err
		}
		copy(a.space(), read)
	}
	a.received += int64(len(read))
	if a.buf == nil {
		n := len(a.chunks) - 1
		a.chunks[n] = a.chunks[n][:len(a.chunks[n])+len(read)]
	}
	return nil
}

// grow adds a chunk as large as the received bytes. Once half of an announced length has arrived, it adds the rest.
func (a *incomingBody) grow() error {
	if a.length >= 0 && 2*a.received >= a.length && a.received > 0 {
		return a.merge(a.length)
	}
	end := a.limit
	if a.length >= 0 {
		end = a.length
	}
	size := min(max(firstChunk, min(a.received, fullChunk)), end-a.received)
	if err := a.acquire(size); err != nil {
		return err
	}
	if size == fullChunk {
		a.chunks = append(a.chunks, chunkPool.Get().(*[fullChunk]byte)[:0])
	} else {
		a.chunks = append(a.chunks, make([]byte, 0, size))
	}
	return nil
}

// merge copies the chunks into one buffer of length bytes.
func (a *incomingBody) merge(length int64) error {
	if missing := length - a.acquired; missing > 0 {
		if err := a.acquire(missing); err != nil {
			return err
		}
	} else {
		a.release(-missing)
	}
	mergeMu.Lock()
	defer mergeMu.Unlock()
	buf := make([]byte, 0, length)
	for _, chunk := range a.chunks {
		buf = append(buf, chunk...)
	}
	a.freeChunks()
	a.buf = buf[:length]
	return nil
}

// finish returns the whole body.
func (a *incomingBody) finish() ([]byte, error) {
	if len(a.chunks) == 1 {
		return a.chunks[0], nil // the pool does not reuse the first chunk
	}
	if a.buf == nil {
		if err := a.merge(a.received); err != nil {
			return nil, err
		}
	}
	return a.buf[:a.received], nil
}

// freeChunks returns full chunks to the pool.
func (a *incomingBody) freeChunks() {
	for _, chunk := range a.chunks {
		if cap(chunk) == fullChunk {
			chunkPool.Put((*[fullChunk]byte)(chunk[:fullChunk]))
		}
	}
	a.chunks = nil
}
