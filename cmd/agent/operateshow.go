package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

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
