package telegramtest_test

import (
	"bufio"
	_ "embed"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/channels/telegram/telegramtest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

//go:embed testdata/grammy.mjs
var grammyScript string

// A real client gets the same results from the fake as from the Bot API.
func TestGrammyDrivesTheFake(t *testing.T) {
	t.Parallel()
	fake := telegramtest.New(t)
	run := npmtest.Command(t, grammyScript, "grammy@1.46.0")
	run.Env = append(run.Env, "FAKE="+fake.URL(), "TOKEN="+telegramtest.Token)
	out, err := run.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	lines := make(chan string, 100)
	go func() {
		defer close(lines)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			lines <- scan.Text()
		}
	}()
	says := func(want string) {
		t.Helper()
		select {
		case line := <-lines:
			assert.Equal(t, want, line)
		case <-time.After(30 * time.Second):
			t.Fatalf("grammY does not say %q", want)
		}
	}
	says("started shop_bot")
	fake.Say(5, 7, "Mara", "hello")
	says("message 7 hello")
	says("refused 400 Bad Request: can't parse entities: can't find end tag")
	assert.Equal(t, "You said hello", fake.Sent(5)[0].Text)
	assert.Equal(t, 1, fake.Typed())
	asked := fake.Say(5, 7, "Mara", "ask")
	says("message 7 ask")
	pgtest.EventuallyWithin(t, 30*time.Second, func() bool { return len(fake.Sent(5)) >= 2 }, "no question")
	assert.Equal(t, "nonce", fake.Sent(5)[1].Buttons["Yes"])
	fake.Click("c1", 5, 7, "Mara", asked+1, "nonce")
	says("click 7 nonce")
	pgtest.EventuallyWithin(t, 30*time.Second, func() bool { return len(fake.Notices()) >= 1 }, "no answer")
	assert.Equal(t, "Thanks", fake.Notices()[0])
	fake.Attach(5, 7, "Mara", "see", "a.txt", "text/plain", []byte("content"))
	says("file a.txt content")
}
