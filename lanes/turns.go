package lanes

import (
	"context"
	"sync"
)

// turns lets one goroutine at a time change what an owner has of a lane, so that an acquire never
// runs between the decision to release and the release. The zero value is ready.
type turns struct {
	mu   sync.Mutex
	open map[key]*turn
}

type turn struct {
	token chan struct{} // has room for one: full while somebody has the turn
	users int
}

// take returns when it is the caller's turn for id; the caller ends it with the returned function.
func (t *turns) take(ctx context.Context, id key) (end func(), err error) {
	mine := t.join(id)
	select {
	case mine.token <- struct{}{}:
		return func() { <-mine.token; t.leave(id, mine) }, nil
	case <-ctx.Done():
		t.leave(id, mine)
		return nil, context.Cause(ctx)
	}
}

func (t *turns) join(id key) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open == nil {
		t.open = make(map[key]*turn)
	}
	mine := t.open[id]
	if mine == nil {
		mine = &turn{token: make(chan struct{}, 1)}
		t.open[id] = mine
	}
	mine.users++
	return mine
}

func (t *turns) leave(id key, mine *turn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if mine.users--; mine.users == 0 {
		delete(t.open, id)
	}
}
