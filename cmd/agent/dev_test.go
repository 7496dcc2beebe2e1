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
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// Without settings dev runs its own server and keeps its data. Other commands in the folder find it, even when dev
// does not run.
func TestDevOnItsOwnServer(t *testing.T) {
	t.Chdir(t.TempDir())
	p := newProgramWithoutDatabase(t, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 29 2 *")
	first := p.start("dev")
	first.find(t, `\^C stops`)
	contains(t, first.err.String(), "making a PostgreSQL", "applied the caretaker example", "(kept; --ephemeral removes it)")
	if got := p.must("trace", "last", "--surface", "heartbeat"); !strings.HasPrefix(first.out.String(), got) {
		t.Errorf("the last trace is not the story that was told:\n%s", got)
	}
	first.stop()
	if code := <-first.ended; code != 0 {
		t.Fatalf("exit %d, stderr %s", code, first.err.String())
	}
	contains(t, p.must("skills", "ls"), "broken_on_purpose")
	contains(t, p.must("doctor"), "ok   server         PostgreSQL", "ok   database       reachable")

	second := p.start("dev")
	second.find(t, `\^C stops`)
	for _, word := range []string{"making", "migrating the schema", "applied"} {
		if strings.Contains(second.err.String(), word) {
			t.Errorf("the second start is %s something again:\n%s", word, second.err.String())
		}
	}
	second.stop()
	if code := <-second.ended; code != 0 {
		t.Errorf("exit %d, stderr %s", code, second.err.String())
	}
}

// An invalid .env stops dev before it creates anything.
func TestDevReadsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	for text, says := range map[string]string{"AGENT_LANES=maybe\n": `AGENT_LANES: "maybe"`, "no assignment\n": ".env"} {
		if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got := newProgramWithoutDatabase(t).run("dev")
		if got.code != 2 || !strings.Contains(got.err, says) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("with %q: exit %d, stderr %q", text, got.code, got.err)
		}
	}
	for text, c := range map[string]struct{ environ, says string }{
		"OPENAI_BASE_URL=http://127.0.0.1:9/v1\n": {"OPENAI_API_KEY=sk-of-the-user", "OPENAI_BASE_URL is in .env, and OPENAI_API_KEY"},
		"AGENT_LISTEN=0.0.0.0:0\n":                {"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", ".env cannot open a port"},
	} {
		if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := newProgramWithoutDatabase(t, c.environ).run("dev"); got.code != 2 || !strings.Contains(got.err, c.says) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("with %q: exit %d, stderr %q", text, got.code, got.err)
		}
	}
	if err := os.Remove(".env"); err != nil {
		t.Fatal(err)
	}
	if got := newProgramWithoutDatabase(t).run("lanes", "ls"); got.code != 2 || !strings.Contains(got.err, "no database; set DATABASE_URL") {
		t.Errorf("another command: exit %d, stderr %q", got.code, got.err)
	}
	if _, err := os.Stat(stateDir); err == nil {
		t.Error("a data directory was made")
	}
}

