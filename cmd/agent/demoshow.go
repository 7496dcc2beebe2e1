package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// clock is the story's time.
func (s *stage) clock() string {
	minutes := s.story.begins + s.now
	return fmt.Sprintf("%02d:%02d", minutes/60%24, minutes%60)
}

// show tells a moment to who watches: a line, of JSON with --json.
func (s *stage) show(m moment) {
	m.At, m.ElapsedMS = s.clock(), time.Since(s.began).Milliseconds()
	out := &printer{to: s.out} // the end of the story says whether it could be written
	if s.json {
		text, _ := json.Marshal(m) // texts and numbers can always be encoded
		fmt.Fprintf(out, "%s\n", text)
		return
	}
	fmt.Fprintf(out, "%s  %-12s %s\n", m.At, printable(m.Who), printable(m.tale()))
}

// tale is a moment in words.
func (m moment) tale() string {
	switch m.Event {
	case acquired:
		return "takes the thread"
	case borrowed:
		return "inherits the thread from " + m.Other
	case stale:
		return "has been silent for too long: lane stale, clearing"
	case queued:
		if m.Other == "" {
			return "is queued: " + quoted(m.Text)
		}
		return "is queued behind " + m.Other + ": " + quoted(m.Text)
	case said:
		return quoted(m.Text)
	case triggers:
		return "triggers " + m.Other + ", and waits for it"
	case waits:
		return "waits: " + m.Other
	case returned:
		return "gives the thread back to " + m.Other
	case released:
		return "frees the thread"
	}
	return m.Text
}

func quoted(words string) string { return "«" + words + "»" }

// printLine prints a value as one line of JSON.
func (s *stage) printLine(value any) error {
	text, err := json.Marshal(value)
	if err == nil {
		_, err = fmt.Fprintf(s.out, "%s\n", text)
	}
	if err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// spoken is a row of the thread.
type spoken struct {
	Seq     *int64 `json:"seq"`
	Who     string `json:"who"`
	Content string `json:"content"`
	Status  string `json:"status"`
}

// threadSQL is how anybody reads a thread.
const threadSQL = `
select m.seq, case m.role when 'user' then t.participant else x.flow end as who, m.content, m.status
  from agent_messages m join agent_threads t on t.id = m.thread_id left join agent_executions x on x.id = m.execution_id
 where m.thread_id = @thread order by m.seq`

// showThread shows the thread as SQL has it, and compares it with how it should end.
func (s *stage) showThread(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, threadSQL, postgres.Strict{"thread": s.story.thread})
	if err != nil {
		return fmt.Errorf("read the thread: %w", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByName[spoken])
	if err != nil {
		return fmt.Errorf("read the thread: %w", err)
	}
	var got []string
	cells := make([][]string, len(all))
	for i, m := range all {
		seq := ""
		if m.Seq != nil {
			seq = strconv.FormatInt(*m.Seq, 10)
		}
		cells[i] = []string{seq, m.Who, m.Content, m.Status}
		got = append(got, anyID.ReplaceAllString(seq+" "+shortName(m.Who)+": "+m.Content, "…"))
	}
	if s.json {
		err = s.printLine(map[string]any{"event": "thread", "thread_id": s.story.thread, "messages": all})
	} else {
		err = s.print(nil, func(w io.Writer) error {
			fmt.Fprintf(w, "\nThe thread in SQL, agent_messages where thread_id = '%s' order by seq:\n\n", s.story.thread)
			return table(w, "nothing was said", []string{"SEQ", "WHO", "CONTENT", "STATUS"}, cells)
		})
	}
	if err == nil && !slices.Equal(got, s.story.ends) {
		err = otherwise("the thread is another one", s.story.ends, got)
	}
	return err
}
