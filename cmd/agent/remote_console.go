package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// interact sends each line as one command of the same conversation, and shows its output while it comes. ^C cancels the
// turn; at the prompt it ends the conversation, as ^D does. In agent operate it asks about each approval, as the local
// console does, if the server lets the caller decide.
func (r *remoteCall) interact(cmd *cobra.Command) error {
	flag, id := "thread", "remote-"+strings.ToLower(rand.Text()[:12])
	operates := commandName(cmd) == "operate"
	if operates {
		flag, id = "session", "ses_"+strings.ToLower(rand.Text()[:16])
	}
	prefix := append([]string{}, r.args...)
	if cmd.Flags().Lookup(flag).Value.String() == "" {
		prefix = append(prefix, "--"+flag, id)
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
			return &exitError{exitInterrupted, nil}
		case line, more := <-lines:
			if line = strings.TrimSpace(line); !more || operates && line == "/quit" {
				fmt.Fprintln(r.out)
				return failed()
			}
			if line == "" {
				continue
			}
			req, err := r.commandRequest(cmd, []string{line})
			if err != nil {
				return err
			}
			if operates && line[0] == '/' {
				req.Files = nil
				if req.Args, err = slashArgs(line); err != nil {
					fmt.Fprintln(r.out, err)
					continue
				}
			} else {
				req.Args = append(append([]string{}, prefix...), "--", line)
				if !first {
					req.Args, req.Files = withoutFiles(req.Args), nil
				}
				first = false
			}
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
	r.asks = make(chan commandFrame, 100) // a turn asks about one approval at a time
	ended := make(chan error, 1)
	go func() { ended <- r.run(ctx, req, false) }()
	stop := func() {
		cancel()
		<-ended //nolint:errcheck // it was interrupted
	}
	var asked commandFrame
	var answers <-chan string
	for {
		select {
		case err := <-ended:
			if exit, is := errors.AsType[*exitError](err); is && exit.cause == nil && exit.code != exitInterrupted {
				return nil
			}
			return err
		case <-interrupts:
			stop()
			switch {
			case asked.Execution != "": // the turn would wait for the decision without its caller
				r.cancelTurn(outer, asked.Execution)
			case answers != nil: // an older server names no execution
				r.infof("%s", leftOpen)
			default:
				r.infof("cancelled")
			}
			return nil
		case asked = <-r.asks:
			answers = lines
			fmt.Fprint(r.out, approvalQuestion)
		case line, more := <-answers:
			if line = strings.TrimSpace(line); line == "" || !more {
				stop()
				r.infof("%s", leftOpen)
				return nil
			}
			if answers = nil; !r.decide(ctx, asked.Ask, line) {
				r.asks <- asked // four eyes, or another reason that the next answer may avoid
			}
		}
	}
}

// leftOpen is said when the caller goes while an approval is asked.
const leftOpen = "left open; decide later with /approve or /reject"

// cancelTimeout bounds the cancel of a turn.
const cancelTimeout = 10 * time.Second

// cancelTurn cancels a turn by a command of its own, whose output says so.
func (r *remoteCall) cancelTurn(ctx context.Context, execution string) {
	ctx, cancel := context.WithTimeout(ctx, cancelTimeout)
	defer cancel()
	other := remoteCall{cli: r.cli, server: r.server, token: r.token}
	err := other.run(ctx, commandRequest{Args: []string{
		"executions", "cancel", execution, "--reason", operate.ErrInterrupt.Error(),
	}}, false)
	switch exit, is := errors.AsType[*exitError](err); {
	case err == nil:
		return
	case ctx.Err() != nil:
		r.infof("agent: the cancel was not confirmed within %s", cancelTimeout)
	case !is || exit.cause != nil: // not printed by the server
		r.infof("agent: %s", printable(err.Error()))
	}
	r.infof("%s", leftOpen)
}

// decide runs the decision of an approval as a command of its own, and reports whether it was made.
func (r *remoteCall) decide(ctx context.Context, id, answer string) bool {
	approve, reason := readDecision(answer)
	req := commandRequest{Args: []string{"approvals", "approve", id}}
	if !approve {
		req.Args = []string{"approvals", "reject", id, "--reason", reason}
	}
	other := remoteCall{cli: r.cli, server: r.server, token: r.token} // the turn's frames change r
	return other.run(ctx, req, false) == nil
}

// slashCommands are the commands of agent operate's console as a server runs them.
var slashCommands = map[string][]string{
	"/trace": {"trace"}, "/lanes": {"lanes", "ls"}, "/approvals": {"approvals", "ls"}, "/objectives": {"objectives", "ls"},
	"/approve": {"approvals", "approve"}, "/reject": {"approvals", "reject"}, "/memory": {"memory", "search"},
}

// slashArgs translates a line of the console. The error is what to show instead of running it.
func slashArgs(line string) (args []string, err error) {
	name, rest, _ := strings.Cut(line, " ")
	args, known := slashCommands[name]
	switch rest = strings.TrimSpace(rest); {
	case name == "/help":
		return nil, errors.New(strings.TrimSpace(slashHelp))
	case !known:
		return nil, fmt.Errorf("unknown command %s; see /help", printable(name))
	case name == "/trace" && rest == "":
		return []string{"trace", "last"}, nil
	case name == "/memory" && rest == "":
		return []string{"memory", "ls"}, nil
	case name == "/reject":
		id, reason, _ := strings.Cut(rest, " ")
		if args = append(append([]string{}, args...), id); reason != "" {
			args = append(args, "--reason", strings.TrimSpace(reason))
		}
		return args, nil
	case rest != "":
		return append(append([]string{}, args...), rest), nil
	}
	return args, nil
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
