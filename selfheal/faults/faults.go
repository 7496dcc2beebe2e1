// Package faults replays labelled traces of faults through the rule of self-heal and through the baseline rule
// [ThreeInARow].
//
// The set faults.jsonl is public; README.md describes how gen makes and labels it. A trace is a list of calls with a
// label. The label says whether the rule must disable the skill, and the first and the last call after which that is
// right.
// [Replay] applies a rule after every call. In production self-heal applies it at each heartbeat, which is later.
// [History] makes traces of the changes that self-heal and people made in a database.
package faults

import (
	"bufio"
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/selfheal"
)

//go:embed faults.jsonl
var embedded []byte

// encodedTrace is a trace as a line of the JSON Lines file. Skill, Caller, Result, Gap and Latency have one character
// for each call.
type encodedTrace struct {
	Name        string `json:"name"`
	Shape       string `json:"shape"`
	Seed        uint64 `json:"seed"`
	HeldOut     bool   `json:"held_out"`
	MustDisable bool   `json:"out"`
	FirstCall   int    `json:"from"`
	LastCall    int    `json:"by"`
	Why         string `json:"why"`
	Skill       string `json:"skill"` // s is the skill of the trace
	Caller      string `json:"caller"`
	Result      string `json:"result"`  // a key of classes
	Gap         string `json:"gap"`     // minutes since the call before, a digit of base 62; see trace
	Latency     string `json:"latency"` // no rule reads it
}

// Trace is a labelled list of calls, of one skill and of others, oldest first.
type Trace struct {
	Name        string
	Shape       string
	HeldOut     bool
	Skill       string
	MustDisable bool // the rule must disable the skill
	FirstCall   int  // 1-based number of the first call after which disabling is right
	LastCall    int  // number of the last such call
	Calls       []Call
}

// Call is a call of a trace.
type Call struct {
	selfheal.Call
	Class string // of its error
}

const (
	subjectSkill = "s"
	digits       = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	maxLineBytes = 1 << 20
	maxCalls     = 10_000  // of a trace
	maxSet       = 200_000 // calls of a set
)

// classes are the error classes by their letter.
var classes = map[byte]string{
	'.': "", 't': "timeout", 'h': "http_status", 'n': "network", 's': "sql", 'i': "invalid_params",
}

// notCounted are the classes of errors that lanekeeper.agent_class_counts leaves out. A test keeps both lists equal.
var notCounted = []string{
	"invalid_params", "unknown_tool", "denied", "stale", "cancelled", "interrupted", "stall", "disabled", "on_trial",
	"yielded", "budget", "configuration", "flow_cancelled",
}

// Embedded returns the set of this release.
func Embedded() ([]Trace, error) { return Read(bytes.NewReader(embedded)) }

// Read reads a set. An error names the line.
func Read(r io.Reader) ([]Trace, error) {
	var all []Trace
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLineBytes)
	calls := 0
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var line encodedTrace
		decoder := json.NewDecoder(bytes.NewReader(lines.Bytes()))
		decoder.DisallowUnknownFields()
		err := decoder.Decode(&line)
		if err != nil {
			err = fmt.Errorf("must be a JSON object as in selfheal/faults/faults.jsonl: %s",
				strings.TrimPrefix(err.Error(), "json: "))
		} else {
			err = line.check()
		}
		if calls += len(line.Skill); err == nil && calls > maxSet {
			err = fmt.Errorf("a set has at most %d calls; split the file", maxSet)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d of the set: %w", n, err)
		}
		all = append(all, line.trace())
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the set: %w", err)
	}
	return all, nil
}

func (l encodedTrace) check() error {
	n := len(l.Skill)
	switch {
	case n == 0 || n > maxCalls:
		return fmt.Errorf("a trace must have 1 to %d calls; got %d", maxCalls, n)
	case len(l.Caller) != n || len(l.Result) != n || len(l.Gap) != n:
		return errors.New("skill, caller, result and gap must have one character for each call")
	case l.MustDisable && (l.FirstCall < 1 || l.LastCall < l.FirstCall || l.LastCall > n):
		return fmt.Errorf("from and by must satisfy 1 <= from <= by <= %d; got %d and %d", n, l.FirstCall, l.LastCall)
	}
	for i := range n {
		if _, ok := classes[l.Result[i]]; !ok {
			return fmt.Errorf("result %d must be one of .thnsi; got %q", i+1, l.Result[i])
		}
		if !strings.Contains(digits, l.Gap[i:i+1]) {
			return fmt.Errorf("gap %d must be a digit of base 62; got %q", i+1, l.Gap[i])
		}
	}
	return nil
}

// trace decodes the calls. One second is added to each gap, so that no two calls have the same time.
func (l encodedTrace) trace() Trace {
	t := Trace{
		Name: l.Name, Shape: l.Shape, HeldOut: l.HeldOut, Skill: subjectSkill,
		MustDisable: l.MustDisable, FirstCall: l.FirstCall, LastCall: l.LastCall,
	}
	at := time.Unix(0, 0)
	for i := range l.Skill {
		at = at.Add(time.Duration(strings.IndexByte(digits, l.Gap[i]))*time.Minute + time.Second)
		class := classes[l.Result[i]]
		t.Calls = append(t.Calls, Call{selfheal.Call{
			Skill: l.Skill[i : i+1], Caller: l.Caller[i : i+1], At: at, Failed: class != "",
		}, class})
	}
	return t
}

// CountedOnly removes the calls that do not count for the health of their skill; see the view agent_skill_calls. It
// renumbers FirstCall and LastCall. If the call of one is removed, the number is that of the next call that counts.
func CountedOnly(all []Trace) []Trace {
	counted := make([]Trace, len(all))
	for i, t := range all {
		counted[i] = t.countedOnly()
	}
	return counted
}

func (t Trace) countedOnly() Trace {
	calls, first, last := []Call{}, t.FirstCall, t.LastCall
	for i, c := range t.Calls {
		if !slices.Contains(notCounted, c.Class) {
			calls = append(calls, c)
			continue
		}
		if i+1 < t.FirstCall {
			first--
		}
		if i+1 < t.LastCall {
			last--
		}
	}
	t.Calls, t.FirstCall, t.LastCall = calls, first, last
	return t
}
