package flows

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// maxRetries bounds the repeats of a wait with onTimeout: retry.
const maxRetries = 3

// classDelay is the error class of an invalid delay.
const classDelay = "delay"

// waitResult is the outcome of a wait.
type waitResult struct {
	outcome  executions.Outcome
	data     any        // data of the event
	timedOut bool       // the wait timed out, and the flow continues
	end      *endResult // a timeoutAction ended the flow
}

// await waits for the event of an action. At a timeout it runs the timeoutActions and applies onTimeout.
func (m *flowRun) await(ctx context.Context, r preparedAction, w executions.WaitFor) (waitResult, error) {
	for try := 0; ; try++ {
		outcome, err := executions.Wait(ctx, "wait", w.WithData(m.describeWait(r)))
		if err != nil {
			return waitResult{}, err
		}
		if !outcome.TimedOut {
			data, err := decodeNormal(outcome.Data)
			return waitResult{outcome: outcome, data: data}, err
		}
		retry, result, err := m.handleTimeout(ctx, r, try)
		if err != nil || !retry {
			return result, err
		}
	}
}

// describeWait returns a wait's description for people.
func (m *flowRun) describeWait(r preparedAction) map[string]any {
	description := map[string]any{
		"action": r.key, "onTimeout": r.onTimeout, "timeout": formatDuration(r.effectiveTimeout()),
	}
	if m.thread != "" {
		description["threadId"] = m.thread
	}
	return description
}

// handleTimeout runs the timeoutActions and applies onTimeout. retry means that the wait repeats.
func (m *flowRun) handleTimeout(
	ctx context.Context, r preparedAction, try int,
) (retry bool, result waitResult, err error) {
	if err := m.setVariables(ctx, map[string]any{"timedOut": true}); err != nil {
		return false, waitResult{}, err
	}
	ended, err := m.runActions(executions.Scope(ctx, fmt.Sprintf("timeout %d", try+1)), r.timeoutActions)
	switch {
	case err != nil || ended != nil:
		return false, waitResult{timedOut: true, end: ended}, err
	case r.onTimeout == onContinue:
		return false, waitResult{timedOut: true}, nil
	case r.onTimeout == onRetry && try < maxRetries:
		return true, waitResult{}, nil
	}
	attempts := ""
	if try > 0 {
		attempts = fmt.Sprintf(", %d times", try+1)
	}
	return false, waitResult{}, classErrorf(classTimedOut, "no %s came within %s%s", r.Waits,
		formatDuration(r.effectiveTimeout()), attempts)
}

// effectiveTimeout returns the timeout of a waiting action, or the default of its kind of wait.
func (r preparedAction) effectiveTimeout() time.Duration {
	fallback, _ := executions.Limits(r.Waits)
	return cmp.Or(r.timeout, fallback)
}

// actionResult returns the result of a waiting action. It sets the variables of its kind of wait. Variables that the
// event lacks are null.
func (a waitResult) actionResult(r preparedAction) (actionResult, error) {
	variables, err := requests.Variables(r.Waits, a.outcome)
	if err != nil {
		return actionResult{}, classErrorf("answer", "%s", err)
	}
	set := map[string]any{"timedOut": a.timedOut}
	for _, name := range waitVariables[r.Waits] {
		set[name] = variables[name]
	}
	if r.saveAs != "" {
		set[r.saveAs] = a.data
	}
	return actionResult{Set: set, End: a.end}, nil
}

// waitVariables are the variables that each kind of wait sets.
var waitVariables = map[string][]string{
	"response":  {"lastResponse"},
	"document":  {"documentUrls", "documents"},
	"signature": {"signedDocumentUrl", "signedAt"},
	"test":      {"testScore", "testResult"},
}

func (m *flowRun) waitForResponse(ctx context.Context, r preparedAction) (actionResult, error) {
	if m.thread == "" {
		return actionResult{}, noThread()
	}
	received, err := m.await(ctx, r, executions.Response(m.thread, r.timeout))
	if err != nil {
		return actionResult{}, err
	}
	received.data = asObject(received.data)["content"]
	return received.actionResult(r)
}

