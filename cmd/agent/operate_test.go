package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

type operateTest struct {
	program
	url   string
	pool  *pgxpool.Pool
	model *modeltest.Server
}

// newOperateTest returns a program with three skills: slow takes ten minutes, wipe needs approval, and look is quick.
func newOperateTest(t *testing.T, replies ...modeltest.Reply) *operateTest {
	t.Helper()
	d := &operateTest{url: pgtest.URL(t), model: modeltest.New(t, replies...)}
	d.program = newProgram(t, d.url, "OPENAI_BASE_URL="+d.model.URL(), "AGENT_MODEL=scripted", "TERM=xterm")
	d.pool = connect(t, d.url)
	for _, s := range []skills.Definition{
		{Name: "slow", Handler: "sql:select pg_sleep(600)"},
		{Name: "wipe", Handler: "sql:select 'wiped' as done", Trust: skills.TrustApprove},
		{Name: "look", Handler: "sql:select 42 as answer"},
	} {
		s.Description = "does " + s.Name
		_, err := skills.Put(t.Context(), d.pool, s, skills.SourceWorkspace)
		require.NoError(t, err)
	}
	return d
}

func (d *operateTest) laneHeld(t *testing.T) bool {
	t.Helper()
	return pgtest.Value[bool](t, d.pool, `select is_agent_lock_held('operate')`)
}

func TestOperateReportsHolder(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("One."))
	s := d.startTerminal()
	session := s.waitFor(`session (ses_[0-9A-Z]+)`)
	s.waitFor(`> `)
	s.typeKeys("Hello.\r")
	s.waitFor(`One\.`)
	got := d.run("operate", "Hello.")
	assert.Equal(t, exitBusy, got.code)
	assert.Contains(t, got.err, "lane busy", session, "--wait", "--watch")
	pgtest.Equal(t, d.pool, 1, `select count(*) from agent_activity where skill_name = 'operate' and status = 'skipped'
		and lane = 'operate'`)
	s.typeKeys("\x04")
	s.waitExit()
}

func TestOperateOnce(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42.").WithUsage(1200, 1, 0),
		modeltest.Text("Still 42."))
	got := d.run("operate", "How many?")
	assert.Equal(t, 0, got.code)
	assert.Equal(t, "It is 42.\n", got.out)
	// 1,200 tokens of the scripted usage, and those of the first response
	assert.Contains(t, got.err, "✓ look {}", "  answered  1,", " tokens", "op_")
	var answer operate.Answer
	d.mustJSON(&answer, "operate", "And now?", "--session", "ses_again")
	assert.Truef(t, answer.Text == "Still 42." && answer.SessionID == "ses_again" && answer.TraceID != "" &&
		answer.Ended == "answered", "the document is %+v", answer)
	assert.True(t, !d.laneHeld(t), "the lane is still held")
}

