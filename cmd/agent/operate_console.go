package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"

	"golang.org/x/term"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// Keys as a terminal in raw mode sends them.
const (
	keyInterrupt = 0x03
	emptyLine    = "\x05\x15" // to the end of the line, and delete to its beginning
)

// keyboard is the terminal's input: it takes ^C out for whoever wants to hear of it.
type keyboard struct {
	keys  chan []byte
	ended chan struct{}
	once  sync.Once
	rest  []byte

	mu          sync.Mutex
	interrupted func() // what ^C does; nil at the prompt, where it empties the line
}

// newKeyboard reads in in a goroutine, because a read cannot be interrupted: after close it ends with the next key or
// with the process.
func newKeyboard(in io.Reader) *keyboard {
	k := &keyboard{keys: make(chan []byte, 1024), ended: make(chan struct{})}
	go func() {
		buffer := make([]byte, 256)
		for {
			n, err := in.Read(buffer)
			for _, key := range buffer[:n] {
				k.press(key)
			}
			if err != nil {
				k.close()
				return
			}
		}
	}()
	return k
}

// press takes one key in.
func (k *keyboard) press(key byte) {
	if key != keyInterrupt {
		k.send(string(key))
		return
	}
	k.mu.Lock()
	interrupted := k.interrupted
	k.mu.Unlock()
	if interrupted != nil {
		interrupted()
		return
	}
	k.send(emptyLine)
}

// send puts keys in, as if they were typed. What does not fit is dropped, as terminals do.
func (k *keyboard) send(keys string) {
	select {
	case k.keys <- []byte(keys):
	case <-k.ended:
	default:
	}
}

// Read gives the keys to the line editor; io.EOF after close.
func (k *keyboard) Read(p []byte) (int, error) {
	if len(k.rest) == 0 {
		select {
		case k.rest = <-k.keys:
		case <-k.ended:
			return 0, io.EOF
		}
	}
	n := copy(p, k.rest)
	k.rest = k.rest[n:]
	return n, nil
}

func (k *keyboard) close() { k.once.Do(func() { close(k.ended) }) }

// onInterrupt says what ^C does from now on.
func (k *keyboard) onInterrupt(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.interrupted = do
}

// console is the conversation on a terminal.
type console struct {
	*operator
	keyboard *keyboard
	line     *term.Terminal
	size     func() (width, height int, err error)
	asking   atomic.Bool // a question about an approval is open
	moved    atomic.Bool // the turn went on while it was
}

// converse takes turns on a terminal, until ^D. The terminal is in raw mode meanwhile, and as it was after.
func (o *operator) converse(ctx context.Context) error {
	in, out := o.in.(*os.File), o.out.(*os.File)
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("prepare the terminal: %w", err)
	}
	defer func() { _ = term.Restore(int(in.Fd()), before) }() // a terminal that is gone needs nothing
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
	c.operator = o.through(c.line)
	c.ask, c.arrived = c.question, c.overtaken
	return c.loop(ctx)
}

// through is the operator with everything it prints going through the line editor.
func (o *operator) through(w io.Writer) *operator {
	screen, same := *o.cli, *o
	screen.environ = maps.Clone(o.environ)
	if o.colour() {
		screen.environ["CLICOLOR_FORCE"] = "1"
	}
	screen.out, screen.err = w, w
	same.cli = &screen
	return &same
}

// loop reads lines and does what they say.
func (c *console) loop(ctx context.Context) error {
	c.say("session %s; /help lists commands, ^C cancels a turn, ^D leaves", c.admin.ID())
	show := c.shower()
	show.live, show.colour = true, c.colour()
	for {
		line, err := c.read("> ")
		if err != nil || strings.TrimSpace(line) == "/quit" {
			fmt.Fprintln(c.out)
			if ctx.Err() != nil {
				return &exitError{exitInterrupted, nil}
			}
			return show.failed
		}
		c.admin.Touch()
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if c.do(ctx, line, show); ctx.Err() != nil {
			return &exitError{exitInterrupted, nil}
		}
	}
}

// read shows a prompt and reads a line; io.EOF after ^D on an empty one.
func (c *console) read(prompt string) (string, error) {
	if width, height, err := c.size(); err == nil && width > 0 {
		// A terminal that has no size keeps the one it had.
		_ = c.line.SetSize(width, height)
	}
	c.line.SetPrompt(prompt)
	line, err := c.line.ReadLine()
	if errors.Is(err, term.ErrPasteIndicator) {
		err = nil
	}
	return line, err
}

// do does one line. ^C cancels it; what went wrong is said, and the conversation goes on.
func (c *console) do(ctx context.Context, line string, show *shower) {
	working, cancel := context.WithCancel(ctx)
	defer cancel()
	c.keyboard.onInterrupt(func() {
		cancel()
		if c.asking.Load() {
			c.keyboard.send(emptyLine + "\r")
		}
	})
	defer c.keyboard.onInterrupt(nil)
	before := c.last
	var err error
	if strings.HasPrefix(line, "/") {
		err = c.command(working, line, show.event)
	} else {
		var done operate.Done
		done, err = c.take(working, c.message(line), show.event)
		if err == nil && done.Ended == operate.WaitingApproval {
			c.say("left open; /approve or /reject decides it later")
		}
	}
	show.end()
	switch busy, isBusy := errors.AsType[*lanes.BusyError](err); {
	case working.Err() != nil && ctx.Err() == nil && c.last != before:
		c.say("%s  cancelled", c.last)
	case working.Err() != nil && ctx.Err() == nil:
		c.say("cancelled")
	case isBusy:
		c.say("agent: %s", printable(c.app.operate.Explain(ctx, busy)))
	case err != nil:
		c.say("agent: %s", printable(err.Error()))
	}
}

