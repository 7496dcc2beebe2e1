package flows

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/requests"
	"github.com/lanekeeper/lanekeeper/threads"
)

// say says something in the thread, over the action's channel or the flow's.
func (m *machine) say(ctx context.Context, r ready, content string) (threads.SendResult, error) {
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
	sent, err := m.say(ctx, r, inText(r.args["message"]))
	if err != nil || r.save == "" {
		return result{}, err
	}
	return result{Set: map[string]any{r.save: sent}}, nil
}

// openThread lets a visitor into the thread: by a join token, or by naming the key.
func (m *machine) openThread(ctx context.Context, r ready) (result, error) {
	if m.thread == "" {
		return result{}, noThread()
	}
	if key := inText(r.args["key"]); key != "" {
		name := cmp.Or(inText(r.args["name"]), m.thread)
		_, err := executions.StepTx(ctx, "open", func(ctx context.Context, tx pgx.Tx) (string, error) {
			return threads.Let(ctx, tx, m.thread, threads.Key(key), name, "flow "+m.exec.Flow)
		})
		if errors.Is(err, threads.ErrTaken) || errors.Is(err, threads.ErrInvalid) {
			err = failure("thread", "the key %s cannot call the thread %s: %s", key, name, err)
		}
		return result{}, err
	}
	life := threads.DefaultTokenLife
	if given, has := r.args["expires"]; has {
		var err error
		if life, err = parseLength(inText(given)); err != nil || life <= 0 || life > threads.MaxTokenLife {
			return result{}, failure("thread", "expires: %q is not a duration of more than 0 and at most 30d", inText(given))
		}
	}
	token, err := executions.StepTx(ctx, "invite", func(ctx context.Context, tx pgx.Tx) (threads.Token, error) {
		return threads.Invite(ctx, tx, threads.Invitation{
			ThreadID: m.thread, Reusable: r.flag("reusable", false), Life: life, ExecutionID: m.exec.ID, By: "flow " + m.exec.Flow,
		})
	})
	if err != nil {
		return result{}, err
	}
	return result{Set: map[string]any{orElse(r.save, "joinToken"): token.Secret}}, nil
}

// request asks somebody for documents, a signature or a test, says so in the thread, and waits for it.
func (m *machine) request(ctx context.Context, r ready) (result, error) {
	asked, standard := r.asks()
	id, err := requests.Ask(ctx, "request", asked)
	if err != nil {
		return result{}, err
	}
	if err := m.tell(ctx, r, id, standard); err != nil {
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
	if r.Waits == requests.Signature && !got.late && settled.Set["signedAt"] == nil { // the event does not say
		now, err := executions.Now(ctx)
		if err != nil {
			return result{}, err
		}
		settled.Set["signedAt"] = now.Format(time.RFC3339)
	}
	return settled, nil
}

// asks is what an action asks for, and the words for it where the flow has none of its own.
func (r ready) asks() (requests.Request, string) {
	switch r.Waits {
	case requests.Document:
		var items []string
		if list, ok := r.args["documents"].([]any); ok {
			for _, item := range list {
				if inner, isList := item.([]any); isList { // documents: "{{wanted}}"
					for _, one := range inner {
						items = append(items, inText(one))
					}
					continue
				}
				items = append(items, inText(item))
			}
		}
		words := strings.Join(items, ", ")
		return requests.Request{Kind: r.Waits, Title: words, Items: items}, "Please send us: " + words + "."
	case requests.Signature:
		document := inText(r.args["document"])
		return requests.Request{Kind: r.Waits, Title: document, Details: map[string]any{"document": document}}, "Please sign this document: " + document
	}
	test := inText(r.args["test"])
	return requests.Request{Kind: r.Waits, Title: test, Details: map[string]any{"test": test}}, "A test is waiting for you: " + test
}

// tell says in the thread what is asked for. Without a thread and words of the flow's own, somebody else tells.
func (m *machine) tell(ctx context.Context, r ready, id, standard string) error {
	own, has := r.given["message"]
	if !has && m.thread == "" {
		return nil
	}
	content := standard
	if has {
		vars := maps.Clone(m.vars)
		vars["requestId"] = id
		value, err := fill(own, vars)
		if err != nil {
			return wrapped("message", err)
		}
		content = inText(value)
	}
	_, err := m.say(ctx, r, content)
	return err
}

var errNoLoop = errors.New("this process was built without a reasoning loop and calls no skills")