// A replay reads the model's responses from the checkpoints.
func TestReplayOperateTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."))
	d.must("operate", "How many?")
	asked := len(d.model.Requests())
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_executions where flow = 'operate'`)
	assert.Contains(t, d.must("executions", "replay", id), "completed of operate", "equal")
	n := len(d.model.Requests())
	assert.Truef(t, n == asked, "the replay asked the model %d times", n-asked)
}

// Each line of a pipe is an event, also the result of a slash command.
func TestOperateLinesPrintJSON(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`))
	d.mustFail(1, "waits for approval", "operate", "Wipe.")
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_approvals`)
	trace := pgtest.Value[string](t, d.pool, `select trace_id from agent_approvals`)
	lines := "/lanes\n/approvals\n/objectives\n/memory x\n/trace " + trace + "\n/reject " + id + "\n/help\n"
	got := d.runWith(t.Context(), strings.NewReader(lines), "operate", "--json")
	var names []string
	for line := range strings.Lines(got.out) {
		var event struct {
			Event string
			Data  map[string]json.RawMessage
		}
		require.NoError(t, json.Unmarshal([]byte(line), &event), line)
		names = append(names, event.Event)
	}
	assert.Equal(t, "lanes approvals objectives memory trace decided", strings.Join(names, " "))
	assert.Contains(t, got.out, id, `"status":"rejected"`)
	assert.Contains(t, got.err, "/help prints no JSON")
}

func TestOperateOnceLeavesApprovalsOpen(t *testing.T) {
	t.Parallel()
	wipe := modeltest.ToolCall("wipe", `{}`)
	d := newOperateTest(t, wipe, wipe, wipe, modeltest.Text("To what?"))
	got := d.run("operate", "Wipe. Yes, I approve.") // a message never approves
	assert.Equal(t, exitFailed, got.code)
	assert.Contains(t, got.err, "waits for approval: wipe {}", "agent serve")
	got = d.run("operate", "Wipe.", "--json")
	var answer operate.Answer
	err := decodeOne(got.out, &answer)
	assert.Truef(t, err == nil && got.code == exitFailed && len(answer.Approvals) == 1 &&
		answer.Ended == operate.WaitingApproval, "exit %d, %v, %+v", got.code, err, answer)
	assert.Equal(t, exitFailed, d.runWith(t.Context(), strings.NewReader("Wipe.\ny\n/quit\n"), "operate").code)
	pgtest.Equal(t, d.pool, 3, `select count(*) from agent_approvals where status = 'pending'`)
}

func TestOperateLines(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("One."), modeltest.Text("Two."), modeltest.Text("Three."))
	got := d.runWith(t.Context(), strings.NewReader("Say one.\n\n/help\nSay two."), "operate")
	assert.Truef(t, got.code == 0 && strings.HasPrefix(got.out, "One.\n/trace") &&
		strings.HasSuffix(got.out, "\nTwo.\n") && !strings.Contains(got.out, "> "), "exit %d, stdout %q", got.code, got.out)
	pgtest.Equal(t, d.pool, 1, `select count(distinct thread_id) from agent_executions`)
	got = d.runWith(t.Context(), strings.NewReader("Say three.\n"), "operate", "--json")
	var names []string
	for line := range strings.Lines(got.out) {
		var event struct {
			Event string          `json:"event"`
			Data  json.RawMessage `json:"data"`
		}
		err := json.Unmarshal([]byte(line), &event)
		assert.Truef(t, err == nil && bytes.HasPrefix(event.Data, []byte("{")), "%s: %v", line, err)
		if len(names) == 0 || names[len(names)-1] != event.Event {
			names = append(names, event.Event)
		}
	}
	assert.Equal(t, "start delta done", strings.Join(names, " "))
}

func TestUnreadableInput(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("One."))
	got := d.runWith(t.Context(), strings.NewReader("Say one.\n"+strings.Repeat("x", maxLine+1)+"\n"), "operate")
	assert.Equal(t, exitFailed, got.code)
	assert.Equal(t, "One.\n", got.out)
	assert.Contains(t, got.err, "agent: read messages: ", "token too long")
}

func TestInterruptEndsSilentPipe(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t)
	silent, inputWriter := io.Pipe()
	defer inputWriter.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan commandResult, 1)
	go func() { ended <- d.runWith(ctx, silent, "chat") }()
	pgtest.Until(t, d.pool, 1, `select count(*) from agent_workers`)
	interrupt()
	select {
	case got := <-ended:
		assert.Equal(t, exitInterrupted, got.code, got.err)
	case <-time.After(pgtest.Timeout):
		t.Error("the interrupted command still waits for its input")
		inputWriter.Close() // ends the command
		<-ended
	}
}

// A closed pipe or terminal ends the session like ^C, and releases the lane.
func TestOperateReleasesLaneWhenOutputCloses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		args  []string
		close func(cmd *exec.Cmd, out *os.File) error
		code  int
	}{
		"closed pipe": {
			[]string{"operate", "--json"}, func(_ *exec.Cmd, out *os.File) error { return out.Close() }, exitPipe,
		},
		"closed terminal": {
			[]string{"operate"},
			func(cmd *exec.Cmd, _ *os.File) error { return cmd.Process.Signal(syscall.SIGHUP) },
			exitInterrupted,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newOperateTest(t, modeltest.Text("One."), modeltest.Text("Two."))
			var errs testkit.Log
			cmd := exec.Command(os.Args[0], test.args...)
			cmd.Env = append(append(os.Environ(), asAgent+"=1"), d.environ...)
			cmd.Stderr = &errs
			in, err := cmd.StdinPipe()
			require.NoError(t, err)
			out, writer, err := os.Pipe()
			require.NoError(t, err)
			defer out.Close()
			cmd.Stdout = writer
			require.NoError(t, cmd.Start())
			defer func() { _ = cmd.Process.Kill() }()
			require.NoError(t, writer.Close())
			_, err = io.WriteString(in, "Say one.\n")
			require.NoError(t, err)
			_, err = out.Read(make([]byte, 1))
			require.NoError(t, err)
			require.NoError(t, test.close(cmd, out))
			if test.code == exitPipe { // the next answer notices it
				_, err = io.WriteString(in, "Say two.\n")
				require.NoError(t, err)
			}
			_ = cmd.Wait()
			assert.Equal(t, test.code, cmd.ProcessState.ExitCode(), errs.String())
			assert.True(t, !d.laneHeld(t), "the lane is held")
		})
	}
}

func TestInterruptedVisitorTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Hang())
	var out testkit.Log
	c := &cli{environ: config.Environ(d.environ), in: strings.NewReader(""), out: io.Discard, err: &out}
	err := c.withApp(t.Context(), func(ctx context.Context, _ *session, a *app.App) error {
		interrupts := make(chan os.Signal, 1)
		interrupts <- os.Interrupt
		return (&chatSession{cli: c, chat: a.Chat, thread: "t"}).sendInterruptible(ctx, interrupts, "Wait.")
	})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	assert.Truef(t, err == nil && lines[len(lines)-1] == "cancelled" && !strings.Contains(out.String(), "exit"),
		"error %v, stderr %q", err, out.String())
}

func TestFailedTurnExitCode(t *testing.T) {
	t.Parallel()
	refused := modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0)
	d := newOperateTest(t, refused, refused, modeltest.Text("Fine."))
	got := d.run("operate", "Hello.")
	assert.Equal(t, exitFailed, got.code)
	assert.Contains(t, got.err, "Incorrect API key provided")
	got = d.runWith(t.Context(), strings.NewReader("Hello.\nHello.\n"), "operate")
	assert.Equal(t, exitFailed, got.code)
	assert.Equal(t, "Fine.\n", got.out)
}

// An interrupt cancels a turn, of an admin or a visitor.
func TestInterruptCancelsTurn(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"operate", "chat"} {
		t.Run(command, func(t *testing.T) {
			d := newOperateTest(t, modeltest.ToolCall("slow", `{}`))
			pgtest.Exec(t, d.pool, `update agent_skills set scope = 'both'`)
			s := d.start(command, "Be slow.")
			d.waitSlow()
			s.stop()
			assert.Equal(t, exitInterrupted, <-s.ended)
			// The turn's resources stay open until its run has handled the cancellation.
			assert.True(t, !strings.Contains(s.err.String(), "ERROR"), "stderr:", s.err.String())
			assert.Equal(t, "cancelled", pgtest.Value[string](t, d.pool, `select status from agent_executions`))
			assert.True(t, !d.laneHeld(t), "the lane is still held")
		})
	}
}

// waitSlow waits until the skill slow runs.
func (d *operateTest) waitSlow() {
	d.t.Helper()
	waitQuery(d.t, d.pool, `select count(*) = 1 from agent_activity where skill_name = 'slow' and status = 'running'`)
}

func TestOperateWatch(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."))
	w := d.start("operate", "--watch")
	pgtest.Eventually(t, func() bool { return strings.Contains(w.err.String(), "no admin is active") },
		"the watch begins")
	d.must("operate", "How many?", "--session", "ses_seen")
	pgtest.Eventually(t, func() bool {
		return strings.Contains(w.out.String(), "It is 42.") && strings.Contains(w.err.String(), "✓ look {}") &&
			strings.Contains(w.err.String(), "answered")
	}, "the watcher sees the turn")
	w.stop()
	<-w.ended
}

// A turn without an answer must not exit with 0.
func TestOperateWithoutAnswer(t *testing.T) {
	t.Parallel()
	emptyAnswer := modeltest.Text("")
	for name, c := range map[string]struct {
		replies []modeltest.Reply
		setting string // may be empty
		ended   string
		stderr  string
	}{
		"a spent budget": {
			setting: "AGENT_BUDGET_DAY_TOKENS=10", ended: "day", stderr: "its limit of day was reached",
		},
		"a small limit": {
			setting: "AGENT_MAX_TOKENS=10", ended: "tokens", stderr: "see AGENT_MAX_TOKENS and limits.tokens of the agent",
		},
		"a stalled model": {
			replies: []modeltest.Reply{emptyAnswer, emptyAnswer, emptyAnswer, emptyAnswer},
			ended:   reason.Stalled, stderr: "the model stalled",
		},
		"a hung model": {
			replies: []modeltest.Reply{modeltest.Hang(), modeltest.Hang()},
			setting: "AGENT_RUN_TIMEOUT=1s", ended: "time", stderr: "its limit of time was reached",
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newOperateTest(t, c.replies...)
			if c.setting != "" {
				d.environ = append(d.environ, c.setting)
			}
			got := d.run("operate", "How many?")
			assert.Truef(t, got.code == exitFailed && strings.HasPrefix(got.out, "Stopped because "),
				"exit %d, stdout %q", got.code, got.out)
			assert.Contains(t, got.err, c.stderr, "op_")
			got = d.run("operate", "How many?", "--json")
			var answer operate.Answer
			err := decodeOne(got.out, &answer)
			assert.NoError(t, err)
			assert.Equal(t, exitFailed, got.code)
			assert.Equal(t, c.ended, answer.Ended)
			hasUntil := c.ended == "day" // only a day's budget renews
			assert.Equal(t, hasUntil, !answer.Until.IsZero(), "until:", answer.Until)
		})
	}
}

// The row of an approval request shows its decision, wherever its trace is shown.
func TestTraceShowsApprovalDecision(t *testing.T) {
	t.Parallel()
	wipe := modeltest.ToolCall("wipe", `{}`)
	d := newOperateTest(t, wipe, wipe)
	ask := func() (id string) {
		t.Helper()
		assert.Equal(t, exitFailed, d.run("operate", "Wipe.").code)
		assert.Contains(t, d.must("trace", "last", "--surface", "operate"), "‖ pending_approval")
		return pgtest.Value[string](t, d.pool, `select id::text from agent_approvals where status = 'pending'`)
	}
	id := ask()
	d.must("approvals", "reject", id, "--reason", "not on a Friday")
	of := pgtest.Value[string](t, d.pool, `select trace_id from agent_approvals`) // the decision has its own trace
	shown := d.must("trace", of)
	assert.Contains(t, shown, "✗ rejected", "by admin via cli: not on a Friday")
	assert.Truef(t, !strings.Contains(shown, "pending_approval"), "the trace: %s", shown)
	assert.Contains(t, d.must("why", of), "approval of wipe: rejected by admin via cli")
	assert.Contains(t, d.must("activity", "ls", "--status", "pending_approval"), "  pending_approval, rejected  ")
	var story activity.Trace
	d.mustJSON(&story, "trace", of)
	require.Equal(t, 1, len(story.Decisions))
	for activityID, got := range story.Decisions {
		assert.True(t, got.ApprovalID == id && got.Status == "rejected" && got.Reason == "not on a Friday")
		assert.Equal(t, "pending_approval", pgtest.Value[string](t, d.pool,
			`select status from agent_activity where id::text = $1`, activityID))
	}
	id = ask()
	d.must("approvals", "approve", id)
	of = pgtest.Value[string](t, d.pool, `select trace_id from agent_approvals where status = 'approved'`)
	assert.Contains(t, d.must("trace", of), "✓ approved", "by admin via cli")
}

// A decision shows the end of its turn, also if another process finished the turn first. A trigger plays that process.
func TestDecisionReportsTurnEndedElsewhere(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`))
	d.mustFail(1, "waits for approval", "operate", "--session", "ses_1", "Wipe.")
	pgtest.Exec(t, d.pool, `
		create function finish_turn() returns trigger language plpgsql as $$ begin
		  perform set_config('session_replication_role', 'replica', true);
		  update agent_executions set status = 'completed', completed_at = clock_timestamp(), waiting_for = null,
		         waiting_key = null, waiting_step = null, waiting_until = null, waiting_data = null, result_type = 'success',
		         result = '{"ended": "answered", "text": "It is over."}'
		   where id = new.execution_id;
		  perform set_config('session_replication_role', 'origin', true);
		  return null;
		end $$;
		create trigger finish_turn after update of status on agent_approvals for each row execute function finish_turn()`)
	id := pgtest.Value[string](t, d.pool, `select id::text from agent_approvals`)
	got := d.runWith(t.Context(), strings.NewReader("/approve "+id+"\n"), "operate", "--session", "ses_1")
	assert.Equal(t, 0, got.code, got.err)
	assert.Equal(t, "It is over.\n", got.out)
}

func TestFailedTurnNamesItsTrace(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Refusal(http.StatusBadRequest, "invalid_request_error", "bad", "no", 0))
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "OPENAI_API_KEY=k", "AGENT_MODEL=m")
	p.mustFail(1, "; see agent trace op_", "operate", "hello")
}
