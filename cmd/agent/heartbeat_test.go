package main

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestHeartbeat(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	story := p.must("heartbeat")
	assert.Contains(t, story, "hb_", "✓ completed", "self_heal", "save_memories", "total: 6 activities", " skills checked")
	var got struct {
		Execution struct{ ID, Status string }
		Trace     struct {
			TraceID    string `json:"trace_id"`
			Activities []struct{ Status string }
		}
	}
	p.mustJSON(&got, "heartbeat")
	assert.Truef(t, got.Execution.Status == "completed" && len(got.Trace.Activities) == 6 &&
		strings.HasPrefix(got.Trace.TraceID, "hb_"), "got %+v", got)

	db := connect(t, url)
	for _, lane := range []string{"heartbeat", "operate"} {
		pgtest.Exec(t, db, `select try_acquire_agent_lock($1, 'somebody', 600)`, lane)
		p.mustJSON(&got, "heartbeat")
		assert.Truef(t, got.Execution.Status == "completed" && len(got.Trace.Activities) == 1 &&
			got.Trace.Activities[0].Status == "skipped", "with lane %s held: %+v", lane, got)
		pgtest.Exec(t, db, `select release_agent_lock($1, 'somebody')`, lane)
	}
}

// A failed heartbeat prints its trace, and the error names it.
func TestFailedHeartbeat(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t)
	model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.Refusal(http.StatusUnauthorized, "invalid_request_error", "invalid_api_key", "no such key", 0)
	})
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL(), "OPENAI_API_KEY=sk-none")
	p.must("apply", caretaker)
	got := p.run("heartbeat", "--json")
	var story struct{ Execution struct{ Status string } }
	if err := decodeOne(got.out, &story); err != nil || got.code != 1 || story.Execution.Status != "failed" {
		t.Errorf("exit %d, %v, status %s", got.code, err, story.Execution.Status)
	}
	last := got.err[strings.LastIndex(strings.TrimSpace(got.err), "\n")+1:]
	var fault struct {
		Error struct {
			Code, Message string
			TraceID       string `json:"trace_id"`
		}
	}
	require.NoError(t, json.Unmarshal([]byte(last), &fault), got.err)
	assert.Truef(t, fault.Error.Code == "failed" && strings.HasPrefix(fault.Error.TraceID, "hb_"), "got %+v", fault)
	assert.Contains(t, fault.Error.Message, "status 401: (invalid_api_key) no such key", "check OPENAI_API_KEY")
}

func TestInterruptedHeartbeat(t *testing.T) {
	t.Parallel()
	model := modeltest.New(t, modeltest.Hang())
	p := newProgram(t, pgtest.URL(t), "OPENAI_BASE_URL="+model.URL())
	p.must("apply", caretaker)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan commandResult, 1)
	go func() { ended <- p.runWith(ctx, nil, "heartbeat") }()
	defer cancel()
	pgtest.Eventually(t, func() bool { return len(model.Requests()) > 0 }, "the model is asked")
	cancel()
	if got := <-ended; got.code != 130 || !strings.Contains(got.out, "cancelled") {
		t.Errorf("exit %d, stdout %s, stderr %s", got.code, got.out, got.err)
	}
	assert.Contains(t, p.must("lanes", "ls"), "no lane is held")
	assert.Contains(t, p.must("executions", "ls"), "cancelled")
}

// A heartbeat that yields names the holder and where it resumes. It is no failure.
func TestHeartbeatReportsYield(t *testing.T) {
	t.Parallel()
	for name, extra := range map[string][]string{"text": nil, "JSON": {"--json"}} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.URL(t)
			db := connect(t, url)
			p := newProgram(t, url)
			p.must("apply", caretaker)
			makeDue(t, db)
			pgtest.Exec(t, db, `
				create function come() returns trigger language plpgsql as $$
				begin
					perform try_acquire_agent_lock('operate', 'an admin', 600);
					return new;
				end $$;
				create trigger come after insert on agent_activity for each row
				  when (new.skill_name = 'self_heal') execute function come()`)
			got := p.run(append([]string{"heartbeat"}, extra...)...)
			const want = "the heartbeat waits for the admin, holder of the lane operate; " +
				"a process that runs `agent serve` or `agent dev` resumes it\n"
			assert.Truef(t, got.code == 0 && got.err == want && got.out != "",
				"exit %d, stderr %q, stdout:\n%s", got.code, got.err, got.out)
			assert.Contains(t, p.must("executions", "ls"), "waits for lane operate")
		})
	}
}

func TestHeartbeatWhilePaused(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	p.must("pause", "--reason", "prices look wrong")
	assert.Contains(t, p.must("heartbeat"), "skipped: autonomous work is paused since", "heartbeat", "prices look wrong")
	assert.Contains(t, p.must("heartbeat", "--json"), `"skipped": "autonomous work is paused since`, `"status": "skipped"`)
	assert.Contains(t, p.must("activity", "ls", "--surface", "heartbeat"), "skipped")
	assert.Contains(t, p.must("executions", "ls"), "no executions")
}
