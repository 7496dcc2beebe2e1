package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// demoEvent is a line of a story's JSON.
type demoEvent struct {
	At, Who, Event, Other, Text string
	Messages                    []threadRow
	OK                          bool
}

// agentCommand runs agent as a process.
func agentCommand(t *testing.T, settings []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), settings...)
	cmd.Dir = t.TempDir()
	return cmd
}

// chainedOutput is the output of the story chained: lane holders, messages, waits, handovers and their times. The
// program compares every story with its script.
const chainedOutput = `
14:00 an admin acts: starts coordinador
14:00 coordinador acquired
14:00 coordinador said: Iniciamos tu proceso
14:01 coordinador triggers recolector
14:01 recolector inherited coordinador
14:01 recolector said: Necesito tu INE
14:05 recolector waits response
14:30 María said: Aquí está mi INE
14:30 recolector said: Documento recibido
14:30 recolector ended: completed
14:30 recolector returned coordinador
14:30 coordinador said: Siguiente paso...
14:30 coordinador ended: completed
14:30 coordinador released`

// TestDemoOutput plays each story. The program checks its events, its thread and its log.
func TestDemoOutput(t *testing.T) {
	t.Parallel()
	for _, story := range stories() {
		t.Run(story.Name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			cmd := agentCommand(t, []string{
				"DATABASE_URL=" + url, "AGENT_LANES=off", "AGENT_LIMITS=",
				"OPENAI_BASE_URL=http://127.0.0.1:1",
			},
				"demo", story.Name, "--fast", "--json")
			var errs bytes.Buffer
			cmd.Stderr = &errs
			out, err := cmd.Output()
			require.Truef(t, err == nil, "%v\n%s\n%s", err, out, errs.String())
			events, thread := parseStory(t, string(out))
			if story.Name == "chained" {
				assert.NoDiff(t, strings.TrimSpace(chainedOutput), events)
			}
			assert.NoDiff(t, strings.Join(story.ends, "\n"), thread)
			checkNothingLeft(t, url, errs.String())
		})
	}
}

// parseStory splits the output into a story and its thread. The last line confirms the check.
func parseStory(t *testing.T, text string) (story, thread string) {
	t.Helper()
	var moments, messages []string
	var last demoEvent
	for line := range strings.Lines(text) {
		last = demoEvent{}
		require.NoError(t, json.Unmarshal([]byte(line), &last), "in", line)
		if last.At != "" {
			moments = append(moments, last.At+" "+storyEvent{
				Who: last.Who, Event: last.Event, Subject: last.Other,
				Text: last.Text,
			}.text())
		}
		for _, m := range last.Messages {
			messages = append(messages, anyID.ReplaceAllString(fmt.Sprintf("%d %s: %s", *m.Seq, shortName(m.Who), m.Content),
				"…"))
		}
	}
	assert.Truef(t, last.Event == "checked" && last.OK, "the last line is %+v", last)
	return strings.Join(moments, "\n"), strings.Join(messages, "\n")
}

// checkNothingLeft reports the database that a demo left, and rows in the given one.
func checkNothingLeft(t *testing.T, url, stage string) {
	t.Helper()
	name := regexp.MustCompile(`agent_demo_\w+`).FindString(stage)
	db := connect(t, url)
	var left bool
	var rows int
	require.NoError(t, db.QueryRow(t.Context(), `
		select exists (select from pg_database where datname = $1),
		       (select count(*)::int from agent_threads) + (select count(*)::int from agent_flows)`, name).Scan(&left, &rows))
	assert.Truef(t, name != "" && !left && rows == 0,
		"database %q is left: %v; %d rows in the given one", name, left, rows)
}

func TestDemoRequiresURL(t *testing.T) {
	t.Parallel()
	p := newProgramWithoutDatabase(t, "DATABASE_URL=host=/nowhere dbname=agent")
	p.mustFail(exitUsage, "DATABASE_URL: agent demo needs a URL", "demo", "chained")
}

// A deviating story fails with the difference and cleans up.
func TestDemoFailsOnDeviation(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*story)
		says   []string
	}{
		"another order": {func(s *story) {
			then := s.scenes[2].want
			then[0], then[2] = then[2], then[0]
		}, []string{
			"at 14:02 the story took another course:", "  - agente_b said: Ahora tienes",
			"  + agente_a ended: completed",
		}},
		"more than expected": {func(s *story) { s.scenes[2].want = s.scenes[2].want[:2] }, []string{
			"more happened than was expected:", "  + agente_b said: Ahora",
		}},
		"another thread": {func(s *story) { s.ends = s.ends[:1] }, []string{
			"the thread is another one:", "    1 agente_a: Necesito", "  + 2 agente_b: Ahora",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			var out, errs testkit.Log
			c := &cli{environ: map[string]string{"DATABASE_URL": url}, in: strings.NewReader(""), out: &out, err: &errs}
			s := independentStory()
			test.change(&s)
			err := c.demo(t.Context(), s, demoMinuteFast)
			require.Truef(t, err != nil && exitCode(t.Context(), err) == 1, "ended with %v\n%s", err, out.String())
			assert.Contains(t, strings.Join(errorLines(err), "\n"), test.says...)
			checkNothingLeft(t, url, errs.String())
		})
	}
}

// An interrupted demo leaves no server and no file.
func TestInterruptedDemoCleansUp(t *testing.T) {
	t.Parallel()
	cmd := agentCommand(t, []string{"DATABASE_URL="}, "demo", "chained", "--fast")
	var errs testkit.Log
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "takes the thread") {
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	_, _ = io.Copy(io.Discard, out)
	var exit *exec.ExitError
	err = cmd.Wait()
	require.Truef(t, errors.As(err, &exit) && exit.ExitCode() == exitInterrupted, "ended with %v\n%s", err, errs.String())
	assert.Contains(t, errs.String(), "agent: interrupted")
	dir := regexp.MustCompile(`data directory in (\S+)`).FindStringSubmatch(errs.String())
	require.Truef(t, dir != nil, "no server was made:\n%s", errs.String())
	pgtest.Eventually(t, func() bool {
		_, err := os.Stat(dir[1])
		return errors.Is(err, os.ErrNotExist)
	}, "the server's folder is removed")
	left, err := os.ReadDir(cmd.Dir)
	assert.Truef(t, err == nil && len(left) == 0, "left in the folder: %v, %v", left, err)
}

func TestDemoText(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	assert.Contains(t, p.must("demo"), "STORY", "onboarding", "independent", "chained", "hung")
	assert.Equal(t, p.must("demo"), p.must("demo", "list"), "list is not the same")
	p.mustFail(exitFailed, "see agent demo list", "demo", "nobody")
	shown := p.must("demo", "hung", "--fast")
	assert.Contains(t, shown, "14:11  agente_a     has been silent for too long: lane stale, clearing", "SEQ  WHO",
		"Checked: all events came in the right order.")
}

func TestDemoWaitsForItsClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &storyPlayer{minute: demoMinute, startedAt: time.Now()}
		require.NoError(t, s.waitUntil(t.Context(), 11))
		assert.Equal(t, 11*demoMinute, time.Since(s.startedAt))
	})
}
