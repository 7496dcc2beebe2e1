// Package stats compares the results of evals: a number of passes per case.
//
// [Wilson] is the 95 % interval of a case's pass rate, and [PassK] the chance that k trials in a row pass (pass^k,
// arXiv 2406.12045). [Compare] compares two versions by the differences of their rates per case (arXiv 2411.00640).
// It is a sign-flip permutation test: if both versions are equal, every difference is as likely positive as negative.
// The null distribution is computed, not sampled. A comparison may be repeated as trials arrive. The number of looks
// must be declared beforehand, because each look gets an equal part of the error rate.
//
// Cases that do not differ count as evidence for [NotWorse], and narrow [Difference]. If the old version passes nearly
// every trial, few trials therefore prove little: a version that loses the margin of 0.05 is called not worse in 22 %
// of suites of 6 cases with 5 trials, and in 3 % with 20 cases.
//
// The answer can be undecided. [Control] compares a run with itself; it finds a difference in 5 % of runs at most.
//
// Everything here is pure and safe for concurrent use.
package stats

import (
	"math"
	"slices"
)

// Alpha is the rate of wrong differences, and z95 the quantile of a 95 % interval.
const (
	Alpha = 0.05
	z95   = 1.959963984540054
)

// Interval is a confidence interval of 95 %, or of the level of a [Plan].
type Interval struct {
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// Wilson returns the Wilson score interval of c passes in n trials; [0, 1] without trials.
func Wilson(c, n int) Interval {
	if n <= 0 {
		return Interval{0, 1}
	}
	p, m := float64(c)/float64(n), float64(n)
	center := (p + z95*z95/(2*m)) / (1 + z95*z95/m)
	half := z95 / (1 + z95*z95/m) * math.Sqrt(p*(1-p)/m+z95*z95/(4*m*m))
	return Interval{max(0, center-half), min(1, center+half)}
}

// PassK estimates the chance that k trials all pass, from c passes in n trials: C(c,k)/C(n,k). It returns NaN for k > n
// or k < 1.
func PassK(c, n, k int) float64 {
	if k < 1 || k > n {
		return math.NaN()
	}
	chance := 1.0
	for i := range k {
		chance *= float64(max(c-i, 0)) / float64(n-i)
	}
	return chance
}

// Count has the passes of a case.
type Count struct {
	Passed int `json:"passed"`
	Trials int `json:"trials"`
}

// Rate returns the share of passes; 0 without trials.
func (c Count) Rate() float64 {
	if c.Trials == 0 {
		return 0
	}
	return float64(c.Passed) / float64(c.Trials)
}

// Pair has the results of one case under the old and the new version.
type Pair struct{ Old, New Count }

// Answer is the result of a comparison.
type Answer string

// The answers. NotWorse means that the new version loses less than the margin, even if it is proven to lose something.
const (
	Better    Answer = "better"
	NotWorse  Answer = "not worse"
	Worse     Answer = "worse"
	Undecided Answer = "undecided"
)

// Plan declares a comparison beforehand. Looks is the number of comparisons; the error rate is divided by it, and 0
// means one. Margin is the accepted loss of the mean pass rate.
type Plan struct {
	Margin float64
	Looks  int
}

// Comparison has the mean difference of the pass rates, new minus old, and its one-sided p-values.
type Comparison struct {
	Answer     Answer  `json:"answer"`
	Cases      int     `json:"cases"`
	Difference float64 `json:"difference"`
	PWorse     float64 `json:"p_worse"`
	PBetter    float64 `json:"p_better"`
	PNotWorse  float64 `json:"p_not_worse"` // against a loss of the margin
}

// Compare compares the cases that have trials under both versions.
func Compare(pairs []Pair, plan Plan) Comparison {
	diffs, alpha := differences(pairs), plan.alpha()
	c := Comparison{Answer: Undecided, Cases: len(diffs), PWorse: 1, PBetter: 1, PNotWorse: 1}
	if len(diffs) == 0 {
		return c
	}
	c.Difference = mean(diffs)
	c.PBetter, c.PWorse = upperTail(diffs), upperTail(negated(diffs))
	c.PNotWorse = upperTail(shifted(diffs, plan.Margin))
	switch {
	case c.PBetter <= alpha:
		c.Answer = Better
	case plan.Margin > 0 && c.PNotWorse <= alpha:
		c.Answer = NotWorse
	case c.PWorse <= alpha:
		c.Answer = Worse
	}
	return c
}

// alpha returns the error rate of one look in one direction.
func (p Plan) alpha() float64 { return Alpha / 2 / float64(max(p.Looks, 1)) }

// Control compares one half of a run's trials with the other (A/A). passesByCase has the trials of each case in order.
// The answers Better and Worse are errors of the method or of the cases, for example a model that changes meanwhile.
func Control(passesByCase [][]bool) Comparison {
	pairs := make([]Pair, len(passesByCase))
	for i, trials := range passesByCase {
		for j, passed := range trials[:len(trials)/2*2] {
			half := &pairs[i].Old
			if (i+j)%2 == 1 { // alternate by case, so that an effect of the order affects both halves
				half = &pairs[i].New
			}
			half.Trials++
			if passed {
				half.Passed++
			}
		}
	}
	return Compare(pairs, Plan{})
}

// differences returns the differences of the rates, without cases that lack trials.
func differences(pairs []Pair) (diffs []float64) {
	for _, p := range pairs {
		if p.Old.Trials > 0 && p.New.Trials > 0 {
			diffs = append(diffs, p.New.Rate()-p.Old.Rate())
		}
	}
	return diffs
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

func negated(values []float64) []float64 {
	negative := make([]float64, len(values))
	for i, v := range values {
		negative[i] = -v
	}
	return negative
}

func shifted(values []float64, by float64) []float64 {
	moved := make([]float64, len(values))
	for i, v := range values {
		moved[i] = v + by
	}
	return moved
}

// grid is the resolution of a difference in the null distribution. It is divisible by 1 to 10, so the rates of up to 10
// trials are exact.
const grid = 2520

// upperTail returns the chance that the differences with random signs have at least the observed sum. It counts the
// sums on a grid, which makes the distribution exact up to rounding.
func upperTail(diffs []float64) float64 {
	sizes, sum, total := make([]int, 0, len(diffs)), 0, 0
	for _, d := range diffs {
		size := int(math.Round(d * grid))
		sum += size
		if size = max(size, -size); size > 0 {
			sizes, total = append(sizes, size), total+size
		}
	}
	unit := 0
	for _, size := range sizes {
		unit = gcd(unit, size)
	}
	if unit == 0 {
		return 1
	}
	// With s of the sizes positive, the sum of signs is 2s - total. chance[s] is the probability of s.
	slices.Sort(sizes) // small sizes first: the inner loop grows with the sum
	chance, maxSum := make([]float64, total/unit+1), 0
	chance[0] = 1
	for _, size := range sizes {
		step := size / unit
		for s := maxSum; s >= 0; s-- {
			chance[s] /= 2
			chance[s+step] += chance[s]
		}
		maxSum += step
	}
	tail := 0.0
	for s := (total + sum) / unit / 2; s < len(chance); s++ {
		tail += chance[s]
	}
	return min(tail, 1)
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Difference returns the confidence interval of the mean difference, at the level of the plan. It inverts the test: the
// interval has the differences that the test does not reject. With many cases it rounds their differences, so near the
// level the interval and the p-value may disagree. With few cases the test rejects nothing: the interval is [-1, 1].
func Difference(pairs []Pair, plan Plan) Interval {
	diffs, alpha := differences(pairs), plan.alpha()
	if math.Pow(0.5, float64(len(diffs))) > alpha {
		return Interval{-1, 1}
	}
	low := bisect(func(by float64) bool { return upperTail(coarse(shifted(diffs, -by))) > alpha })
	high := bisect(func(by float64) bool { return upperTail(coarse(negated(shifted(diffs, by)))) > alpha })
	return Interval{low, 0 - high} // not -0
}

// coarse rounds values to every n-th point of the grid, which upperTail counts faster. n grows with the number of
// values. It adds the rest of each value to the next one, so the sum stays.
func coarse(values []float64) []float64 {
	step, rest := float64(len(values)/8+1)/grid, 0.0
	rounded := make([]float64, len(values))
	for i, v := range values {
		rounded[i] = math.Round((v+rest)/step) * step
		rest += v - rounded[i]
	}
	return rounded
}

// bisect returns the smallest accepted value in [-1, 1], to a thousandth.
func bisect(accept func(float64) bool) float64 {
	low, high := -1.0, 1.0
	for high-low > 0.001 {
		if middle := (low + high) / 2; accept(middle) {
			high = middle
		} else {
			low = middle
		}
	}
	return math.Round(high*1000) / 1000
}
