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
	errUnchanged      = errors.New("the batch changed nothing")
	errUnknownOutcome = errors.New("the outcome of the batch is unknown")
	errWriteFailed    = errors.New("the single write failed")
	errCallerLeft     = errors.New("the caller has left")
)

// tick is the unit of all durations except those of slow writes. So a caller may leave exactly when its write starts.
const tick = 500 * time.Microsecond

// simulation has the batchers of one scheduler and callers that start, leave and fail at random, in virtual time.
// MaxWait is long, so a lost write blocks its caller and the test notices it.
type simulation struct {
	t         *testing.T
	scheduler *Scheduler
	batchers  []*Batcher[int, int]

	mu             sync.Mutex
	random         *rand.Rand
	slowPercent    int               // percentage of slow writes
	lastID         int               // id of the last started write
	waitingSince   map[int]time.Time // start of writes that are not sent yet
	writeCount     map[int]int       // number of times that each write was made
	unknownOutcome map[int]bool      // writes of batches that failed with errUnknownOutcome
	abandoned      []int             // writes whose callers have left
	lateCount      map[int]int       // number of late results by write
}

func newSimulation(t *testing.T, chance *rand.Rand) *simulation {
	t.Helper()
	m := &simulation{
		t: t, scheduler: &Scheduler{}, random: chance, waitingSince: map[int]time.Time{}, writeCount: map[int]int{},
		unknownOutcome: map[int]bool{}, lateCount: map[int]int{},
	}
	m.slowPercent = []int{0, 2, 20}[m.randomInt(3)]
	for _, maxSize := range []int{0, 7, 64} {
		m.batchers = append(m.batchers, &Batcher[int, int]{
			Scheduler: m.scheduler, MaxSize: maxSize, MaxWait: time.Hour, Send: m.send,
			Unchanged: func(err error) bool { return errors.Is(err, errUnchanged) }, OnLate: m.onLate,
		})
	}
	return m
}

func (m *simulation) randomInt(n int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.random.IntN(n)
}

// delay sleeps for a few milliseconds. A slow write sleeps for up to 300 ms more.
func (m *simulation) delay() {
	if m.randomInt(100) < m.slowPercent {
		time.Sleep(time.Duration(m.randomInt(300)) * time.Millisecond)
	}
	time.Sleep(time.Duration(1+m.randomInt(6)) * tick)
}

// send makes the writes of a batch. The result of a batched write is twice its id.
func (m *simulation) send(_ context.Context, ins []int) ([]Result[int], error) {
	m.markSent(ins...)
	m.delay()
	outcome := m.randomInt(20)
	m.mu.Lock()
	defer m.mu.Unlock()
	results := AllSkipped[int](len(ins))
	for i, id := range ins {
		switch {
		case outcome == 1:
			m.unknownOutcome[id] = true
		case outcome > 1 && m.random.IntN(10) > 0:
			results[i] = Result[int]{Value: 2 * id}
			m.writeCount[id]++
		}
	}
	return results, map[int]error{0: errUnchanged, 1: errUnknownOutcome}[outcome]
}

// markSent marks writes as in flight.
func (m *simulation) markSent(ids ...int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range ids {
		queuedAt, first := m.waitingSince[id]
		assert.Truef(m.t, !first || time.Since(queuedAt) <= time.Minute,
			"write %d was not sent for %s", id, time.Since(queuedAt))
		delete(m.waitingSince, id)
	}
}

// write calls Do and checks the result. The result of a single write is three times its id.
func (m *simulation) write() {
	ctx, callerStays, fails, panics := m.t.Context(), m.randomInt(5) > 0, m.randomInt(20) == 0, m.randomInt(40) == 0
	if !callerStays {
		leaveCtx, cancel := context.WithTimeoutCause(ctx, time.Duration(m.randomInt(15))*tick, errCallerLeft)
		defer cancel()
		ctx = leaveCtx
	}
	id := m.newWrite()
	singles := 0
	value, err := m.callBatcher(ctx, id, func() (int, error) {
		singles++
		m.markSent(id)
		m.delay()
		switch {
		case panics:
			panic(errWriteFailed)
		case fails:
			return 0, errWriteFailed
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.writeCount[id]++
		return 3 * id, nil
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	valid := false
	switch {
	case err == nil && singles == 0:
		valid = value == 2*id && m.writeCount[id] == 1
	case err == nil:
		valid = value == 3*id && m.writeCount[id] == 1 && singles == 1 && !m.unknownOutcome[id]
	case errors.Is(err, errWriteFailed):
		valid = singles == 1 && m.writeCount[id] == 0 && !m.unknownOutcome[id]
	case errors.Is(err, errUnknownOutcome):
		valid = singles == 0 && m.unknownOutcome[id]
	case errors.Is(err, errCallerLeft):
		valid = singles == 0 && !callerStays
		m.abandoned = append(m.abandoned, id)
	}
	assert.Truef(m.t, valid, "write %d: %d, %v; made %d times, %d single writes", id, value, err,
		m.writeCount[id], singles)
}

// onLate receives the results of callers who left.
func (m *simulation) onLate(id, value int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lateCount[id]++; value != 2*id {
		m.t.Errorf("late result of write %d: %d", id, value)
	}
}

// newWrite returns the id of a new write.
func (m *simulation) newWrite() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastID++
	m.waitingSince[m.lastID] = time.Now()
	return m.lastID
}

// callBatcher calls Do of a random batcher and returns a panic as an error.
func (m *simulation) callBatcher(ctx context.Context, id int, single func() (int, error)) (value int, err error) {
	defer func() {
		if failure, ok := recover().(error); ok {
			err = failure
		}
	}()
	return m.batchers[m.randomInt(len(m.batchers))].Do(ctx, id, single)
}

// checkIdle checks that no write is queued or in flight, and that OnLate received all late results.
func (m *simulation) checkIdle() {
	synctest.Wait()
	for _, id := range m.abandoned {
		assert.Truef(m.t, m.writeCount[id] == m.lateCount[id],
			"write %d was made %d times, and OnLate received %d results", id, m.writeCount[id], m.lateCount[id])
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

// Calls may fail, panic, be slow or lose their caller. Each caller gets its own result once, and no write remains
// queued.
func TestEachWriteGetsItsResult(t *testing.T) {
	t.Parallel()
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) {
			m := newSimulation(t, rand.New(rand.NewPCG(seed, 0)))
			var wg sync.WaitGroup
			for range 1 + m.randomInt(100) {
				wg.Go(func() {
					for range 20 {
						m.write()
						time.Sleep(time.Duration(max(0, m.randomInt(12)-4)) * tick)
					}
				})
			}
			wg.Wait()
			time.Sleep(time.Second) // until the writes of departed callers end
			m.checkIdle()
		})
	}
}
