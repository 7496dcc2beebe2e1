package chat_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// limited gives a process a daily limit of tokens, in Madrid.
func limited(t *testing.T, tokens int64) func(*chat.Chat) {
	t.Helper()
	madrid, err := time.LoadLocation("Europe/Madrid")
	if err != nil {
		t.Fatal(err)
	}
	return func(c *chat.Chat) {
		c.Loop.Limits, c.Loop.Zone = budgets.Limits{Day: budgets.Limit{Tokens: tokens}}, madrid
	}
}

// The stock clients try 429 again, unless they are told not to.
func TestASpentLimitIsAnErrorThatSaysWhenItEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.process(t, limited(t, 10))
	client := p.official("site", option.WithMaxRetries(2))
	ends := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 1)
	spent := func(err error) *openai.Error {
		t.Helper()
		var refused *openai.Error
		if !errors.As(err, &refused) || refused.Code != "insufficient_quota" || refused.Type != "insufficient_quota" ||
			!strings.Contains(refused.Message, "I can answer again from 20") || !strings.Contains(refused.Message, ":00 CE") {
			t.Fatalf("the error is %v", err)
		}
		return refused
	}
	_, err := client.Chat.Completions.New(t.Context(), ask("Hello."))
	refused := spent(err)
	if refused.StatusCode != http.StatusTooManyRequests || refused.Response.Header.Get("X-Should-Retry") != "false" ||
		refused.Response.Header.Get("Retry-After") == "" {
		t.Errorf("status %d, header %v", refused.StatusCode, refused.Response.Header)
	}
	if day := ends.Format("2006-01-02"); time.Now().UTC().Before(ends) && !strings.Contains(refused.Message, "from "+day+" 0") {
		t.Errorf("%q does not say that the limit ends on %s", refused.Message, day)
	}
	stream := client.Chat.Completions.NewStreaming(t.Context(), ask("Hello?"))
	said := ""
	for stream.Next() {
		if c := stream.Current(); len(c.Choices) > 0 {
			said += c.Choices[0].Delta.Content
		}
	}
	if said != "" || stream.Err() == nil || !strings.Contains(stream.Err().Error(), "insufficient_quota") {
		t.Errorf("the stream says %q and ends with %v", said, stream.Err())
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_messages where role = 'user'`); n != 2 {
		t.Errorf("%d messages arrived, want each once", n)
	}
	if n := len(w.model.Requests()); n != 0 {
		t.Errorf("the model was asked %d times", n)
	}
}

func TestALimitThatIsSpentInTheMiddleOfAnAnswerIsSaidInIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Let me see.").AndCall("opening", `{}`).WithUsage(1900, 90, 0))
	p := w.process(t, limited(t, 2000))
	client := p.official("site")
	got, err := client.Chat.Completions.New(t.Context(), ask("When do you open?"))
	if err != nil {
		t.Fatal(err)
	}
	text := got.Choices[0].Message.Content
	if !strings.HasPrefix(text, "Let me see.\n\nI have reached my limit for today. I can answer again from 20") {
		t.Errorf("the answer is %q", text)
	}
}
