package linearizability_test

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sys/unix"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// kind is the kind of an operation.
type kind string

const (
	kindAcquire kind = "acquire"
	kindTry     kind = "try" // an acquire with only yes or no as an answer
	kindAwait   kind = "await"
	kindTake    kind = "take" // an acquire or a loan
	kindRenew   kind = "renew"
	kindRelease kind = "release"
	kindBreak   kind = "break"
	kindWrite   kind = "write" // a fenced transaction
	kindSweep   kind = "sweep"
	kindLeave   kind = "leave"
	kindPark    kind = "park" // an execution starts to wait
	kindResume  kind = "resume"
	kindClaim   kind = "claim" // a worker claims an execution, again
	kindFinish  kind = "finish"
	kindCrash   kind = "crash" // of the server
	kindOver    kind = "over"  // set by the checker: every answered operation has happened
	kindUnknown kind = "unknown"
)

// op is one operation on one lane, with its answer. Call and Return are nanoseconds of the machine's clock, which is
// also the database's. Times from the database's answers are microseconds.
type op struct {
	ID    string `json:"id"`
	Kind  kind   `json:"kind"`
	Lane  string `json:"lane"`
	Owner string `json:"owner,omitempty"`
	Token int64  `json:"token,omitempty"` // the token passed in; 0 for none
	TTL   int64  `json:"ttl,omitempty"`   // microseconds
	Child string `json:"child,omitempty"` // the awaited child
	Call  int64  `json:"call"`

	Many bool `json:"many,omitempty"` // the statement covers several lanes
	// Passes marks a release that may hand the lane to a waiter: to Heir, whose lease ends at Ends. Without a waiter, the
	// release does not wait for a durable commit.
	Passes bool   `json:"passes,omitempty"`
	Heir   string `json:"heir,omitempty"`

	Return int64  `json:"return,omitempty"` // 0 without a received answer
	OK     bool   `json:"ok,omitempty"`
	Blind  bool   `json:"blind,omitempty"`  // it succeeded, and the test ignored the answer
	Busy   bool   `json:"busy,omitempty"`   // of a renewal: try again
	Got    int64  `json:"got,omitempty"`    // the token in the answer, or the claim
	Ends   int64  `json:"ends,omitempty"`   // microseconds
	Holder string `json:"holder,omitempty"` // in a negative answer
	Lender string `json:"lender,omitempty"`

	contended bool     // another operation on the lane overlaps
	promised  bool     // an owner waits for the lane
	heirs     []string // possible waiters at a release
	answered  bool
	horizon   int64 // without an answer: the last answer on the lane, after which no answer can show its effect
}

func (o *op) from() int64 { return o.Call / 1000 }

func (o *op) until() int64 {
	switch {
	case o.Return != 0:
		return o.Return/1000 + 1
	case o.horizon != 0:
		return o.horizon
	}
	return never
}

func (o *op) end() int64 {
	if o.Return == 0 {
		return math.MaxInt64 - 1
	}
	return o.Return
}

func (o *op) String() string {
	raw, err := json.Marshal(o)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// now reads the machine's clock from the kernel. The process's own clock may be skewed.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &t); err != nil {
		return 0 // every Unix has this clock
	}
	return t.Nano()
}

// history is the file in which a process records its operations. It outlives the process.
type history struct {
	file *os.File
	name string
	n    atomic.Int64
	mu   sync.Mutex
}

func newHistory(path, name string) (*history, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	return &history{file: file, name: name}, nil
}

// call records the start of an operation.
func (t *history) call(o *op) *op {
	o.ID = fmt.Sprintf("%s.%d", t.name, t.n.Add(1))
	o.Call = now()
	t.write(o)
	return o
}

// done records the answer to an operation. If err leaves its effect open, it stays without an answer.
func (t *history) done(o *op, err error) {
	_, unconnected := errors.AsType[*pgconn.ConnectError](err)
	switch {
	case err == nil:
	case unconnected, pgconn.SafeToRetry(err), postgres.IsCode(err, "LK001", "40P01"):
		o.OK, o.Got, o.Ends, o.Holder = false, 0, 0, ""
		if !postgres.IsCode(err, "LK001") {
			o.Kind = kindLeave // it had no effect
		}
	default:
		return
	}
	o.Return = now()
	t.write(o)
}

func (t *history) write(o *op) {
	line := append([]byte(o.String()), '\n')
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.file.Write(line); err != nil {
		fmt.Fprintln(os.Stderr, "lanetest: record:", err)
		os.Exit(3) // an incomplete history proves nothing
	}
}

// read returns the operations of recorded histories, by lane.
func read(paths []string) (map[string][]*op, error) {
	byID := map[string]*op{}
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		lines := bufio.NewScanner(file)
		for lines.Scan() {
			o := new(op)
			if err := json.Unmarshal(lines.Bytes(), o); err != nil {
				continue // the process was killed while it wrote this line
			}
			byID[o.ID] = o
		}
		if err := lines.Err(); err != nil {
			return nil, err
		}
	}
	byLane := map[string][]*op{}
	for _, o := range byID {
		byLane[o.Lane] = append(byLane[o.Lane], o)
	}
	for _, ops := range byLane {
		slices.SortFunc(ops, func(a, b *op) int { return cmp.Compare(a.Call, b.Call) })
		markConcurrency(ops)
	}
	return byLane, nil
}

// queueTimeout is the time for which the queue keeps a waiter's place.
const queueTimeout = int64(5 * time.Second)

// maxDelay bounds how long after its call an unanswered operation may happen, for the search of heirs.
const maxDelay = int64(3 * time.Second)

