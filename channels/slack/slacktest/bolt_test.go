package slacktest_test

import (
	"bufio"
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/channels/slack/slacktest"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// app is a running app of @slack/bolt.
type app struct {
	*testing.T
	fake  *slacktest.Server
	lines chan string
	seen  []string
}

//go:embed testdata/bolt.mjs
var boltScript string

// startApp runs an app of Slack's framework for Node.
func startApp(t *testing.T, mode string) *app {
	t.Helper()
	fake := slacktest.New()
	fake.RetryAfter = 2 * time.Second
	t.Cleanup(fake.Close)
	run := npmtest.Command(t, boltScript, "@slack/bolt@5.1.0")
	run.Env = append(run.Env, "FAKE="+fake.URL, "MODE="+mode, "TOKEN="+slacktest.Token,
		"APP_TOKEN="+slacktest.AppToken, "SECRET="+slacktest.SigningSecret)
	out, err := run.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	t.Cleanup(func() { _ = run.Process.Kill(); _ = run.Wait() })
	a := &app{T: t, fake: fake, lines: make(chan string, 100)}
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			var got struct {
				Got, Text    string
				Retry, Files int
			}
			_ = json.Unmarshal(s.Bytes(), &got)
			line := strings.TrimSpace(got.Got + " " + got.Text)
			if got.Retry > 0 {
				line += fmt.Sprintf(" (retry %d)", got.Retry)
			}
			if got.Files > 0 {
				line += fmt.Sprintf(" (%d files)", got.Files)
			}
			a.lines <- line
		}
	}()
	if ready := a.find("ready"); mode == "http" {
		fake.EventsURL = strings.TrimPrefix(ready, "ready ")
	}
	return a
}

// find waits for a new line with a prefix.
func (a *app) find(prefix string) string {
	a.Helper()
	deadline := time.After(pgtest.Timeout)
	for {
		if i := slices.IndexFunc(a.seen, func(s string) bool { return strings.HasPrefix(s, prefix) }); i >= 0 {
			line := a.seen[i]
			a.seen = slices.Delete(a.seen, i, i+1)
			return line
		}
		select {
		case line := <-a.lines:
			a.seen = append(a.seen, line)
		case <-deadline:
			a.Fatalf("bolt did not get %q; it got %q", prefix, a.seen)
		}
	}
}

// Slack's own framework works with the fake: messages, threads, buttons, retries, duplicates, files, limits.
func TestBoltWorksAgainstTheFake(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"socket", "http"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			a := startApp(t, mode)
			asked := a.fake.Say("U1", "D1", "ask", "")
			a.find("message ask")
			a.find("thread - 7")
			answer := a.fake.Messages("D1")[1]
			assert.Truef(t, answer.ThreadTS == asked && answer.Text == "May I?", "answer %+v", answer)
			require.NoError(t, a.fake.Click("U2", "D1", answer.TS, "Yes"))
			a.find("click U2 nonce")
			a.fake.Wait()
			assert.Error(t, a.fake.Click("U2", "D1", answer.TS, "No"), "a button that is not there was pressed")
			a.fake.Say("U1", "C1", "<@"+slacktest.BotUser+"> hello", "")
			a.find("message <@U0BOT> hello")
			a.find("mention <@U0BOT> hello")
			a.fake.Say("U1", "D1", "look", "", slacktest.File{ID: "F1", Name: "a.txt", Mimetype: "text/plain", Size: 1})
			a.find("message look (1 files)")
			a.fake.Wait()
			a.fake.LoseAcks(1)
			a.fake.Say("U1", "D1", "lost", "")
			a.find("message lost")
			a.find("message lost (retry 1)")
			a.fake.Wait()
			a.fake.Twice = true
			a.fake.Say("U1", "D1", "twice", "")
			a.find("message twice")
			a.find("message twice")
			a.fake.Twice = false
			a.fake.Faults(func(method string, call int) slacktest.Fault {
				return map[bool]slacktest.Fault{true: {RetryAfter: 1}}[method == "chat.postMessage" && call == 2]
			})
			a.fake.Say("U1", "D2", "ask", "")
			a.find("thread - 7")
			assert.Equal(t, 3, a.fake.Calls("chat.postMessage"), "calls: bolt did not repeat the one that was limited")
			if mode == "http" {
				a.challenge()
			}
		})
	}
}

// challenge checks that an app answers Slack's challenge, and rejects unsigned requests.
func (a *app) challenge() {
	a.Helper()
	body := []byte(`{"type":"url_verification","challenge":"3eZbrw1a","token":"x"}`)
	for secret, want := range map[string]int{slacktest.SigningSecret: http.StatusOK, "another": http.StatusUnauthorized} {
		h := slacktest.Sign(secret, time.Now(), body)
		h.Set("Content-Type", "application/json")
		status, text := a.fake.Post(h, body)
		if status != want || want == http.StatusOK && !strings.Contains(text, "3eZbrw1a") {
			a.Errorf("signed with %s: %d %s", secret, status, text)
		}
	}
}
