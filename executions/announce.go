package executions

import "context"

// announce says that the run begins, or goes on. A wait may have been ended by a sweep or by plain SQL, where nobody could
// say so, hence what ended it is said here, by whoever goes on.
func (r *run) announce(ctx context.Context) {
	about := []any{"flow", r.exec.Flow, "claim", r.exec.Claim, "checkpoints", len(r.checkpoints)}
	if r.exec.Claim == 1 {
		r.e.log.InfoContext(ctx, "execution started", about...)
		return
	}
	if step, out, ok := r.lastWait(); ok {
		about = append(about, "step", step, "event", out.Event, "timed_out", out.TimedOut)
	}
	r.e.log.InfoContext(ctx, "execution resumed", about...)
	r.e.log.InfoContext(ctx, "continuing from checkpoint", "checkpoints", len(r.checkpoints))
}

// lastWait is the wait whose end made the execution ready: its outcome was recorded under the number that the park had
// made, and this claim is the next.
func (r *run) lastWait() (step string, out Outcome, ok bool) {
	for _, c := range r.checkpoints {
		if c.Claim != r.exec.Claim-1 || c.Failed {
			continue
		}
		if out, err := decode[Outcome](c.Output); err == nil && out.Event != "" {
			return c.Step, out, true
		}
	}
	return "", Outcome{}, false
}