// NoThread is the error of a flow that needs a thread, in an execution without one.
const NoThread = "this execution has no thread to talk in; start the flow with one (--thread, or thread_id)"

func noThread() error { return classErrorf("thread", NoThread) }

func (m *flowRun) waitForEvent(ctx context.Context, r preparedAction) (actionResult, error) {
	key := strings.TrimSpace(formatText(r.args["key"]))
	if key == "" {
		return actionResult{}, classErrorf(classTemplate, "key: is empty")
	}
	received, err := m.await(ctx, r, executions.Event(key, r.timeout))
	if err != nil {
		return actionResult{}, err
	}
	result, err := received.actionResult(r)
	if err == nil {
		result.Set["eventData"] = received.data
	}
	return result, err
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

func (m *flowRun) delay(ctx context.Context, r preparedAction) (actionResult, error) {
	length, err := m.remainingDelay(ctx, r)
	if err != nil || length <= 0 {
		return actionResult{}, err
	}
	_, err = executions.Wait(ctx, "wait", executions.Delay(length).WithData(map[string]any{"action": r.key}))
	return actionResult{}, err
}

// remainingDelay returns the remaining time of a delay; 0 if it has passed.
func (m *flowRun) remainingDelay(ctx context.Context, r preparedAction) (time.Duration, error) {
	if text, ok := r.args["duration"]; ok {
		remaining, err := validateDelay(formatText(text))
		if err != nil {
			return 0, classErrorf(classDelay, "duration: %s", err)
		}
		return remaining, nil
	}
	until, err := time.Parse(time.RFC3339, formatText(r.args["until"]))
	if err != nil {
		return 0, classErrorf(classDelay, "until: %q is not a time: write 2026-01-31T09:00:00Z", formatText(r.args["until"]))
	}
	now, err := executions.Now(ctx)
	if err != nil {
		return 0, err
	}
	if remaining := until.Sub(now); remaining <= executions.MaxWait {
		return remaining, nil
	}
	return 0, classErrorf(classDelay, "until: %s is more than %s away", until.Format(time.RFC3339),
		formatDuration(executions.MaxWait))
}

// postMessage sends a message in the thread, over the action's channel or the flow's.
func (m *flowRun) postMessage(ctx context.Context, r preparedAction, content string) (threads.SendResult, error) {
	if m.thread == "" {
		return threads.SendResult{}, noThread()
	}
	if strings.TrimSpace(content) == "" {
		return threads.SendResult{}, classErrorf(classTemplate, "message: is empty")
	}
	message := threads.Outgoing{ThreadID: m.thread, Content: content, Channel: m.flow.channel, Target: m.flow.target}
	if channel := formatText(r.args["channel"]); channel != "" && channel != message.Channel {
		message.Channel, message.Target = channel, ""
	}
	message.Target = cmp.Or(formatText(r.args["target"]), message.Target)
	return threads.Send(ctx, message)
}

func (m *flowRun) sendMessage(ctx context.Context, r preparedAction) (actionResult, error) {
	sent, err := m.postMessage(ctx, r, formatText(r.args["message"]))
	if err != nil || r.saveAs == "" {
		return actionResult{}, err
	}
	return actionResult{Set: map[string]any{r.saveAs: sent}}, nil
}

// openThread gives a chat key access to the thread, or creates a join token for a visitor.
func (m *flowRun) openThread(ctx context.Context, r preparedAction) (actionResult, error) {
	if m.thread == "" {
		return actionResult{}, noThread()
	}
	if key := formatText(r.args["key"]); key != "" {
		name := cmp.Or(formatText(r.args["name"]), m.thread)
		_, err := executions.StepTx(ctx, "open", func(ctx context.Context, tx pgx.Tx) (string, error) {
			return threads.Grant(ctx, tx, m.thread, threads.Key(key), name, "flow "+m.exec.Flow)
		})
		return actionResult{}, err
	}
	lifetime := threads.DefaultTokenLife
	if text, has := r.args["expires"]; has {
		var err error
		if lifetime, err = parseDuration(formatText(text)); err != nil || lifetime <= 0 || lifetime > threads.MaxTokenLife {
			return actionResult{}, classErrorf("thread", "expires: %q is not a duration of more than 0 and at most 30d",
				formatText(text))
		}
	}
	token, err := executions.StepTx(ctx, "invite", func(ctx context.Context, tx pgx.Tx) (threads.Token, error) {
		return threads.Invite(ctx, tx, threads.Invitation{
			ThreadID: m.thread, Reusable: r.flag("reusable", false), Life: lifetime, ExecutionID: m.exec.ID,
			By: "flow " + m.exec.Flow,
		})
	})
	if err != nil {
		return actionResult{}, err
	}
	return actionResult{Set: map[string]any{cmp.Or(r.saveAs, "joinToken"): token.Secret}}, nil
}

// request asks a person for documents, a signature or a test, announces it in the thread, and waits for it.
func (m *flowRun) request(ctx context.Context, r preparedAction) (actionResult, error) {
	spec, defaultMessage := r.requestSpec()
	id, err := requests.Ask(ctx, "request", spec, func(ctx context.Context, id string) {
		if !m.announces(r) && m.in.Logger != nil {
			m.in.Logger.WarnContext(ctx, "request not announced: no thread", "request_id", id, "kind", spec.Kind)
		}
	})
	if err != nil {
		return actionResult{}, err
	}
	if err := m.announceRequest(ctx, r, id, defaultMessage); err != nil {
		return actionResult{}, err
	}
	if !r.flag("wait", true) {
		set := map[string]any{"requestId": id}
		if r.saveAs != "" {
			set[r.saveAs] = id
		}
		return actionResult{Set: set}, nil
	}
	wait, err := requests.WaitFor(r.Waits, id, r.timeout)
	if err != nil {
		return actionResult{}, err
	}
	received, err := m.await(ctx, r, wait)
	// An older record has no such step.
	if err == nil && received.timedOut && (!postgres.IsSealed(ctx) || executions.IsRecorded(ctx, "close")) {
		err = requests.Close(ctx, "close", id)
	}
	if err != nil {
		return actionResult{}, err
	}
	result, err := received.actionResult(r)
	if err != nil {
		return actionResult{}, err
	}
	result.Set["requestId"] = id
	if r.Waits == requests.Signature && !received.timedOut && result.Set["signedAt"] == nil { // the event has no time
		now, err := executions.Now(ctx)
		if err != nil {
			return actionResult{}, err
		}
		result.Set["signedAt"] = now.Format(time.RFC3339)
	}
	return result, nil
}

// requestSpec returns an action's request and its default message.
func (r preparedAction) requestSpec() (requests.Request, string) {
	switch r.Waits {
	case requests.Document:
		var items []string
		if list, ok := r.args["documents"].([]any); ok {
			for _, item := range list {
				names, isList := item.([]any) // for example from documents: "{{wanted}}"
				if !isList {
					names = []any{item}
				}
				for _, name := range names {
					items = append(items, formatText(name))
				}
			}
		}
		title := strings.Join(items, ", ")
		return requests.Request{Kind: r.Waits, Title: title, Items: items}, "Please send us: " + title + "."
	case requests.Signature:
		document := formatText(r.args["document"])
		return requests.Request{Kind: r.Waits, Title: document, Details: map[string]any{"document": document}},
			"Please sign this document: " + document
	}
	test := formatText(r.args["test"])
	return requests.Request{Kind: r.Waits, Title: test, Details: map[string]any{"test": test}},
		"A test is waiting for you: " + test
}

// announces reports whether an action posts the message of its request: whether it has one, or the flow has a thread.
func (m *flowRun) announces(r preparedAction) bool {
	return r.params["message"] != nil || m.thread != ""
}

// announceRequest posts the message of a request in the thread: the action's message, or content.
func (m *flowRun) announceRequest(ctx context.Context, r preparedAction, id, content string) error {
	if !m.announces(r) {
		return nil
	}
	if own := r.params["message"]; own != nil {
		vars := maps.Clone(m.vars)
		vars["requestId"] = id
		value, err := fill(own, vars)
		if err != nil {
			return prefixError("message", err)
		}
		content = formatText(value)
	}
	_, err := m.postMessage(ctx, r, content)
	return err
}
