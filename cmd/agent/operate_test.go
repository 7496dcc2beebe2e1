package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/models"
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

// newOperateTest has two skills: slow takes ten minutes, and wipe needs approval.
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

// terminalTest runs agent operate on a terminal.
type terminalTest struct {
	t        *testing.T
	keys     *os.File
	shown    testkit.Log
	consumed int // the length that waitFor has consumed
	ended    chan int
	stop     context.CancelFunc
}

func (d *operateTest) startTerminal(args ...string) *terminalTest {
	d.t.Helper()
	return d.startConsole(append([]string{"operate"}, args...)...)
}

// startConsole runs a command on a terminal.
func (d *operateTest) startConsole(args ...string) *terminalTest {
	t := d.t
	t.Helper()
	keys, tty, err := pty.Open()
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	require.NoError(t, pty.Setsize(keys, &pty.Winsize{Rows: 40, Cols: 200}))
	ctx, stop := context.WithCancel(t.Context())
	s := &terminalTest{t: t, keys: keys, ended: make(chan int, 1), stop: stop}
	var reading, running sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(&s.shown, keys) }) // ends with an error when the terminal closes
	running.Go(func() {
		s.ended <- run(ctx, args, d.environ, tty, tty, tty)
		_ = tty.Close()
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
		_, _ = keys.WriteString("\n") // unblocks a pending read, so that the terminal can be closed
		reading.Wait()
		_ = keys.Close()
	})
	return s
}

func (s *terminalTest) typeKeys(keys string) {
	s.t.Helper()
	_, err := s.keys.WriteString(keys)
	require.NoError(s.t, err)
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")

// waitFor waits until new output matches, and returns the first group.
func (s *terminalTest) waitFor(pattern string) string {
	s.t.Helper()
	expression := regexp.MustCompile(pattern)
	found := ""
	pgtest.Eventually(s.t, func() bool {
		text := escapes.ReplaceAllString(s.shown.String(), "")
		at := expression.FindStringSubmatchIndex(text[min(s.consumed, len(text)):])
		if at == nil {
			return false
		}
		found = text[s.consumed:][at[len(at)-2]:at[len(at)-1]]
		s.consumed += at[1]
		return true
	}, "the screen shows "+pattern+"; it has:\n"+s.shown.String())
	return found
}

func (s *terminalTest) waitExit() int {
	s.t.Helper()
	var code int
	pgtest.Eventually(s.t, func() bool {
		select {
		case code = <-s.ended:
			return true
		default:
			return false
		}
	}, "agent operate ends")
	return code
}

func TestOperateTerminal(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("look", `{}`), modeltest.Text("It is 42."))
	s := d.startTerminal()
	s.waitFor(`session ses_`)
	s.waitFor(`> `)
	s.typeKeys("Hwo\x7f\x7fow many?\r")
	s.waitFor(`· look \{\} …`)
	s.waitFor(`✓ look \{\} → success .*42.*ms\)`)
	s.waitFor(`It is 42\.`)
	id := s.waitFor(`(op_[0-9A-Z]{26})  answered`)
	if asked := d.model.Requests()[0].Messages; !strings.HasSuffix(asked[len(asked)-1].Content, "\n\nHow many?") {
		t.Errorf("the model was asked %q", asked[len(asked)-1].Content)
	}
	for command, want := range map[string]string{
		"/trace": id, "/trace " + id: "model_call", "/lanes": `operate`, "/approvals": "no pending approvals",
		"/objectives": "no objectives",
		"/memory":     "no memories", "/help": "/reject ID", "/nope": "unknown command /nope", "/approve": "name an approval",
	} {
		s.typeKeys(command + "\r")
		s.waitFor(want)
	}
	s.waitFor(`> `)
	s.typeKeys("\x04")
	if code := s.waitExit(); code != 0 || d.laneHeld(t) {
		t.Errorf("exit %d; lane held: %v", code, d.laneHeld(t))
	}
}

func TestTerminalInterruptCancelsTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Still here."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("half a line\x03")
	s.typeKeys("Be slow.\r")
	d.waitSlow()
	s.typeKeys("\x03")
	s.waitFor(`op_[0-9A-Z]{26}  cancelled`)
	waitQuery(t, d.pool, `select count(*) = 0 from pg_stat_activity
		where datname = current_database() and state = 'active' and query like '%pg_sleep(600)%' and pid <> pg_backend_pid()`)
	pgtest.Equal(t, d.pool, "cancelled by admin", `select status || ' by ' || cancelled_by from agent_executions`)
	s.typeKeys("Are you there?\r")
	s.waitFor(`Still here\.`)
	pgtest.Equal(t, d.pool, "Be slow.", `select content from agent_messages order by id limit 1`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
}

