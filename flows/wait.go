package flows

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/requests"
)

// maxRetries is how often a wait with onTimeout: retry is begun again.
const maxRetries = 3

// classDelay is the class of a delay whose time makes no sense.
const classDelay = "delay"

// awaited is how a wait ended.
type awaited struct {
	out  executions.Outcome
	data any     // of the event
	late bool    // it timed out, and the flow goes on
	end  *ending // a timeoutAction ended the flow
}

// await waits, and does at a timeout what the action says: its timeoutActions, and then onTimeout.
func (m *machine) await(ctx context.Context, r ready, w executions.WaitFor) (awaited, error) {
	for try := 0; ; try++ {
		out, err := executions.Wait(ctx, "wait", w.About(m.about(r)))
		if err != nil {
			return awaited{}, err
		}
		if !out.TimedOut {
			data, err := parsed(out.Data)
			return awaited{out: out, data: data}, err
		}
		again, got, err := m.late(ctx, r, try)
		if err != nil || !again {
			return got, err
		}
	}
}

// about is what a wait shows to people.
func (m *machine) about(r ready) map[string]any {
	about := map[string]any{"action": r.key, "onTimeout": r.onTimeout}
	if r.timeout > 0 {
		about["timeout"] = inWords(r.timeout)
	}
	if m.thread != "" {
		about["threadId"] = m.thread
	}
	return about
}

// late does what an action says about a timeout. again means that it waits once more.
func (m *machine) late(ctx context.Context, r ready, try int) (again bool, got awaited, err error) {
	if err := m.set(ctx, map[string]any{"timedOut": true}); err != nil {
		return false, awaited{}, err
	}
	ended, err := m.block(executions.Scope(ctx, fmt.Sprintf("timeout %d", try+1)), r.timeoutActions)
	switch {
	case err != nil || ended != nil:
		return false, awaited{late: true, end: ended}, err
	case r.onTimeout == onContinue:
		return false, awaited{late: true}, nil
	case r.onTimeout == onRetry && try < maxRetries:
		return true, awaited{}, nil
	}
	times := ""
	if try > 0 {
		times = fmt.Sprintf(", %d times", try+1)
	}
	standard, _ := executions.Limits(r.Waits)
	timeout := inWords(standard)
	if r.timeout > 0 {
		timeout = inWords(r.timeout)
	}
	return false, awaited{}, failure(classTimedOut, "no %s came within %s%s", r.Waits, timeout, times)
}

// settle is the record of an action that has waited: the variables of its kind, null where the event has none or did not
// come.
func (a awaited) settle(r ready) (result, error) {
	found, err := requests.Variables(r.Waits, a.out)
	if err != nil {
		return result{}, failure("answer", "%s", err)
	}
	set := map[string]any{"timedOut": a.late}
	for _, name := range sets[r.Waits] {
		set[name] = found[name]
	}
	if r.save != "" {
		set[r.save] = a.data
	}
	return result{Set: set, End: a.end}, nil
}

// sets are the variables that a wait of a kind sets.
var sets = map[string][]string{
	"response": {"lastResponse"}, "document": {"documentUrls", "documents"}, "signature": {"signedDocumentUrl", "signedAt"},
	"test": {"testScore", "testResult"},
}

func (m *machine) waitForResponse(ctx context.Context, r ready) (result, error) {
	if m.thread == "" {
		return result{}, noThread()
	}
	got, err := m.await(ctx, r, executions.Response(m.thread, r.timeout))
	if err != nil {
		return result{}, err
	}
	got.data = object(got.data)["content"]
	return got.settle(r)
}

func noThread() error {
	return failure("thread", "this execution has no thread to talk in; start it with one")
}

func (m *machine) waitForEvent(ctx context.Context, r ready) (result, error) {
	key := strings.TrimSpace(inText(r.args["key"]))
	if key == "" {
		return result{}, failure(classTemplate, "key: is empty")
	}
	got, err := m.await(ctx, r, executions.Event(key, r.timeout))
	if err != nil {
		return result{}, err
	}
	settled, err := got.settle(r)
	if err == nil {
		settled.Set["eventData"] = got.data
	}
	return settled, err
}

// delayLength checks how long a delay is.
func delayLength(text string) (time.Duration, error) {
	d, err := parseLength(text)
	if err == nil && (d <= 0 || d > executions.MaxWait) {
		err = fmt.Errorf("%s is not allowed: a delay lasts more than 0 and at most %s", text, inWords(executions.MaxWait))
	}
	return d, err
}

func (m *machine) delay(ctx context.Context, r ready) (result, error) {
	length, err := m.delayFor(ctx, r)
	if err != nil || length <= 0 {
		return result{}, err
	}
	_, err = executions.Wait(ctx, "wait", executions.Delay(length).About(map[string]any{"action": r.key}))
	return result{}, err
}

// delayFor is how long a delay lasts; 0 when its time has passed.
func (m *machine) delayFor(ctx context.Context, r ready) (time.Duration, error) {
	if given, ok := r.args["duration"]; ok {
		length, err := delayLength(inText(given))
		if err != nil {
			return 0, failure(classDelay, "duration: %s", err)
		}
		return length, nil
	}
	until, err := time.Parse(time.RFC3339, inText(r.args["until"]))
	if err != nil {
		return 0, failure(classDelay, "until: %q is not a time: write 2026-01-31T09:00:00Z", inText(r.args["until"]))
	}
	now, err := executions.Now(ctx)
	if err != nil {
		return 0, err
	}
	if length := until.Sub(now); length <= executions.MaxWait {
		return length, nil
	}
	return 0, failure(classDelay, "until: %s is more than %s away", until.Format(time.RFC3339), inWords(executions.MaxWait))
}
