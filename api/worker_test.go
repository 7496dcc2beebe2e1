//go:build unix

package api_test

import (
	"context"
	"os"
	osexec "os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// node is the example worker, run by Node.
type node struct {
	cmd *osexec.Cmd
	out *logged
}

func (a *agent) node(base, name, id, pause string) *node {
	a.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.t.Context()), 3*time.Minute)
	n := &node{cmd: osexec.CommandContext(ctx, "node", "../examples/outside-worker/worker.mjs", id, "8", pause), out: &logged{}}
	n.cmd.Env = append(os.Environ(), "AGENT_URL="+base, "AGENT_ADMIN_TOKEN="+token, "WORKER="+name, "TTL_SECONDS=600")
	n.cmd.Stdout, n.cmd.Stderr = n.out, n.out
	if err := n.cmd.Start(); err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() {
		cancel()
		_ = n.cmd.Wait() // it was waited for already, or is killed
	})
	return n
}

func (n *node) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := n.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

// recorded waits until a worker has recorded some steps of its own.
func (a *agent) recorded(n *node, steps int) {
	a.t.Helper()
	pgtest.Eventually(a.t, time.Minute, func() bool { return strings.Count(n.out.String(), "recorded add") >= steps }, "the worker records its steps")
}

func TestAWorkerInNodeIsKilledAndAnotherGoesOnFromTheLastCheckpoint(t *testing.T) {
	t.Parallel()
	if _, err := osexec.LookPath("node"); err != nil {
		t.Skip("node is not installed: the worker in another language is not tried")
	}
	a := alive(t)
	base := a.listen(nil).URL
	x := a.outside(`,"on_lost":"hand_on","input":{"start":10}`)
	over := func() { // as if the ten minutes had passed
		t.Helper()
		exec(t, a.pool, `update agent_workers set expires_at = clock_timestamp() where execution_id = $1`, x.ID)
		pgtest.Eventually(t, time.Minute, func() bool {
			return value[bool](t, a.pool, `select claimed_by is null and status = 'running' from agent_executions where id = $1`, x.ID)
		}, "the run is handed on")
	}
	first := a.node(base, "first", x.ID, "500")
	a.recorded(first, 2)
	first.signal(t, syscall.SIGSTOP)
	intruder := a.node(base, "intruder", x.ID, "0")
	if err := intruder.cmd.Wait(); intruder.cmd.ProcessState.ExitCode() != 9 || !strings.Contains(intruder.out.String(), "first has it until") {
		t.Errorf("who came too early: %v %s", err, intruder.out)
	}
	first.signal(t, syscall.SIGKILL)
	_ = first.cmd.Wait() // killed
	over()
	second := a.node(base, "second", x.ID, "500")
	a.recorded(second, 2)
	second.signal(t, syscall.SIGSTOP) // alive, but not heard of
	over()
	third := a.node(base, "third", x.ID, "0")
	if err := third.cmd.Wait(); err != nil || !strings.Contains(third.out.String(), "completed: 46") {
		t.Errorf("third: %v %s", err, third.out)
	}
	second.signal(t, syscall.SIGCONT)
	if err := second.cmd.Wait(); second.cmd.ProcessState.ExitCode() != 9 || !strings.Contains(second.out.String(), ": 409 ") {
		t.Errorf("who was woken late: %v %s", err, second.out)
	}
	steps := value[int](t, a.pool, `select count(*)::int from agent_checkpoints where execution_id = $1`, x.ID)
	claims := value[int](t, a.pool, `select count(distinct claim)::int from agent_checkpoints where execution_id = $1`, x.ID)
	var ended struct {
		Status  string
		Summary string `json:"result_summary"`
	}
	a.get("/v1/executions/"+x.ID, &ended)
	if steps != 8 || claims != 3 || ended.Status != "completed" || ended.Summary != "the sum is 46" {
		t.Errorf("%d steps under %d claims, %+v", steps, claims, ended)
	}
	for _, n := range []*node{second, third} { // nobody does again what was recorded
		if strings.Contains(n.out.String(), "recorded add 1\n") || strings.Contains(n.out.String(), "locked with 0") {
			t.Errorf("it began anew: %s", n.out)
		}
	}
}
