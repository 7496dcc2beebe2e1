package postgres

import (
	"context"
	"sync"
)

// KeyedMutex lets one goroutine at a time have a key. The zero value is ready.
type KeyedMutex[K comparable] struct {
	mu   sync.Mutex
	open map[K]*turn
}

type turn struct {
	token chan struct{} // has room for one: full while somebody has the key
	users int
}

// Lock returns when the caller has the key; the caller gives it back with the returned function. When ctx ends first,
// it returns its cause.
func (m *KeyedMutex[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	mine := m.join(key)
	select {
	case mine.token <- struct{}{}:
		return func() { <-mine.token; m.leave(key, mine) }, nil
	case <-ctx.Done():
		m.leave(key, mine)
		return nil, context.Cause(ctx)
	}
}

func (m *KeyedMutex[K]) join(key K) *turn {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.open == nil {
		m.open = make(map[K]*turn)
	}
	mine := m.open[key]
	if mine == nil {
		mine = &turn{token: make(chan struct{}, 1)}
		m.open[key] = mine
	}
	mine.users++
	return mine
}

func (m *KeyedMutex[K]) leave(key K, mine *turn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if mine.users--; mine.users == 0 {
		delete(m.open, key)
	}
}
