package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/term"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// Keys as a terminal in raw mode sends them.
const (
	keyInterrupt = 0x03
	emptyLine    = "\x05\x15" // move to the end, delete to the beginning
)

// keyboard reads the terminal and handles ^C itself.
type keyboard struct {
	input   chan []byte
	ended   chan struct{}
	once    sync.Once
	pending []byte

	mu          sync.Mutex
	interrupted func() // handler of ^C; nil at the prompt, where ^C clears the line
}

// newKeyboard starts a reading goroutine. A read cannot be interrupted, so after close it ends with the next key or
// the process.
func newKeyboard(in io.Reader) *keyboard {
	k := &keyboard{input: make(chan []byte, 1024), ended: make(chan struct{})}
	go func() {
		buffer := make([]byte, 256)
		for {
			n, err := in.Read(buffer)
			for _, key := range buffer[:n] {
				k.handleKey(key)
			}
			if err != nil {
				k.close()
				return
			}
		}
	}()
	return k
}

func (k *keyboard) handleKey(key byte) {
	if key != keyInterrupt {
		k.typeKeys(string(key))
		return
	}
	k.mu.Lock()
	interrupted := k.interrupted
	k.mu.Unlock()
	if interrupted != nil {
		interrupted()
		return
	}
	k.typeKeys(emptyLine)
}

// typeKeys queues keys as if typed. It drops keys that do not fit, as terminals do.
func (k *keyboard) typeKeys(keys string) {
	select {
	case k.input <- []byte(keys):
	case <-k.ended:
	default:
	}
}

// Read passes keys to the line editor. It returns io.EOF after close.
func (k *keyboard) Read(p []byte) (int, error) {
	if len(k.pending) == 0 {
		select {
		case k.pending = <-k.input:
		case <-k.ended:
			return 0, io.EOF
		}
	}
	n := copy(p, k.pending)
	k.pending = k.pending[n:]
	return n, nil
}

func (k *keyboard) close() { k.once.Do(func() { close(k.ended) }) }

// onInterrupt sets the handler of ^C.
func (k *keyboard) onInterrupt(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.interrupted = do
}

// console is the interactive session on a terminal.
type console struct {
	*operator
	keyboard *keyboard
	line     *term.Terminal
	size     func() (width, height int, err error)
	asking   atomic.Bool // a question about an approval is open
	resumed  atomic.Bool // the turn resumed meanwhile
}

// interact runs turns on a terminal in raw mode until ^D, and restores its mode.
func (o *operator) interact(ctx context.Context) error {
	in, out := o.in.(*os.File), o.out.(*os.File)
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	defer func() { _ = term.Restore(int(in.Fd()), before) }() // a closed terminal needs no restore
	k := newKeyboard(in)
	defer k.close()
	defer context.AfterFunc(ctx, k.close)()
	c := &console{
		keyboard: k,
		line: term.NewTerminal(struct {
			io.Reader
			io.Writer
		}{k, out}, "> "),
		size: func() (int, int, error) { return term.GetSize(int(out.Fd())) },
	}
	c.operator = o.withOutput(c.line)
	c.ask, c.onEvent = c.question, c.cancelQuestion
	return c.run(ctx)
}

// withOutput returns a copy of the operator that prints through w.
func (o *operator) withOutput(w io.Writer) *operator {
	screen, same := *o.cli, *o
	screen.environ = maps.Clone(o.environ)
	if o.colour() {
		screen.environ["CLICOLOR_FORCE"] = "1"
	}
	screen.out, screen.err = w, w
	same.cli = &screen
	return &same
}

// consoleGreeting begins a console, with the id of its session.
const consoleGreeting = "session %s; /help lists commands, ^C cancels a turn, ^D leaves"

func (c *console) run(ctx context.Context) error {
	c.infof(consoleGreeting, c.admin.ID())
	show := c.newEventPrinter()
	show.live, show.colour = true, c.colour()
	for {
		line, err := c.read("> ")
		if err != nil || strings.TrimSpace(line) == "/quit" {
			fmt.Fprintln(c.out)
			if ctx.Err() != nil {
				return &exitError{exitInterrupted, nil}
			}
			return show.err
		}
		c.admin.Touch()
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if c.execute(ctx, line, show); ctx.Err() != nil {
			return &exitError{exitInterrupted, nil}
		}
	}
}

