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

// kind is what an operation does.
type kind string

const (
	kindAcquire kind = "acquire"
	kindTry     kind = "try" // an acquire that is only told whether
	kindAwait   kind = "await"
	kindTake    kind = "take" // an acquire that may borrow
	kindRenew   kind = "renew"
	kindRelease kind = "release"
	kindBreak   kind = "break"
	kindWrite   kind = "write" // a fenced transaction
	kindSweep   kind = "sweep"
	kindLeave   kind = "leave"
	kindPark    kind = "park" // an execution begins to wait
	kindResume  kind = "resume"
	kindClaim   kind = "claim" // an execution is claimed, again
	kindFinish  kind = "finish"
	kindCrash   kind = "crash" // of the server
	kindOver    kind = "over"  // of the checker: everything that was answered has happened
	kindUnknown kind = "unknown"
)

// op is one operation on one lane, with its answer. Moments are nanoseconds of the clock of this machine, which is the
// database's, or microseconds where they are in an answer of the database.
type op struct {
	ID    string `json:"id"`
	Kind  kind   `json:"kind"`
	Lane  string `json:"lane"`
	Owner string `json:"owner,omitempty"`
	Token int64  `json:"token,omitempty"` // that was shown; 0 for none
	TTL   int64  `json:"ttl,omitempty"`   // microseconds
	Child string `json:"child,omitempty"` // that is waited for
	Call  int64  `json:"call"`

	Many bool `json:"many,omitempty"` // of a statement about several lanes
	// Passes: a release that hands the lane to who waits, Heir, whose lease ends at Ends. When nobody does, its commit
	// is not waited for.
	Passes bool   `json:"passes,omitempty"`
	Heir   string `json:"heir,omitempty"`

	Return int64  `json:"return,omitempty"` // 0: nobody heard the answer
	OK     bool   `json:"ok,omitempty"`
	Blind  bool   `json:"blind,omitempty"`  // it was done, and what it answered was not looked at
	Busy   bool   `json:"busy,omitempty"`   // of a renewal: ask again
	Got    int64  `json:"got,omitempty"`    // the token of the answer, or the claim
	Ends   int64  `json:"ends,omitempty"`   // microseconds
	Holder string `json:"holder,omitempty"` // of the answer no
	Lender string `json:"lender,omitempty"`

	contended bool     // another operation on the lane overlaps
	promised  bool     // somebody waits for the lane
	heirs     []string // who may wait for it, of one that passes
	answered  bool
}

func (o *op) from() int64 { return o.Call / 1000 }

func (o *op) until() int64 {
	if o.Return == 0 {
		return never
	}
	return o.Return/1000 + 1
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

// now is the machine's clock, asked of the kernel: what a process believes the time to be may be skewed.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &t); err != nil {
		return 0 // there is such a clock on every Unix
	}
	return t.Nano()
}

// tape is where a process records its operations, in a file that outlives it.
type tape struct {
	file *os.File
	name string
	n    atomic.Int64
	mu   sync.Mutex
}

func newTape(path, name string) (*tape, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	return &tape{file: file, name: name}, nil
}

// call records that an operation begins now.
func (t *tape) call(o *op) *op {
	o.ID = fmt.Sprintf("%s.%d", t.name, t.n.Add(1))
	o.Call = now()
	t.write(o)
	return o
}

// done records the answer to an operation. It stays one of which nobody heard when err does not say that nothing was
// done.
func (t *tape) done(o *op, err error) {
	_, unconnected := errors.AsType[*pgconn.ConnectError](err)
	switch {
	case err == nil:
	case unconnected, pgconn.SafeToRetry(err), postgres.IsCode(err, "LK001", "40P01"):
		o.OK, o.Got, o.Ends, o.Holder = false, 0, 0, ""
		if !postgres.IsCode(err, "LK001") {
			o.Kind = kindLeave // it did nothing at all
		}
	default:
		return
	}
	o.Return = now()
	t.write(o)
}

func (t *tape) write(o *op) {
	line := append([]byte(o.String()), '\n')
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.file.Write(line); err != nil {
		fmt.Fprintln(os.Stderr, "lanetest: record:", err)
		os.Exit(3) // a history with holes proves nothing
	}
}

// read is what the tapes of some processes hold, by lane.
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
				continue // its process was killed while it wrote the line
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
		mark(ops)
	}
	return byLane, nil
}

// place is how long the queue keeps the place of who waits.
const place = int64(5 * time.Second)

// late is how long after its call an operation of which nobody heard may happen, as far as heirs are looked for.
const late = int64(3 * time.Second)

// findHeirs finds those who may wait for the lane while a release happens. Of one of which nobody heard, only those
// count of whom the history says that they had the lane at some time.
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
		until = o.Call + late
	}
	for _, w := range ops {
		end := min(w.end(), never-place) + place
		for _, at := range left[w.Owner] {
			if at > w.Call { // before that it stood in the queue for another time
				end = min(end, at)
			}
		}
		if w.Kind == kindAwait && w.Call < until && end >= o.Call && (o.Return != 0 || had[w.Owner]) &&
			!slices.Contains(o.heirs, w.Owner) {
			o.heirs = append(o.heirs, w.Owner)
		}
	}
}

// mark notes of each operation of a lane whether another overlaps it, and whether somebody may have waited.
func mark(ops []*op) {
	latest := int64(math.MinInt64) // end of any operation before
	waits := int64(math.MinInt64)  // end of any place before
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
			waits = max(waits, o.end(), min(o.end(), never-place)+place)
		}
	}
}

// checkLimit is how long the checker may take for one lane; more counts as a failure.
const checkLimit = 20 * time.Second

// check says why the history of a lane is not linearizable; nil when it is.
func check(lane string, ops []*op, first state, limit time.Duration) error {
	history := make([]porcupine.Operation, 0, len(ops)+1)
	var last int64
	for i, o := range ops {
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

// excerpt is where the longest explanation of a history ends.
func excerpt(history []porcupine.Operation, info porcupine.LinearizationInfo, first state) string {
	var longest []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, some := range partition {
			if len(some) > len(longest) {
				longest = some
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

// checkAll checks every lane and returns how many operations there were.
func checkAll(t *testing.T, byLane map[string][]*op) (n int) {
	t.Helper()
	for lane, ops := range byLane {
		n += len(ops)
		if err := check(lane, ops, state{}, checkLimit); err != nil {
			t.Errorf("%v\nthe history is kept in %s", err, keep(t, ops))
		}
	}
	return n
}

// keep saves the history of a lane for whoever looks for the fault.
func keep(t *testing.T, ops []*op) string {
	t.Helper()
	file, err := os.CreateTemp("", "lanetest-history-*.jsonl") //nolint:usetesting // it is to outlive the test
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
