package executions

import (
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
)

// Observer is told what happens to executions in this process, for metrics. Its methods must return at once.
type Observer interface {
	// Began and Left frame a run: a claim that this process works on.
	Began(x Execution)
	Left(x Execution)
	// Lost says that the claim went elsewhere under the run.
	Lost(x Execution)
	// Ended says that the run has written the end of its execution, or that it was cancelled under it.
	Ended(x Execution, status Status)
	// Closed says that the end of a step's activity was written.
	Closed(e activity.Entry, o activity.Outcome, took time.Duration)
}

// unobserved is the Observer of an engine that has none.
type unobserved struct{}

func (unobserved) Began(Execution)                                        {}
func (unobserved) Left(Execution)                                         {}
func (unobserved) Lost(Execution)                                         {}
func (unobserved) Ended(Execution, Status)                                {}
func (unobserved) Closed(activity.Entry, activity.Outcome, time.Duration) {}