// question asks about an approval. There is no answer when the turn was cancelled, or went on because somebody else
// has decided.
func (c *console) question(ctx context.Context, question string) (string, bool) {
	c.moved.Store(false)
	c.asking.Store(true)
	answer, err := c.read(question)
	c.asking.Store(false)
	if ctx.Err() != nil || c.moved.Load() {
		return "", false
	}
	return answer, err == nil || errors.Is(err, io.EOF)
}

// overtaken ends a question that the turn no longer waits for.
func (c *console) overtaken() {
	if c.asking.Load() {
		c.moved.Store(true)
		c.keyboard.send(emptyLine + "\r")
	}
}

// shower shows the events of turns: to people, or as one JSON object per line. The answer goes to out, what leads to it
// to about.
type shower struct {
	out, about io.Writer
	json       bool
	live       bool // somebody looks on, so that calls are shown as they begin, too
	colour     bool
	inLine     bool  // out stands in the middle of a line
	failed     error // the first write that failed
}

// shower writes to stdout and stderr.
func (c *cli) shower() *shower {
	live := terminal(c.err)
	return &shower{out: c.out, about: c.err, json: c.json, live: live, colour: c.colour() && live}
}

// event shows one event.
func (s *shower) event(e operate.Event) {
	if s.json {
		s.object(e)
		return
	}
	switch data := e.Data.(type) {
	case operate.Delta:
		text := speakable(data.Text)
		if text == "" {
			return
		}
		s.write(s.out, text)
		s.inLine = !strings.HasSuffix(text, "\n")
	case operate.ToolCall:
		s.call(data)
	case operate.Approval:
		s.note("33", "waits for approval: "+data.Skill+" "+printable(string(data.Arguments))+
			"\n  "+data.ID+", until "+when(data.ExpiresAt)+" UTC")
	case operate.Done:
		s.done(data)
	case operate.Holder:
		s.holder(data)
	case *problem.Problem:
		s.end() // the command says it
	case nil:
		s.note("33", "the answer broke off; the model is asked again")
	}
}

// object writes an event as a line of JSON.
func (s *shower) object(e operate.Event) {
	encoder := json.NewEncoder(s.out)
	encoder.SetEscapeHTML(false)
	data := e.Data
	if data == nil {
		data = struct{}{}
	}
	err := encoder.Encode(struct {
		Event string `json:"event"`
		Data  any    `json:"data"`
	}{e.Name, data})
	if s.failed == nil {
		s.failed = err
	}
}

// call shows a tool call in one line when it has ended, and to who looks on in one when it begins.
func (s *shower) call(c operate.ToolCall) {
	arguments := clipped(printable(string(c.Arguments)), 120)
	if c.Status == "started" {
		if s.live {
			s.note("2", fmt.Sprintf("· %s %s …", printable(c.Name), arguments))
		}
		return
	}
	sign, tint := "✓", "32"
	switch c.Status {
	case "error", "unknown", "denied":
		sign, tint = "✗", "31"
	case "pending_approval", "skipped":
		sign, tint = "·", "33"
	}
	result := clipped(printable(cmp.Or(c.Error, string(c.Result))), 160)
	took := ""
	if c.DurationMS != nil {
		took = " (" + span(c.DurationMS) + ")"
	}
	s.note(tint, fmt.Sprintf("%s %s %s → %s%s%s", sign, printable(c.Name), arguments,
		c.Status+" ", result, took))
}

// done closes a turn with its trace.
func (s *shower) done(d operate.Done) {
	s.end()
	line := fmt.Sprintf("%s  %s  %d tokens", d.TraceID, d.Ended, d.Usage.TotalTokens)
	if d.CostUSD > 0 {
		line += "  " + money(d.CostUSD)
	}
	s.note("2", line)
}

// holder tells a watcher who is at work.
func (s *shower) holder(h operate.Holder) {
	if !h.Held {
		s.note("2", "nobody is at work")
		return
	}
	line := printable(h.Holder) + " is at work"
	if h.SessionID != "" {
		line = printable(h.SessionID) + " is at work, as " + printable(h.Holder)
	}
	s.note("2", fmt.Sprintf("%s, for %s", line, (time.Duration(h.HeldFor)*time.Second)))
}

// note writes a line that is not the answer.
func (s *shower) note(tint, line string) {
	s.end()
	if s.colour {
		line = "\x1b[" + tint + "m" + line + "\x1b[0m"
	}
	s.write(s.about, line+"\n")
}

// end ends the line that the answer stands in.
func (s *shower) end() {
	if s.inLine {
		s.write(s.out, "\n")
		s.inLine = false
	}
}

func (s *shower) write(w io.Writer, text string) {
	if _, err := io.WriteString(w, text); err != nil && s.failed == nil {
		s.failed = err
	}
}

// speakable is text of a model without what could steer a terminal.
func speakable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return -1
	}, text)
}
