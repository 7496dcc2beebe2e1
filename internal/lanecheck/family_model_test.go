//go:build unix

package lanecheck_test

type family struct{ depth int }

// parkedEnd is a moment in the year 8307, microseconds: leases that last longer are parked.
const parkedEnd = 200_000_000_000_000_000

func (f family) without() family { return family{} }

func (s state) turned(o *op, now int64) (bool, state)          { return false, s }
func (s state) borrowed(o *op, lo, hi int64) (bool, state)     { return false, s }
func (s state) borrowedUnheard(o *op, now int64) (state, bool) { return s, false }
func (s state) returned(o *op, now int64) (bool, state)        { return false, s }
func (s state) giveBack(now, until int64) state                { return s }
