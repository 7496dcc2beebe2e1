package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// interact sends each line as one command of the same conversation, and streams its output. ^C cancels the turn, or
// clears the line at the prompt. In agent operate it asks about each approval, as the local console does, if the server
// lets the caller decide.
func (r *remoteCall) interact(cmd *cobra.Command) error {
	flag, id := "thread", "remote-"+strings.ToLower(rand.Text()[:12])
	operates := commandName(cmd) == "operate"
	if operates {
		flag, id = "session", "ses_"+strings.ToLower(rand.Text()[:16])
	}
	prefix := append([]string{}, r.args...)
	if given := cmd.Flags().Lookup(flag).Value.String(); given != "" {
		id = given
	} else {
		prefix = append(prefix, "--"+flag, id)
	}
	if operates {
		r.infof(consoleGreeting, id)
	} else if err := r.run(cmd.Context(), commandRequest{Args: withoutFiles(prefix), Asks: true}, false); err != nil {
		return err
	}
	signal.Reset(os.Interrupt)
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	lines, failed, stop := readLines(r.in)
	defer stop()
	for first := true; ; {
		fmt.Fprint(r.out, "> ")
		select {
		case <-cmd.Context().Done():
			return &exitError{exitInterrupted, nil}
		case <-interrupts:
			fmt.Fprintln(r.out)
		case line, more := <-lines:
			if line = strings.TrimSpace(line); !more || line == "/quit" {
				fmt.Fprintln(r.out)
				return failed()
			}
			if line == "" || !operates && r.chatSlash(line) {
				continue
			}
			req, err := r.commandRequest(cmd, []string{line})
			if err != nil {
				return err
			}
			req.Args = append(append([]string{}, prefix...), "--", line)
			if !first {
				req.Args, req.Files = withoutFiles(req.Args), nil
			}
			first = false
			req.Asks = operates
			if err := r.turn(cmd.Context(), interrupts, lines, req); err != nil {
				return err
			}
		}
	}
}

// turn runs one command of a conversation. Neither ^C nor a command that fails on the server ends the conversation.
func (r *remoteCall) turn(
	ctx context.Context, interrupts <-chan os.Signal, lines <-chan string, req commandRequest,
) error {
	outer := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r.asks, r.interrupted = make(chan commandFrame, 100), "" // frames also arrive during a decision
	ended := make(chan error, 1)
	go func() { ended <- r.run(ctx, req, false) }()
	stop := func() (interrupted string) {
		cancel()
		<-ended //nolint:errcheck // it was interrupted
		return printableText(cmp.Or(r.interrupted, "cancelled"))
	}
	var asked commandFrame
	var answers, late <-chan string // lines that answer, and a line typed after the question ended
	for {
		select {
		case err := <-ended:
			if exit, is := errors.AsType[*exitError](err); is && exit.cause == nil && exit.code != exitInterrupted {
				return nil
			}
			return err
		case <-interrupts:
			message := stop()
			switch {
			case asked.Execution != "": // the turn would wait for the decision without its caller
				message = r.cancelTurn(outer, asked, message)
			case answers != nil: // an older server names no execution
				message = notCancelled
			}
			r.infof("%s", message)
			return nil
		case asked = <-r.asks:
			if answers != nil {
				fmt.Fprintln(r.out)
				r.infof("the approval was decided elsewhere, or has expired")
				late = lines
			}
			if answers = nil; asked.Ask != "" {
				answers, late = lines, nil
				fmt.Fprint(r.out, approvalQuestion)
			}
		case <-late: // it was typed for the approval, and is no message
			r.infof("not sent: the approval is no longer open")
			late = nil
		case line, more := <-answers:
			if len(r.asks) > 0 {
				continue // the question has ended
			}
			if line = strings.TrimSpace(line); line == "" || !more {
				stop()
				r.infof("%s", printableText(cmp.Or(asked.LeftOpen, leftOpen)))
				return nil
			}
			if r.decide(ctx, asked.Ask, line) {
				answers = nil
			} else {
				fmt.Fprint(r.out, approvalQuestion) // four eyes, or another reason that the next answer may avoid
			}
		}
	}
}

// cancelTimeout bounds the cancel of a turn.
const cancelTimeout = 10 * time.Second

// notCancelled is printed when an interrupt could not cancel the turn.
const notCancelled = "not cancelled: the approval is " + leftOpen

// cancelTurn cancels a turn by a command of its own. It returns the text to print: message, or notCancelled.
func (r *remoteCall) cancelTurn(ctx context.Context, asked commandFrame, message string) string {
	ctx, cancel := context.WithTimeout(ctx, cancelTimeout)
	defer cancel()
	err := r.aside(ctx, "executions", "cancel", asked.Execution, "--reason", operate.ErrInterrupt.Error())
	switch exit, is := errors.AsType[*exitError](err); {
	case err == nil:
		return message
	case ctx.Err() != nil:
		r.infof("agent: the cancel was not confirmed within %s", cancelTimeout)
	case !is || exit.cause != nil: // not printed by the server
		r.infof("agent: %s", printable(err.Error()))
	}
	return notCancelled
}

// aside runs a command during a turn, or after it, and prints its errors only.
func (r *remoteCall) aside(ctx context.Context, args ...string) error {
	silent := *r.cli
	silent.out = io.Discard
	other := remoteCall{cli: &silent, server: r.server, token: r.token} // the turn's frames change r
	return other.run(ctx, commandRequest{Args: args}, false)
}

// decide runs the decision of an approval as a command of its own, and reports whether it was made.
func (r *remoteCall) decide(ctx context.Context, id, answer string) bool {
	approve, reason := readDecision(answer)
	args := []string{"approvals", "approve", id}
	if !approve {
		args = []string{"approvals", "reject", id, "--reason", reason}
	}
	return r.aside(ctx, args...) == nil
}

// withoutFiles removes --file and its value: only the first message has attachments.
func withoutFiles(args []string) (kept []string) {
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "--":
			return append(kept, args[i:]...)
		case args[i] == "--file":
			i++
		case !strings.HasPrefix(args[i], "--file="):
			kept = append(kept, args[i])
		}
	}
	return kept
}