// read shows a prompt and reads a line. ^D on an empty line returns io.EOF.
func (c *console) read(prompt string) (string, error) {
	if width, height, err := c.size(); err == nil && width > 0 {
		// On an error the terminal keeps its previous size.
		_ = c.line.SetSize(width, height)
	}
	c.line.SetPrompt(prompt)
	line, err := c.line.ReadLine()
	if errors.Is(err, term.ErrPasteIndicator) {
		err = nil
	}
	return line, err
}

// execute runs one line. ^C cancels it.
func (c *console) execute(ctx context.Context, line string, show *eventPrinter) {
	lineCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.keyboard.onInterrupt(func() {
		cancel()
		if c.asking.Load() {
			c.keyboard.typeKeys(emptyLine + "\r")
		}
	})
	defer c.keyboard.onInterrupt(nil)
	c.executeLine(ctx, lineCtx, line, show)
}

// executeLine runs one line of a local or remote console. An error is printed and the session continues. lineCtx ends
// when the line is cancelled, ctx with the console.
func (o *operator) executeLine(ctx, lineCtx context.Context, line string, show *eventPrinter) {
	before := o.lastTrace
	var err error
	if strings.HasPrefix(line, "/") {
		err = o.runCommand(lineCtx, line, show.print)
	} else {
		var done operate.Done
		done, err = o.runTurn(lineCtx, o.message(line), show.print)
		if err == nil && done.Ended == operate.WaitingApproval && !o.own {
			o.infof(leftOpen)
		}
	}
	show.endLine()
	switch busy, isBusy := errors.AsType[*lanes.BusyError](err); {
	case lineCtx.Err() != nil && ctx.Err() == nil && o.lastTrace != before:
		o.infof("%s", cancelledLine(o.lastTrace))
	case lineCtx.Err() != nil && ctx.Err() == nil:
		o.infof("cancelled")
	case isBusy:
		o.infof("agent: %s", printable(o.app.Operate.Explain(ctx, busy)))
	case err != nil:
		o.infof("agent: %s", printable(err.Error()))
	}
}

// runCallersLine runs one line of a remote console. It prints the same as a local console.
func (o *operator) runCallersLine(ctx context.Context, line string) error {
	caller := o.cli
	same := o.withOutput(struct{ io.Writer }{o.out})
	show := same.newEventPrinter()
	show.live, show.colour = true, same.colour()
	same.onEvent = func(e operate.Event) {
		if data, is := e.Data.(operate.Start); is {
			caller.onInterrupt(cancelledLine(data.TraceID))
		}
	}
	if mayRun(ctx, principals.ApprovalsDecide) {
		same.askCaller = func(a operate.Approval, execution string) {
			caller.askCaller(a, execution, same.leftOpenLines(ctx))
		}
		same.endQuestion = caller.endQuestion
	}
	same.executeLine(ctx, ctx, line, show)
	return show.err
}

// leftOpen is printed when the admin leaves an approval undecided.
const leftOpen = "left open; decide later with /approve or /reject"

// leftOpenLines are the lines of a turn whose approval is left open.
func (o *operator) leftOpenLines(ctx context.Context) string {
	used, costUSD, err := activity.Spent(ctx, o.s.Pool, o.lastTrace)
	if err != nil {
		o.s.log.WarnContext(ctx, "usage of turn not read", "trace", o.lastTrace, "error", err)
	}
	done := operate.Done{TraceID: o.lastTrace, Ended: operate.WaitingApproval, Usage: used, CostUSD: costUSD}
	return doneLine(done) + "\n" + leftOpen
}

func cancelledLine(traceID string) string { return traceID + "  cancelled" }

// question asks about an approval. It has no answer when the turn was cancelled or somebody else decided.
func (c *console) question(ctx context.Context, question string) (string, bool) {
	c.resumed.Store(false)
	c.asking.Store(true)
	answer, err := c.read(question)
	c.asking.Store(false)
	if ctx.Err() != nil || c.resumed.Load() {
		return "", false
	}
	return answer, err == nil || errors.Is(err, io.EOF)
}

// cancelQuestion ends a question that the turn no longer waits for.
func (c *console) cancelQuestion(operate.Event) {
	if c.asking.Load() {
		c.resumed.Store(true)
		c.keyboard.typeKeys(emptyLine + "\r")
	}
}
