package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// eventPrinter prints events of turns as text or JSON lines. The answer goes to out, everything else to status.
type eventPrinter struct {
	out, status io.Writer
	json        bool
	live        bool // print calls also at their start
	colour      bool
	midLine     bool  // out is inside a line
	err         error // the first write error
}

func (c *cli) newEventPrinter() *eventPrinter {
	live := terminal(c.err)
	return &eventPrinter{out: c.out, status: c.err, json: c.json, live: live, colour: c.colour() && live}
}

// print prints one event. A failed write is kept in err.
func (s *eventPrinter) print(e operate.Event) {
	if s.json {
		s.printJSON(e)
		return
	}
	switch data := e.Data.(type) {
	case operate.Delta:
		text := printableText(data.Text)
		if text == "" {
			return
		}
		s.write(s.out, text)
		s.midLine = !strings.HasSuffix(text, "\n")
	case operate.ToolCall:
		s.printCall(data)
	case operate.Approval:
		s.printNote(yellow, "waits for approval: "+data.Skill+" "+escapeJSON(string(data.Arguments))+
			"\n  "+data.ID+", until "+formatTime(data.ExpiresAt)+" UTC")
	case operate.Done:
		s.printNote(dim, doneLine(data))
	case operate.Holder:
		s.printHolder(data)
	case *problem.Problem:
		s.endLine() // the command prints it
	case nil:
		s.printNote(yellow, "the answer broke off; retrying the model call")
	}
}

func (s *eventPrinter) printJSON(e operate.Event) {
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
	if s.err == nil {
		s.err = err
	}
}

// printCall prints a finished tool call in one line. In live mode it also prints its start.
func (s *eventPrinter) printCall(c operate.ToolCall) {
	arguments := truncate(printable(string(c.Arguments)), 120)
	if c.Status == "started" {
		if s.live {
			s.printNote(dim, fmt.Sprintf("· %s %s …", printable(c.Name), arguments))
		}
		return
	}
	sign, colour := "✓", green
	switch c.Status {
	case "error", "unknown", "denied":
		sign, colour = "✗", red
	case "pending_approval", "skipped":
		sign, colour = "·", yellow
	}
	result := truncate(printable(cmp.Or(c.Error, string(c.Result))), 160)
	took := ""
	if c.DurationMS != nil {
		took = " (" + formatMillis(c.DurationMS) + ")"
	}
	s.printNote(colour, fmt.Sprintf("%s %s %s → %s %s%s", sign, printable(c.Name), arguments, c.Status, result, took))
}

// doneLine describes a turn that has ended or was left open.
func doneLine(d operate.Done) string {
	line := fmt.Sprintf("%s  %s  %s", d.TraceID, d.Ended, human.Counted(int64(d.Usage.TotalTokens), "token"))
	if d.CostUSD > 0 {
		line += "  " + human.Money(d.CostUSD)
	}
	return line
}

// printHolder prints the current admin for a watcher.
func (s *eventPrinter) printHolder(h operate.Holder) {
	if !h.Held {
		s.printNote(dim, "no admin is active")
		return
	}
	line := printable(h.Holder) + " is active"
	if h.SessionID != "" {
		line = printable(h.SessionID) + " is active, as " + printable(h.Holder)
	}
	s.printNote(dim, fmt.Sprintf("%s, for %s", line, (time.Duration(h.HeldFor)*time.Second)))
}

// Colours of notes, as codes of the escape sequence Select Graphic Rendition.
const (
	dim    = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
)

// printNote prints a line beside the answer.
func (s *eventPrinter) printNote(colour, line string) {
	s.endLine()
	if s.colour {
		line = "\x1b[" + colour + "m" + line + "\x1b[0m"
	}
	s.write(s.status, line+"\n")
}

// endLine ends an unfinished line of the answer.
func (s *eventPrinter) endLine() {
	if s.midLine {
		s.write(s.out, "\n")
		s.midLine = false
	}
}

func (s *eventPrinter) write(w io.Writer, text string) {
	if _, err := io.WriteString(w, text); err != nil && s.err == nil {
		s.err = err
	}
}
