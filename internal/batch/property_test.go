package batch

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

var (
	errRefused = errors.New("refused")       // a batch that changed nothing
	errBroken  = errors.New("broken off")    // a batch with an unknown outcome
	errFailed  = errors.New("failed")        // a single write
	errLeft    = errors.New("does not stay") // a caller
)

// tick is the unit of all times except slow. So a caller may leave exactly when its write starts.
const tick = 500 * time.Microsecond

// market has the batchers of one scheduler, with callers who come, leave and fail at random, in synthetic time. No
// write expires, so the test notices a forgotten one.
type market struct {
	t         *testing.T
	scheduler *Scheduler
	batchers  []*Batcher[int, int]

	mu     sync.Mutex
	chance *rand.Rand
	slow   int               // slow writes per hundred
	last   int               // number of started writes
	since  map[int]time.Time // not sent yet
	made   map[int]int       // how often
	broken map[int]bool      // sent in a batch that failed
	left   []int             // their callers have left
	late   map[int]int       // late answers by write
}

func newMarket(t *testing.T, chance *rand.Rand) *market {
	t.Helper()
	m := &market{
		t: t, scheduler: &Scheduler{}, chance: chance, since: map[int]time.Time{}, made: map[int]int{},
		broken: map[int]bool{}, late: map[int]int{},
	}
	m.slow = []int{0, 2, 20}[m.of(3)]
	for _, most := range []int{0, 7, 64} {
		m.batchers = append(m.batchers, &Batcher[int, int]{
			Scheduler: m.scheduler, MaxSize: most, MaxWait: time.Hour, Send: m.send,
			Unchanged: func(err error) bool { return errors.Is(err, errRefused) }, Late: m.tooLate,
		})
	}
	return m
}

func (m *market) of(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.chance.IntN(n)
}

// work takes a few milliseconds, or as long as a lock.
func (m *market) work() {
	if m.of(100) < m.slow {
		time.Sleep(time.Duration(m.of(300)) * time.Millisecond)
	}
	time.Sleep(time.Duration(1+m.of(6)) * tick)
}

// send sends a batch. The answer of a write is twice its number.
func (m *market) send(_ context.Context, ins []int) ([]Answer[int], error) {
	m.sent(ins...)
	m.work()
	fate := m.of(20)
	m.mu.Lock()
	defer m.mu.Unlock()
	answers := Unanswered[int](len(ins))
	for i, id := range ins {
		switch {
		case fate == 1:
			m.broken[id] = true
		case fate > 1 && m.chance.IntN(10) > 0:
			answers[i] = Answer[int]{Value: 2 * id}
			m.made[id]++
		}
	}
	return answers, map[int]error{0: errRefused, 1: errBroken}[fate]
}

// sent marks writes as in flight.
func (m *market) sent(ids ...int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		came, first := m.since[id]
		assert.Truef(m.t, !first || time.Since(came) <= time.Minute, "write %d was forgotten for %s", id, time.Since(came))
		delete(m.since, id)
	}
}

// write calls Do. The caller may leave. The answer of a single write is three times its number.
func (m *market) write() {
	ctx, stays, fails, panics := m.t.Context(), m.of(5) > 0, m.of(20) == 0, m.of(40) == 0
	if !stays {
		leaves, cancel := context.WithTimeoutCause(ctx, time.Duration(m.of(15))*tick, errLeft)
		defer cancel()
		ctx = leaves
	}
	id := m.next()
	direct := 0
	value, err := m.do(ctx, id, func() (int, error) {
		direct++
		m.sent(id)
		m.work()
		switch {
		case panics:
			panic(errFailed)
		case fails:
			return 0, errFailed
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.made[id]++
		return 3 * id, nil
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	right := false
	switch {
	case err == nil && direct == 0:
		right = value == 2*id && m.made[id] == 1
	case err == nil:
		right = value == 3*id && m.made[id] == 1 && direct == 1 && !m.broken[id]
	case errors.Is(err, errFailed):
		right = direct == 1 && m.made[id] == 0 && !m.broken[id]
	case errors.Is(err, errBroken):
		right = direct == 0 && m.broken[id]
	case errors.Is(err, errLeft):
		right = direct == 0 && !stays
		m.left = append(m.left, id)
	}
	assert.Truef(m.t, right, "write %d: %d, %v; made %d times, %d direct writes", id, value, err, m.made[id], direct)
}

// tooLate gets the answers of callers who left.
func (m *market) tooLate(id, value int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.late[id]++; value != 2*id {
		m.t.Errorf("write %d: %d, too late", id, value)
	}
}

// next returns the number of a new write.
func (m *market) next() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last++
	m.since[m.last] = time.Now()
	return m.last
}

// do calls Do of a random batcher, and returns a panic as an error.
func (m *market) do(ctx context.Context, id int, direct func() (int, error)) (value int, err error) {
	defer func() {
		if failure, ok := recover().(error); ok {
			err = failure
		}
	}()
	return m.batchers[m.of(len(m.batchers))].Do(ctx, id, direct)
}

// rests checks that nothing is left.
func (m *market) rests() {
	synctest.Wait()
	for _, id := range m.left {
		assert.Truef(m.t, m.made[id] == m.late[id],
			"write %d was made %d times, and that was handed %d times", id, m.made[id], m.late[id])
	}
	m.scheduler.mu.Lock()
	defer m.scheduler.mu.Unlock()
	assert.Truef(m.t, m.scheduler.queued == 0 && len(m.scheduler.inFlight) == 0,
		"%d writes queued and %d batches in flight after the last caller", m.scheduler.queued, len(m.scheduler.inFlight))
	assert.Truef(m.t, len(m.scheduler.batchers) <= len(m.batchers),
		"%d batchers are registered, want at most %d", len(m.scheduler.batchers), len(m.batchers))
	for i, b := range m.batchers {
		assert.Truef(m.t, b.inFlight == 0 && len(b.queued) == 0,
			"batcher %d: %d batches in flight and %d queued writes after the last caller", i, b.inFlight, len(b.queued))
	}
}

// Calls may fail, panic, be slow or be left by their callers. Each gets its own answer once, and nothing remains
// queued.
func TestEachWriteGetsItsAnswer(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			m := newMarket(t, rand.New(rand.NewPCG(seed, 0)))
			var wg sync.WaitGroup
			for range 1 + m.of(100) {
				wg.Go(func() {
					for range 20 {
						m.write()
						time.Sleep(time.Duration(max(0, m.of(12)-4)) * tick)
					}
				})
			}
			wg.Wait()
			time.Sleep(time.Second) // the writes of callers who left
			m.rests()
		})
	}
}
