package stats_test

import (
	"math"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// simulate returns the number of passes in n simulated trials of a case.
func simulate(r *rand.Rand, p float64, n int) (c int) {
	for range n {
		if r.Float64() < p {
			c++
		}
	}
	return c
}

func TestWilsonCoverage(t *testing.T) {
	const suites, cases, trials = 10_000, 10, 20
	r := rand.New(rand.NewPCG(1, 2))
	covered := 0
	for range suites {
		for range cases {
			p := r.Float64()
			i := stats.Wilson(simulate(r, p, trials), trials)
			if i.Low <= p && p <= i.High {
				covered++
			}
		}
	}
	if got := float64(covered) / (suites * cases); math.Abs(got-0.95) > 0.01 {
		t.Errorf("intervals cover the rate in %.4f of the cases, want 0.95 within 0.01", got)
	}
}

func TestPassK(t *testing.T) {
	for _, tc := range []struct {
		c, n, k int
		want    float64
	}{{5, 5, 5, 1}, {4, 5, 5, 0}, {4, 5, 1, 0.8}, {4, 5, 2, 0.6}, {0, 5, 1, 0}} {
		got := stats.PassK(tc.c, tc.n, tc.k)
		assert.Truef(t, math.Abs(got-tc.want) <= 1e-12, "PassK(%d, %d, %d) = %g, want %g", tc.c, tc.n, tc.k, got, tc.want)
	}
	got := stats.PassK(5, 5, 6)
	assert.Truef(t, math.IsNaN(got), "PassK(5, 5, 6) = %g, want none", got)
	r := rand.New(rand.NewPCG(3, 4))
	sum := 0.0
	for range 10_000 {
		sum += stats.PassK(simulate(r, 0.8, 10), 10, 3)
	}
	got = sum / 10_000
	assert.Truef(t, math.Abs(got-0.512) <= 0.01, "the mean of PassK is %.3f, want 0.8^3 = 0.512", got)
}

// trialCounts are the numbers of trials per case after which decide compares.
var trialCounts = []int{5, 10, 20, 40}

// decide simulates a suite of 20 cases, with further trials until the comparison has an answer. It also returns the
// number of trials per case.
func decide(r *rand.Rand, before, after float64) (stats.Answer, int) {
	pairs := make([]stats.Pair, 20)
	trials := 0
	for _, target := range trialCounts {
		for i := range pairs {
			pairs[i].Old.Passed += simulate(r, before, target-trials)
			pairs[i].New.Passed += simulate(r, after, target-trials)
			pairs[i].Old.Trials, pairs[i].New.Trials = target, target
		}
		trials = target
		if got := stats.Compare(pairs, stats.Plan{Looks: len(trialCounts)}); got.Answer != stats.Undecided {
			return got.Answer, trials
		}
	}
	return stats.Undecided, trials
}

func TestCompareErrorRates(t *testing.T) {
	const suites = 1000
	r := rand.New(rand.NewPCG(5, 6))
	found, wrong, trials := 0, 0, 0
	for range suites {
		got, made := decide(r, 0.8, 0.7)
		switch got {
		case stats.Worse:
			found++
			trials += made
		case stats.Better:
			wrong++
		case stats.NotWorse, stats.Undecided:
		}
	}
	equal := map[stats.Answer]int{}
	for range suites {
		got, _ := decide(r, 0.8, 0.8)
		equal[got]++
	}
	t.Logf("0.8 against 0.7: worse in %d of %d suites of 20 cases, after %.1f trials per case on average; better in %d. "+
		"0.8 against 0.8: worse in %d, better in %d", found, suites, float64(trials)/float64(found), wrong,
		equal[stats.Worse], equal[stats.Better])
	assert.Truef(t, found >= 800 && wrong == 0,
		"a loss of 0.1 was found in %d of %d suites, and called better in %d", found, suites, wrong)
	if different := equal[stats.Worse] + equal[stats.Better]; different > suites*5/100 {
		t.Errorf("equal models differed in %d of %d suites, want at most 5 %%", different, suites)
	}
}

func TestControlErrorRate(t *testing.T) {
	const suites = 1000
	r := rand.New(rand.NewPCG(7, 8))
	wrong := 0
	for range suites {
		passesByCase := make([][]bool, 20)
		for i := range passesByCase {
			for range 10 {
				passesByCase[i] = append(passesByCase[i], r.Float64() < float64(i%4+1)/5)
			}
		}
		if got := stats.Control(passesByCase).Answer; got == stats.Worse || got == stats.Better {
			wrong++
		}
	}
	assert.Truef(t, wrong <= suites*5/100,
		"a run differs from itself in %d of %d suites, want at most 5 %%", wrong, suites)
}

func TestCompareAnswers(t *testing.T) {
	one := stats.Pair{Old: stats.Count{Passed: 5, Trials: 5}, New: stats.Count{Passed: 0, Trials: 5}}
	for name, tc := range map[string]struct {
		pairs []stats.Pair
		plan  stats.Plan
		want  stats.Answer
	}{
		"no cases":   {nil, stats.Plan{Margin: 0.05}, stats.Undecided},
		"one case":   {[]stats.Pair{one}, stats.Plan{Margin: 0.05}, stats.Undecided},
		"six cases":  {[]stats.Pair{one, one, one, one, one, one}, stats.Plan{Margin: 0.05}, stats.Worse},
		"two looks":  {[]stats.Pair{one, one, one, one, one, one}, stats.Plan{Looks: 2}, stats.Undecided},
		"equal":      {equalPairs(20), stats.Plan{Margin: 0.05}, stats.NotWorse},
		"no margin":  {equalPairs(20), stats.Plan{}, stats.Undecided},
		"no trials":  {make([]stats.Pair, 20), stats.Plan{Margin: 0.05}, stats.Undecided},
		"small loss": {slightlyWorse(200, 20), stats.Plan{Margin: 0.05}, stats.NotWorse},
		"some loss":  {slightlyWorse(200, 20), stats.Plan{Margin: 0.02}, stats.Worse},
		"few equals": {equalPairs(5), stats.Plan{Margin: 0.05}, stats.Undecided},
	} {
		t.Run(name, func(t *testing.T) {
			got := stats.Compare(tc.pairs, tc.plan)
			assert.Truef(t, got.Answer == tc.want, "the answer is %s, want %s: %+v", got.Answer, tc.want, got)
		})
	}
}

func equalPairs(n int) []stats.Pair {
	pairs := make([]stats.Pair, n)
	for i := range pairs {
		pairs[i].Old, pairs[i].New = stats.Count{Passed: 5, Trials: 5}, stats.Count{Passed: 5, Trials: 5}
	}
	return pairs
}

// slightlyWorse returns pairs of which some lose one trial in five.
func slightlyWorse(n, worse int) []stats.Pair {
	pairs := equalPairs(n)
	for i := range worse {
		pairs[i].New.Passed--
	}
	return pairs
}

// upperTail counts sums; here every combination of signs is tried.
func TestPermutationIsExact(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	for n := 1; n <= 10; n++ {
		pairs := make([]stats.Pair, n)
		for i := range pairs {
			pairs[i] = stats.Pair{
				Old: stats.Count{Passed: r.IntN(6), Trials: 5}, New: stats.Count{Passed: r.IntN(5), Trials: 4},
			}
		}
		size := func(i int) int { return 5*pairs[i].New.Passed - 4*pairs[i].Old.Passed } // in twentieths
		observed, atLeast := 0, 0
		for i := range pairs {
			observed += size(i)
		}
		for signs := range 1 << n {
			sum := 0
			for i := range pairs {
				sum += size(i) * (signs>>i&1*2 - 1)
			}
			if sum >= observed {
				atLeast++
			}
		}
		got, want := stats.Compare(pairs, stats.Plan{}).PBetter, float64(atLeast)/float64(int(1)<<n)
		assert.Truef(t, math.Abs(got-want) < 1e-12, "%d cases: p is %g, want %g: %+v", n, got, want, pairs)
	}
}

func TestDifferenceCoverage(t *testing.T) {
	const suites = 100
	r := rand.New(rand.NewPCG(9, 10))
	covered := 0
	for range suites {
		pairs := make([]stats.Pair, 12)
		for i := range pairs {
			pairs[i] = stats.Pair{
				Old: stats.Count{Passed: simulate(r, 0.8, 5), Trials: 5}, New: stats.Count{Passed: simulate(r, 0.7, 5), Trials: 5},
			}
		}
		if i := stats.Difference(pairs, stats.Plan{}); i.Low <= -0.1 && -0.1 <= i.High {
			covered++
		}
	}
	got := float64(covered) / suites
	assert.Truef(t, got >= 0.92, "the interval covers the difference in %.3f of the suites, want about 0.95", got)
}

// Pages compute the interval at each refresh, so 500 cases must not cost seconds. The allocated memory is that of the
// distributions, and the time grows with it.
func TestDifferenceOfManyCases(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	pairs := make([]stats.Pair, 500)
	for i := range pairs {
		pairs[i] = stats.Pair{
			Old: stats.Count{Passed: simulate(r, 0.8, 1), Trials: 1}, New: stats.Count{Passed: simulate(r, 0.7, 1), Trials: 1},
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	got := stats.Difference(pairs, stats.Plan{})
	runtime.ReadMemStats(&after)
	allocated := after.TotalAlloc - before.TotalAlloc
	assert.Truef(t, allocated < 4<<20, "the interval of 500 cases allocates %d bytes, want less than 4 MiB", allocated)
	// For so many cases the mean is normal.
	mean := stats.Compare(pairs, stats.Plan{}).Difference
	sum := 0.0
	for _, p := range pairs {
		d := p.New.Rate() - p.Old.Rate() - mean
		sum += d * d
	}
	half := 1.96 * math.Sqrt(sum) / float64(len(pairs))
	assert.Truef(t, math.Abs(got.Low-(mean-half)) < 0.004 && math.Abs(got.High-(mean+half)) < 0.004,
		"the interval is %+v, want about %.3f to %.3f", got, mean-half, mean+half)
}
