package operate_test

import (
	"fmt"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

func TestALongSessionIsSummarisedAndStaysAffordable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, false, func(o *operate.Options) { o.History = 400 })
	s := p.open(t, "")
	longest, summarised := 0, false
	w.model.Handle(func(_ int, r openai.ChatCompletionRequest) modeltest.Reply {
		if strings.Contains(r.Messages[0].Content, "summary") && len(r.Messages) == 2 && len(r.Tools) == 0 {
			return modeltest.Text("The admin counts.")
		}
		size := 0
		for _, m := range r.Messages {
			size += len(m.Content)
		}
		longest = max(longest, size)
		summarised = summarised || strings.Contains(r.Messages[1].Content, "The admin counts.")
		return modeltest.Text(strings.Repeat("word ", 60))
	})
	for n := range 25 {
		if _, err := s.Turn(t.Context(), fmt.Sprintf("Turn %d. %s", n, strings.Repeat("word ", 20)), false, func(operate.Event) {}); err != nil {
			t.Fatal(err)
		}
	}
	if !summarised {
		t.Error("no turn was given the summary")
	}
	if longest > 6000 {
		t.Errorf("the longest request has %d bytes", longest)
	}
	if through := value[int](t, w.pool, `select summary_through from agent_threads where id = $1`, s.ID()); through < 20 {
		t.Errorf("the summary reaches to %d", through)
	}
}