// Commands in the folder use dev's settings; a command with a database ignores the folder.
func TestCommandsReadDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	url := pgtest.URL(t)
	if err := os.WriteFile(".env", []byte("DATABASE_URL="+url+"\nAGENT_NAME=robin\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	contains(t, newProgramWithoutDatabase(t).must("agents", "ls"), "robin")
	if got := newProgramWithoutDatabase(t).run("serve"); got.code != 2 || !strings.Contains(got.err, "DATABASE_URL is not set") {
		t.Errorf("serve: exit %d, stderr %q", got.code, got.err)
	}
	if got := newProgramWithoutDatabase(t, "DATABASE_URL="+url).must("agents", "ls"); strings.Contains(got, "robin") {
		t.Errorf("a command that is told its database: %s", got)
	}
}

// dev reports the names that .env set, and does not run a program named there.
func TestDevReportsDotEnv(t *testing.T) {
	t.Chdir(t.TempDir())
	ran := filepath.Join(t.TempDir(), "ran")
	for _, name := range []string{"postgres", "initdb", "pg_ctl"} {
		if err := os.WriteFile(name, []byte("#!/bin/sh\ntouch "+ran+"\nexit 1\n"), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	text := "AGENT_PG_BIN=" + here + "\nPATH=" + here + "\nLD_PRELOAD=" + here + "/x.so\nOPENAI_API_KEY_FILE=/etc/passwd\nAGENT_NAME=robin\nMY_SECRET=hunter2\n"
	if err := os.WriteFile(".env", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newProgramWithoutDatabase(t, "AGENT_LISTEN=127.0.0.1:0", "HOME="+here).start("dev", "--ephemeral")
	p.find(t, `(\.env sets AGENT_NAME, LD_PRELOAD, MY_SECRET)`)
	p.find(t, `(\.env cannot set AGENT_PG_BIN, OPENAI_API_KEY_FILE, PATH; set)`)
	p.find(t, `(\^C stops)`)
	p.stop()
	<-p.ended
	if strings.Contains(p.err.String(), "hunter2") {
		t.Error("a value is shown")
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("a program of the folder ran")
	}
}

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
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, args...)
	cmd.Env = append(append(os.Environ(), asAgent+"=1"), settings...)
	cmd.Dir = t.TempDir()
	return cmd
}

// TestDemoOutput checks each story exactly: lane holders, messages, waits, hand-overs and their times.
func TestDemoOutput(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]struct{ story, thread string }{
		"independent": {`
14:00 an admin acts: starts agente_a
14:00 agente_a acquired
14:00 agente_a said: Necesito tus documentos
14:00 agente_a waits event
14:01 an admin acts: starts agente_b
14:01 agente_b queued agente_a: Ahora tienes una evaluación pendiente
14:01 agente_b ended: completed
14:02 a system acts: tells agente_a that its work is done
14:02 agente_a ended: completed
14:02 agente_a released
14:02 agente_b said: Ahora tienes una evaluación pendiente`, `
1 agente_a sent: Necesito tus documentos
2 agente_b sent: Ahora tienes una evaluación pendiente`},
		"chained": {`
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
14:30 coordinador released`, `
1 coordinador_encadenado sent: Iniciamos tu proceso
2 recolector_encadenado sent: Necesito tu INE
3 María received: Aquí está mi INE
4 recolector_encadenado sent: Documento recibido
5 coordinador_encadenado sent: Siguiente paso...`},
		"hung": {`
14:00 an admin acts: starts agente_a
14:00 agente_a acts: is a worker outside: it locks its run
14:00 agente_a acquired
14:00 agente_a said: Necesito tus documentos
14:01 agente_a acts: hangs: it beats, and says nothing more
14:10 the thread acts: is stale: nothing was said for 10 minutes
14:10 agente_a acts: still beats, and does not know
14:11 an admin acts: starts agente_b
14:11 agente_a stale
14:11 agente_b acquired
14:11 agente_b said: Ahora tienes una evaluación pendiente
14:11 agente_b ended: completed
14:11 agente_b released`, `
1 external:agente_a sent: Necesito tus documentos
2 agente_b sent: Ahora tienes una evaluación pendiente`},
		"onboarding": {`
10:00 an admin acts: starts coordinador
10:00 coordinador acquired
10:00 coordinador said: ¡Hola, María! Iniciamos tu proceso. ¿Empezamos?
10:00 coordinador waits response
10:01 María said: Sí, empecemos
10:01 coordinador triggers recolector
10:01 recolector inherited coordinador
10:01 recolector said: Necesito tus documentos: INE, CURP (solicitud …).
10:01 recolector waits document
10:03 María acts: uploads her INE
10:04 María acts: uploads her CURP
10:04 recolector said: Documentos recibidos. ¡Gracias!
10:04 recolector ended: completed
10:04 recolector returned coordinador
10:04 coordinador said: Siguiente paso: tu evaluación.
10:04 coordinador triggers evaluacion
10:04 evaluacion inherited coordinador
10:04 evaluacion said: Tienes una evaluación de 30 preguntas (solicitud …).
10:04 evaluacion waits test
10:07 María acts: finishes the test with 86 points
10:07 evaluacion ended: completed
10:07 evaluacion returned coordinador
10:07 coordinador said: ¡Felicidades, María! Obtuviste 86 puntos. Por favor firma tu contrato (solicitud …).
10:07 coordinador waits signature
10:09 María acts: signs the contract
10:09 coordinador said: Contrato firmado. ¡Te damos la bienvenida al equipo!
10:09 coordinador ended: completed
10:09 coordinador released`, `
1 coordinador sent: ¡Hola, María! Iniciamos tu proceso. ¿Empezamos?
2 María received: Sí, empecemos
3 recolector sent: Necesito tus documentos: INE, CURP (solicitud …).
4 recolector sent: Documentos recibidos. ¡Gracias!
5 coordinador sent: Siguiente paso: tu evaluación.
6 evaluacion sent: Tienes una evaluación de 30 preguntas (solicitud …).
7 coordinador sent: ¡Felicidades, María! Obtuviste 86 puntos. Por favor firma tu contrato (solicitud …).
8 coordinador sent: Contrato firmado. ¡Te damos la bienvenida al equipo!`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.URL(t)
			cmd := agentCommand(t, []string{"DATABASE_URL=" + url, "AGENT_LANES=off", "AGENT_LIMITS=", "OPENAI_BASE_URL=http://127.0.0.1:1"},
				"demo", name, "--fast", "--json")
			var errs bytes.Buffer
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("%v\n%s\n%s", err, out, errs.String())
			}
			story, thread := parseStory(t, string(out))
			if diff := cmp.Diff(strings.TrimSpace(want.story), story); diff != "" {
				t.Errorf("the story (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(strings.TrimSpace(want.thread), thread); diff != "" {
				t.Errorf("the thread (-want +got):\n%s", diff)
			}
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
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if last.At != "" {
			moments = append(moments, last.At+" "+storyEvent{Who: last.Who, Event: last.Event, Subject: last.Other, Text: last.Text}.text())
		}
		for _, m := range last.Messages {
			messages = append(messages, anyID.ReplaceAllString(fmt.Sprintf("%d %s %s: %s", *m.Seq, m.Who, m.Status, m.Content), "…"))
		}
	}
	if last.Event != "checked" || !last.OK {
		t.Errorf("the last line is %+v", last)
	}
	return strings.Join(moments, "\n"), strings.Join(messages, "\n")
}

// checkNothingLeft reports rows and files that a demo left.
func checkNothingLeft(t *testing.T, url, said string) {
	t.Helper()
	name := regexp.MustCompile(`agent_demo_\w+`).FindString(said)
	db := connect(t, url)
	var left bool
	var rows int
	if err := db.QueryRow(t.Context(), `
		select exists (select from pg_database where datname = $1),
		       (select count(*)::int from agent_threads) + (select count(*)::int from agent_flows)`, name).Scan(&left, &rows); err != nil {
		t.Fatal(err)
	}
	if name == "" || left || rows > 0 {
		t.Errorf("database %q is left: %v; %d rows in the given one", name, left, rows)
	}
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
		}, []string{"at 14:02 the story went otherwise:", "  - agente_b said: Ahora tienes", "  + agente_a ended: completed"}},
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
			if err == nil || exitCode(t.Context(), err) != 1 {
				t.Fatalf("ended with %v\n%s", err, out.String())
			}
			contains(t, strings.Join(errorLines(err), "\n"), test.says...)
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
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "takes the thread") {
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != exitInterrupted {
		t.Fatalf("ended with %v\n%s", err, errs.String())
	}
	contains(t, errs.String(), "agent: interrupted")
	dir := regexp.MustCompile(`data directory in (\S+)`).FindStringSubmatch(errs.String())
	if dir == nil {
		t.Fatalf("no server was made:\n%s", errs.String())
	}
	pgtest.Eventually(t, pgWait, func() bool {
		_, err := os.Stat(dir[1])
		return errors.Is(err, os.ErrNotExist)
	}, "the server's folder is removed")
	if left, err := os.ReadDir(cmd.Dir); err != nil || len(left) > 0 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}
}

func TestDemoText(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	contains(t, p.must("demo"), "STORY", "onboarding", "independent", "chained", "hung")
	if p.must("demo", "list") != p.must("demo") {
		t.Error("list is not the same")
	}
	if got := p.run("demo", "nobody"); got.code != exitUsage || !strings.Contains(got.err, "see agent demo list") {
		t.Errorf("an unknown story: %+v", got)
	}
	before := time.Now()
	shown := p.must("demo", "hung", "--fast")
	contains(t, shown, "14:11  agente_a     has been silent for too long: lane stale, clearing", "SEQ  WHO", "Checked: it went as it should.")
	if time.Since(before) < 11*demoMinuteFast {
		t.Error("the clock was not waited for")
	}
}
