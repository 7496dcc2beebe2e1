package flows

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// maxRetries bounds the repeats of a wait with onTimeout: retry.
const maxRetries = 3

// classDelay is the error class of an invalid delay.
const classDelay = "delay"

// awaited is the outcome of a wait.
type awaited struct {
	out      executions.Outcome
	data     any     // of the event
	timedOut bool    // it timed out, and the flow continues
	end      *ending // a timeoutAction ended the flow
}

// await waits for the event of an action. At a timeout it runs the timeoutActions and applies onTimeout.
func (m *machine) await(ctx context.Context, r ready, w executions.WaitFor) (awaited, error) {
	for try := 0; ; try++ {
		out, err := executions.Wait(ctx, "wait", w.WithData(m.describeWait(r)))
		if err != nil {
			return awaited{}, err
		}
		if !out.TimedOut {
			data, err := decodeNormal(out.Data)
			return awaited{out: out, data: data}, err
		}
		again, got, err := m.handleTimeout(ctx, r, try)
		if err != nil || !again {
			return got, err
		}
	}
}

// describeWait returns a wait's description for people.
func (m *machine) describeWait(r ready) map[string]any {
	about := map[string]any{"action": r.key, "onTimeout": r.onTimeout}
	if r.timeout > 0 {
		about["timeout"] = formatDuration(r.timeout)
	}
	if m.thread != "" {
		about["threadId"] = m.thread
	}
	return about
}

// handleTimeout handles a timeout. again means that the wait repeats.
func (m *machine) handleTimeout(ctx context.Context, r ready, try int) (again bool, got awaited, err error) {
	if err := m.set(ctx, map[string]any{"timedOut": true}); err != nil {
		return false, awaited{}, err
	}
	ended, err := m.block(executions.Scope(ctx, fmt.Sprintf("timeout %d", try+1)), r.timeoutActions)
	switch {
	case err != nil || ended != nil:
		return false, awaited{timedOut: true, end: ended}, err
	case r.onTimeout == onContinue:
		return false, awaited{timedOut: true}, nil
	case r.onTimeout == onRetry && try < maxRetries:
		return true, awaited{}, nil
	}
	times := ""
	if try > 0 {
		times = fmt.Sprintf(", %d times", try+1)
	}
	fallback, _ := executions.Limits(r.Waits)
	timeout := formatDuration(fallback)
	if r.timeout > 0 {
		timeout = formatDuration(r.timeout)
	}
	return false, awaited{}, failure(classTimedOut, "no %s came within %s%s", r.Waits, timeout, times)
}

// settle returns the result of a waiting action. It sets the variables of its kind of wait; those that the event lacks
// are null.
func (a awaited) settle(r ready) (result, error) {
	found, err := requests.Variables(r.Waits, a.out)
	if err != nil {
		return result{}, failure("answer", "%s", err)
	}
	set := map[string]any{"timedOut": a.timedOut}
	for _, name := range waitVariables[r.Waits] {
		set[name] = found[name]
	}
	if r.save != "" {
		set[r.save] = a.data
	}
	return result{Set: set, End: a.end}, nil
}

