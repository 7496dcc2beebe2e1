package cuts_test

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// together is how many cuts one run of the sample has: as often as postgres.Again tries once more, since all of them
// may meet one transaction.
const together = 3

// trial is a story and its cuts.
type trial struct {
	story story
	cuts  []cut
	name  string
}

// TestCuts tells each story with its connection cut at one message, for each message in each way; or, as a sample,
// for each statement in each way, several in one run.
func TestCuts(t *testing.T) {
	clean := undisturbed(t)
	trials := plan(clean)
	t.Logf("%d runs", len(trials))
	found := &findings{}
	t.Run("at", func(t *testing.T) {
		for _, x := range trials {
			t.Run(x.name, func(t *testing.T) {
				t.Parallel()
				x.run(t, clean[x.story.name].digest, found)
			})
		}
	})
	found.check(t, len(trials))
}

// undisturbed tells each story without a cut: what is compared with.
func undisturbed(t *testing.T) map[string]ending {
	t.Helper()
	var mu sync.Mutex
	clean := map[string]ending{}
	t.Run("undisturbed", func(t *testing.T) {
		for _, s := range stories {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				e := s.end(t, nil)
				assert.Equal(t, 0, len(e.told), e.told)
				assert.Truef(t, len(e.sent) >= 60, "%d different messages; does the proxy still see them?", len(e.sent))
				mu.Lock()
				defer mu.Unlock()
				clean[s.name] = e
			})
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return clean
}

// plan is what is cut: everything, or each statement once in each way, of which what a process does beside its runs
// only in the story about that; the preparation of a statement is cut with all the others.
func plan(clean map[string]ending) []trial {
	beside := map[string]bool{}
	for _, x := range clean["idle"].sent {
		beside[x.text] = x.beside
	}
	var trials []trial
	for _, s := range stories {
		var cuts []cut
		for _, x := range slices.SortedFunc(slices.Values(clean[s.name].sent),
			func(a, b sent) int { return cmp.Compare(a.text, b.text) }) {
			idle := s.name == "idle"
			if idle != beside[x.text] && (idle || !whole()) || strings.HasPrefix(x.text, "prepare: ") && !whole() {
				continue
			}
			for time := 1; time <= x.times; time++ {
				for _, w := range []way{before, after} {
					if whole() || time == sample(x, w) && (!testing.Short() || w == shortWay(x)) {
						cuts = append(cuts, cut{x.text, time, w})
					}
				}
			}
		}
		trials = append(trials, s.spread(cuts)...)
	}
	return trials
}

// spread makes trials of cuts: one of each, or of several that are far from each other in their order.
func (s story) spread(cuts []cut) []trial {
	n := len(cuts)
	if !whole() {
		n = (n + together - 1) / together
	}
	trials := make([]trial, n)
	for i := range trials {
		trials[i] = trial{story: s, name: fmt.Sprintf("%s/%04d", s.name, i+1)}
	}
	for i, c := range cuts {
		trials[i%n].cuts = append(trials[i%n].cuts, c)
	}
	return trials
}

// sample is which of the times of a text is taken, when not all are.
func sample(x sent, w way) int {
	return 1 + (hash(x)+int(w))%x.times
}

func hash(x sent) int {
	h := fnv.New32a()
	h.Write([]byte(x.text)) // cannot fail
	return int(h.Sum32() >> 1)
}

// shortWay is the only way in which a message is cut in the short run.
func shortWay(x sent) way { return []way{before, after}[hash(x)%2] }

// run tells the story with the cuts and compares. Where a lease was lost, it may be that the machine stood still;
// then it is told again.
func (x trial) run(t *testing.T, want []string, found *findings) {
	t.Helper()
	var got ending
	var seen []string
	for range 3 {
		got = x.story.end(t, x.cuts)
		seen = append(got.told, difference(want, got.digest)...)
		if !got.slow || len(seen) == 0 || t.Failed() {
			break
		}
	}
	slices.Sort(seen)
	found.add(t, x, slices.Compact(seen), got)
}

// findings are what the cuts have led to.
type findings struct {
	mu        sync.Mutex
	done      int
	cuts      int
	unreached []string
	met       map[int]int // how often each exception has occurred
}

// add takes in how one trial ended.
func (f *findings) add(t *testing.T, x trial, seen []string, got ending) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.done++
	f.cuts += len(x.cuts)
	for _, c := range got.left {
		f.unreached = append(f.unreached, x.name+": "+c.String())
	}
	unlisted := f.unlisted(x, seen)
	assert.Truef(t, len(unlisted) == 0, "%s\n%s\nthe log:\n%s", x.cuts, strings.Join(unlisted, "\n"), got.log)
}

// unlisted are those of the things seen for which no exception is listed.
func (f *findings) unlisted(x trial, seen []string) []string {
	return slices.DeleteFunc(seen, func(what string) bool {
		for i, e := range exceptions {
			if e.covers(x, what) {
				if f.met == nil {
					f.met = map[int]int{}
				}
				f.met[i]++
				return true
			}
		}
		return false
	})
}

// check says what is wrong with the whole of it.
func (f *findings) check(t *testing.T, planned int) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	t.Logf("%d of %d cuts were not reached:\n%s", len(f.unreached), f.cuts, strings.Join(f.unreached, "\n"))
	assert.True(t, f.done != planned || len(f.unreached) <= f.cuts/5,
		"a process does not send what it sent when it was undisturbed; the sample says too little")
	if !whole() || f.done < planned {
		return
	}
	for i, e := range exceptions {
		assert.Truef(t, f.met[i] != 0,
			"the exception %q has not occurred: take it out of the table and out of docs/exceptions.md", e.name)
	}
}