func TestTerminalApprovals(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ keys, status, reason, shown string }{
		"approved": {"y\r", "consumed", "", `✓ wipe \{\} → success`},
		"rejected": {"not on a Friday\r", "rejected", "not on a Friday", `✗ wipe \{\} → denied not on a Friday`},
		"refused":  {"n\r", "rejected", "", `✗ wipe \{\} → denied`},
	} {
		t.Run(name, func(t *testing.T) {
			d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
			s := d.startTerminal()
			s.waitFor(`> `)
			s.typeKeys("Wipe.\r")
			s.waitFor(`waits for approval: wipe \{\}`)
			s.waitFor(`approve\?`)
			s.typeKeys(test.keys)
			s.waitFor(test.shown)
			s.waitFor(`It is over\.`)
			pgtest.Equal(t, d.pool, test.status+":"+test.reason, `select status || ':' || reason from agent_approvals`)
			s.typeKeys("\x04")
			s.waitExit()
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

func TestTerminalApprovalDecidedLater(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("Meanwhile."), modeltest.Text("It is over."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("Wipe.\r")
	id := s.waitFor(`\n  ([0-9a-f-]{36}), until`)
	s.waitFor(`approve\?`)
	s.typeKeys("\r")
	s.waitFor(`left open`)
	s.typeKeys("And else?\r")
	s.waitFor(`Meanwhile\.`)
	s.typeKeys("/approve " + id + "\r")
	s.waitFor(`It is over\.`)
	s.typeKeys("\x04")
	s.waitExit()
}

func TestTerminalApprovalDecidedElsewhere(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
	s := d.startTerminal()
	s.waitFor(`> `)
	s.typeKeys("Wipe.\r")
	id := s.waitFor(`\n  ([0-9a-f-]{36}), until`)
	s.waitFor(`approve\?`)
	_, err := approvals.Decide(t.Context(), d.pool, id, true, "admin", "")
	require.NoError(t, err)
	s.waitFor(`It is over\.`)
	s.typeKeys("\x04")
	assert.Equal(t, 0, s.waitExit())
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
	assert.Contains(t, got.err, "✓ look {}", "  answered  1,", " tokens", "op_")
	var answer operate.Answer
	d.mustJSON(&answer, "operate", "And now?", "--session", "ses_again")
	assert.Truef(t, answer.Text == "Still 42." && answer.SessionID == "ses_again" && answer.TraceID != "" &&
		answer.Ended == "answered", "the document is %+v", answer)
	assert.True(t, !d.laneHeld(t), "the lane is still held")
}

// The replay of a turn outside of a phase needs no model either.
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

func TestOperateOnceLeavesApprovalsOpen(t *testing.T) {
	t.Parallel()
	wipe := modeltest.ToolCall("wipe", `{}`)
	d := newOperateTest(t, wipe, wipe, wipe, modeltest.Text("To what?"))
	got := d.run("operate", "Wipe. Yes, I approve.")
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
	silent, keep := io.Pipe()
	defer keep.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan commandResult, 1)
	go func() { ended <- d.runWith(ctx, silent, "chat") }()
	pgtest.Until(t, d.pool, 1, `select count(*) from agent_workers`)
	interrupt()
	select {
	case got := <-ended:
		assert.Equal(t, exitInterrupted, got.code, got.err)
	case <-time.After(pgtest.Timeout):
		t.Error("it waits for the pipe")
		keep.Close() // ends the command
		<-ended
	}
}

func TestInterruptedVisitorTurn(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.Text("Too late."))
	var out testkit.Log
	c := &cli{environ: config.Environ(d.environ), in: strings.NewReader(""), out: io.Discard, err: &out}
	err := c.withApp(t.Context(), func(ctx context.Context, _ *session, a *app.App) error {
		interrupts := make(chan os.Signal, 1)
		interrupts <- os.Interrupt
		return (&chatSession{cli: c, chat: a.Chat, thread: "t"}).sendInterruptible(ctx, interrupts, "Wait.")
	})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	assert.Truef(t, err == nil && lines[len(lines)-1] == "cancelled" && !strings.Contains(out.String(), "exit"),
		"%v, said %q", err, out.String())
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

// An interrupt cancels a turn, of an admin or a visitor. The turn's resources stay until its run has handled the
// cancellation.
func TestInterruptCancelsTurn(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"operate", "chat"} {
		d := newOperateTest(t, modeltest.ToolCall("slow", `{}`))
		pgtest.Exec(t, d.pool, `update agent_skills set scope = 'both'`)
		s := d.start(command, "Be slow.")
		d.waitSlow()
		s.stop()
		if code := <-s.ended; code != exitInterrupted || strings.Contains(s.err.String(), "ERROR") {
			t.Errorf("agent %s: exit %d, stderr %s", command, code, s.err.String())
		}
		if got := pgtest.Value[string](t, d.pool, `select status from agent_executions`); got != "cancelled" ||
			d.laneHeld(t) {
			t.Errorf("agent %s: the turn is %s; lane held: %v", command, got, d.laneHeld(t))
		}
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
	nothing := modeltest.Text("")
	for name, c := range map[string]struct {
		replies []modeltest.Reply
		environ string
		ended   string
		says    []string
	}{
		"a spent budget": {nil, "AGENT_BUDGET_DAY_TOKENS=10", "day", []string{"its limit of day was reached"}},
		"a small limit": {
			nil, "AGENT_MAX_TOKENS=10", "tokens", []string{"see AGENT_MAX_TOKENS and limits.tokens of the agent"},
		},
		"a stalled model": {
			[]modeltest.Reply{nothing, nothing, nothing, nothing},
			"AGENT_TIMEZONE=UTC", reason.Stalled,
			[]string{"the model stalled"},
		},
		"a hung model": {
			[]modeltest.Reply{modeltest.Hang(), modeltest.Hang()},
			"AGENT_RUN_TIMEOUT=1s", "time",
			[]string{"its limit of time was reached"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := newOperateTest(t, c.replies...)
			d.environ = append(d.environ, c.environ)
			got := d.run("operate", "How many?")
			assert.Truef(t, got.code == exitFailed && strings.HasPrefix(got.out, "Stopped because "),
				"exit %d, stdout %q", got.code, got.out)
			assert.Contains(t, got.err, append(c.says, "op_")...)
			got = d.run("operate", "How many?", "--json")
			var answer operate.Answer
			err := decodeOne(got.out, &answer)
			assert.Truef(t, err == nil && got.code == exitFailed && answer.Ended == c.ended &&
				answer.Until.IsZero() != (c.ended == "day"), "exit %d, %v, %+v", got.code, err, answer)
		})
	}
}

func TestModelServerSettings(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t, modeltest.Text("It is 42."), modeltest.Text("It is 43."))
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=scripted",
		"AGENT_REASONING_EFFORT=low",
		`AGENT_MODEL_HEADERS={"api-key":"key-of-azure"}`, `AGENT_MODEL_QUERY={"api-version":"2026-10-01"}`,
		`AGENT_MODEL_EXTRA={"chat_template_kwargs":{"enable_thinking":false}}`)
	assert.Contains(t, p.must("operate", "how many?"), "It is 42.")
	asked := server.Requests()[0]
	assert.Truef(t, asked.Path == "/v1/chat/completions" && asked.Header.Get("Api-Key") == "key-of-azure" &&
		asked.Query.Get("api-version") == "2026-10-01", "asked at %s with %v, %v", asked.Path, asked.Header, asked.Query)
	assert.Contains(t, asked.Body, `"reasoning_effort":"low"`, `"chat_template_kwargs":{"enable_thinking":false}`)
	p = newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL_API=responses")
	got := p.run("operate", "how many?")
	assert.Contains(t, got.out, "It is 43.")
	assert.Contains(t, got.err, "AGENT_MODEL is not set")
	if asked := server.Requests()[1]; asked.Path != "/v1/responses" || asked.Model != app.DefaultModel {
		t.Errorf("asked %s at %s", asked.Model, asked.Path)
	}
}

func TestModelPrices(t *testing.T) {
	t.Parallel()
	table := app.Prices(config.Config{Prices: map[string]config.Price{
		"m": {Input: 2, Cached: 0.2, CacheWrite: 2.5, Output: 10, Long: config.Long{Over: 1000, Input: 4, Output: 15}},
	}})
	price, found := table.Of("m")
	for _, c := range []struct {
		used models.Usage
		want float64
	}{
		{models.Usage{PromptTokens: 1000, CompletionTokens: 10, CachedTokens: 500, CacheWriteTokens: 300}, 0.00135},
		{models.Usage{PromptTokens: 2000, CompletionTokens: 10, CachedTokens: 500}, 0.00815},
	} {
		got := price.Cost(c.used)
		assert.Truef(t, found && math.Abs(got-c.want) <= 1e-9, "%+v costs %g, not %g", c.used, got, c.want)
	}
}