// waitVariables are the variables that each kind of wait sets.
var waitVariables = map[string][]string{
	"response":  {"lastResponse"},
	"document":  {"documentUrls", "documents"},
	"signature": {"signedDocumentUrl", "signedAt"},
	"test":      {"testScore", "testResult"},
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

// NoThread is the error of a flow that needs a thread, in an execution without one.
const NoThread = "this execution has no thread to talk in; start the flow with one (--thread, or thread_id)"

func noThread() error { return failure("thread", NoThread) }

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

// validateDelay validates the length of a delay.
func validateDelay(text string) (time.Duration, error) {
	d, err := parseDuration(text)
	if err == nil && (d <= 0 || d > executions.MaxWait) {
		err = fmt.Errorf("%s is not allowed: a delay lasts more than 0 and at most %s", text,
			formatDuration(executions.MaxWait))
	}
	return d, err
}

func (m *machine) delay(ctx context.Context, r ready) (result, error) {
	length, err := m.remainingDelay(ctx, r)
	if err != nil || length <= 0 {
		return result{}, err
	}
	_, err = executions.Wait(ctx, "wait", executions.Delay(length).WithData(map[string]any{"action": r.key}))
	return result{}, err
}

// remainingDelay returns the remaining time of a delay; 0 if it has passed.
func (m *machine) remainingDelay(ctx context.Context, r ready) (time.Duration, error) {
	if given, ok := r.args["duration"]; ok {
		length, err := validateDelay(inText(given))
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
	return 0, failure(classDelay, "until: %s is more than %s away", until.Format(time.RFC3339),
		formatDuration(executions.MaxWait))
}

// postMessage sends a message in the thread, over the action's channel or the flow's.
func (m *machine) postMessage(ctx context.Context, r ready, content string) (threads.SendResult, error) {
	if m.thread == "" {
		return threads.SendResult{}, noThread()
	}
	if strings.TrimSpace(content) == "" {
		return threads.SendResult{}, failure(classTemplate, "message: is empty")
	}
	out := threads.Outgoing{ThreadID: m.thread, Content: content, Channel: m.flow.channel, Target: m.flow.target}
	if channel := inText(r.args["channel"]); channel != "" && channel != out.Channel {
		out.Channel, out.Target = channel, ""
	}
	out.Target = cmp.Or(inText(r.args["target"]), out.Target)
	return threads.Send(ctx, out)
}

func (m *machine) sendMessage(ctx context.Context, r ready) (result, error) {
	sent, err := m.postMessage(ctx, r, inText(r.args["message"]))
	if err != nil || r.save == "" {
		return result{}, err
	}
	return result{Set: map[string]any{r.save: sent}}, nil
}

// openThread gives a chat key access to the thread, or creates a join token for a visitor.
func (m *machine) openThread(ctx context.Context, r ready) (result, error) {
	if m.thread == "" {
		return result{}, noThread()
	}
	if key := inText(r.args["key"]); key != "" {
		name := cmp.Or(inText(r.args["name"]), m.thread)
		_, err := executions.StepTx(ctx, "open", func(ctx context.Context, tx pgx.Tx) (string, error) {
			return threads.Grant(ctx, tx, m.thread, threads.Key(key), name, "flow "+m.exec.Flow)
		})
		if errors.Is(err, threads.ErrTaken) || errors.Is(err, threads.ErrInvalid) {
			err = failure("thread", "the key %s cannot call the thread %s: %s", key, name, err)
		}
		return result{}, err
	}
	life := threads.DefaultTokenLife
	if given, has := r.args["expires"]; has {
		var err error
		if life, err = parseDuration(inText(given)); err != nil || life <= 0 || life > threads.MaxTokenLife {
			return result{}, failure("thread", "expires: %q is not a duration of more than 0 and at most 30d", inText(given))
		}
	}
	token, err := executions.StepTx(ctx, "invite", func(ctx context.Context, tx pgx.Tx) (threads.Token, error) {
		return threads.Invite(ctx, tx, threads.Invitation{
			ThreadID: m.thread, Reusable: r.flag("reusable", false), Life: life, ExecutionID: m.exec.ID,
			By: "flow " + m.exec.Flow,
		})
	})
	if err != nil {
		return result{}, err
	}
	return result{Set: map[string]any{cmp.Or(r.save, "joinToken"): token.Secret}}, nil
}

// request asks a person for documents, a signature or a test, announces it in the thread, and waits for it.
func (m *machine) request(ctx context.Context, r ready) (result, error) {
	asked, fallback := r.requestSpec()
	id, err := requests.Ask(ctx, "request", asked)
	if err != nil {
		return result{}, err
	}
	if err := m.announceRequest(ctx, r, id, fallback); err != nil {
		return result{}, err
	}
	if !r.flag("wait", true) {
		set := map[string]any{"requestId": id}
		if r.save != "" {
			set[r.save] = id
		}
		return result{Set: set}, nil
	}
	wait, err := requests.WaitFor(r.Waits, id, r.timeout)
	if err != nil {
		return result{}, err
	}
	got, err := m.await(ctx, r, wait)
	if err != nil {
		return result{}, err
	}
	settled, err := got.settle(r)
	if err != nil {
		return result{}, err
	}
	settled.Set["requestId"] = id
	if r.Waits == requests.Signature && !got.timedOut && settled.Set["signedAt"] == nil { // the event does not contain it
		now, err := executions.Now(ctx)
		if err != nil {
			return result{}, err
		}
		settled.Set["signedAt"] = now.Format(time.RFC3339)
	}
	return settled, nil
}

// requestSpec returns an action's request and its default message.
func (r ready) requestSpec() (requests.Request, string) {
	switch r.Waits {
	case requests.Document:
		var items []string
		if list, ok := r.args["documents"].([]any); ok {
			for _, item := range list {
				inner, isList := item.([]any) // documents: "{{wanted}}"
				if !isList {
					inner = []any{item}
				}
				for _, one := range inner {
					items = append(items, inText(one))
				}
			}
		}
		title := strings.Join(items, ", ")
		return requests.Request{Kind: r.Waits, Title: title, Items: items}, "Please send us: " + title + "."
	case requests.Signature:
		document := inText(r.args["document"])
		return requests.Request{Kind: r.Waits, Title: document, Details: map[string]any{"document": document}},
			"Please sign this document: " + document
	}
	test := inText(r.args["test"])
	return requests.Request{Kind: r.Waits, Title: test, Details: map[string]any{"test": test}},
		"A test is waiting for you: " + test
}

// announceRequest posts the message of a request in the thread: that of the action, or content. Without a thread and a
// message of the action, nothing is posted.
func (m *machine) announceRequest(ctx context.Context, r ready, id, content string) error {
	own, has := r.given["message"]
	if !has && m.thread == "" {
		return nil
	}
	if has {
		vars := maps.Clone(m.vars)
		vars["requestId"] = id
		value, err := fill(own, vars)
		if err != nil {
			return wrapped("message", err)
		}
		content = inText(value)
	}
	_, err := m.postMessage(ctx, r, content)
	return err
}