// findHeirs finds the possible waiters of the lane during a release. If the release has no answer, a waiter counts only
// if the history shows that it once held the lane.
func (o *op) findHeirs(ops []*op) {
	until := o.end()
	had, left := map[string]bool{}, map[string][]int64{}
	for _, w := range ops {
		if w.OK {
			had[w.Owner] = true
		}
		had[w.Holder] = true
		if w.Kind == kindRelease && w.Passes && w.Token == 0 && w.Return != 0 { // it has left the queue
			left[w.Owner] = append(left[w.Owner], w.Return)
		}
	}
	if o.Return == 0 {
		until = o.Call + maxDelay
	}
	for _, w := range ops {
		end := min(w.end(), never-queueTimeout) + queueTimeout
		for _, at := range left[w.Owner] {
			if at > w.Call { // an earlier exit ended an earlier wait
				end = min(end, at)
			}
		}
		if w.Kind == kindAwait && w.Call < until && end >= o.Call && (o.Return != 0 || had[w.Owner]) &&
			!slices.Contains(o.heirs, w.Owner) {
			o.heirs = append(o.heirs, w.Owner)
		}
	}
}

// markConcurrency notes for each operation of a lane whether another overlaps it, and whether an owner may have waited.
func markConcurrency(ops []*op) {
	latest := int64(math.MinInt64) // latest end of an earlier operation
	waits := int64(math.MinInt64)  // latest end of an earlier place in the queue
	for i, o := range ops {
		if o.Passes && (o.Return == 0 || o.Heir != "") {
			o.findHeirs(ops)
		}
		o.contended = latest >= o.Call
		for _, next := range ops[i+1:] {
			if next.Call > o.end() {
				break
			}
			o.contended = true
			o.promised = o.promised || next.Kind == kindAwait
		}
		o.promised = o.promised || waits >= o.Call
		latest = max(latest, o.end())
		if o.Kind == kindAwait {
			waits = max(waits, o.end(), min(o.end(), never-queueTimeout)+queueTimeout)
		}
	}
}

// checkLimit bounds the checker's time for one lane. A timeout is a failure.
const checkLimit = 20 * time.Second

// check returns why the history of a lane is not linearizable, or nil.
func check(lane string, ops []*op, first state, limit time.Duration) error {
	history := make([]porcupine.Operation, 0, len(ops)+1)
	var last, horizon int64
	for _, o := range ops {
		horizon = max(horizon, o.Return/1000+1)
	}
	for i, o := range ops {
		o.horizon = horizon
		if o.Kind == kindUnknown {
			return fmt.Errorf("lane %s: a statement about lanes that the recorder does not know: %s", lane, o.Owner)
		}
		if o.Return == 0 && o.Kind == kindWrite || o.Kind == kindLeave || o.Kind == kindSweep {
			continue // changes nothing
		}
		last = max(last, o.Call, o.Return)
		history = append(history, porcupine.Operation{ClientId: i, Input: o, Call: o.Call, Return: o.end()})
	}
	over := &op{Kind: kindOver, Lane: lane, Call: last + 1, Return: last + 2}
	history = append(history, porcupine.Operation{ClientId: len(ops), Input: over, Call: over.Call, Return: over.Return})
	model := laneModel(first)
	switch result, info := porcupine.CheckOperationsVerbose(model, history, limit); result {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("lane %s: %w: %d operations in %s\n%s", lane, errUnchecked, len(history), limit,
			excerpt(history, info, first))
	default:
		return fmt.Errorf("lane %s: %w\n%s", lane, errIllegal, excerpt(history, info, first))
	}
}

var (
	errIllegal   = errors.New("no order of the operations explains their answers")
	errUnchecked = errors.New("the checker was not done in time, which proves nothing")
)

// excerpt returns the operations at which the longest explanation of a history ends.
func excerpt(history []porcupine.Operation, info porcupine.LinearizationInfo, first state) string {
	var longest []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, takeRandom := range partition {
			if len(takeRandom) > len(longest) {
				longest = takeRandom
			}
		}
	}
	var b strings.Builder
	s := first
	done := map[string]bool{}
	for i, o := range longest {
		if next := steps(s, o.Input.(*op)); len(next) > 0 {
			s = next[len(next)-1].(state)
		}
		done[o.Input.(*op).ID] = true
		if i >= len(longest)-12 {
			fmt.Fprintf(&b, "  %s\n    → %+v\n", o.Input.(*op), s)
		}
	}
	fmt.Fprintf(&b, "  and then none of:\n")
	var soonest int64 = math.MaxInt64
	for _, o := range history {
		if !done[o.Input.(*op).ID] {
			soonest = min(soonest, o.Return)
		}
	}
	for _, o := range history {
		if in := o.Input.(*op); !done[in.ID] && o.Call <= soonest {
			fmt.Fprintf(&b, "  %s contended=%v promised=%v\n", in, in.contended, in.promised)
		}
	}
	return b.String()
}

// checkAll checks every lane and returns the number of operations.
func checkAll(t *testing.T, byLane map[string][]*op) (n int) {
	t.Helper()
	for lane, ops := range byLane {
		n += len(ops)
		if err := check(lane, ops, state{}, checkLimit); err != nil {
			t.Errorf("%v\nthe history is kept in %s", err, saveHistory(t, ops))
		}
	}
	return n
}

// saveHistory saves the history of a lane for a later analysis.
func saveHistory(t *testing.T, ops []*op) string {
	t.Helper()
	file, err := os.CreateTemp("", "lanetest-history-*.jsonl") //nolint:usetesting // outlives the test
	if err != nil {
		t.Error(err)
		return ""
	}
	defer file.Close()
	for _, o := range ops {
		fmt.Fprintln(file, o)
	}
	return file.Name()
}
