package activity_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

// failedRun is a failed execution.
func failedRun(id, parent, step, message string) activity.FailedSpan {
	return activity.FailedSpan{
		ID: id, ExecutionID: id, IsExecution: true, IsRoot: parent == "", ParentID: parent, Name: id, Step: step,
		Status: "failed", Message: message,
	}
}

// failedCall is a failed activity; execution is empty outside executions.
func failedCall(id, execution, step, message string) activity.FailedSpan {
	return activity.FailedSpan{ID: id, ExecutionID: execution, Name: id, Step: step, Status: "error", Message: message}
}

func at(f activity.FailedSpan, second int64) activity.FailedSpan {
	f.At = time.Unix(second, 0)
	return f
}

func TestRootCauseIsInnermostPropagatedError(t *testing.T) {
	t.Parallel()
	const sql = `relation "notes" does not exist (SQLSTATE 42P01)`
	long := strings.Repeat("the answer is not what was asked for ", 40)
	for name, test := range map[string]struct {
		failures           []activity.FailedSpan
		want               string
		upstream, attempts int
	}{
		"nothing failed": {},
		"nested flows": {[]activity.FailedSpan{
			failedRun("parent", "", "nested", "action nested (trigger_agent): flow child ended as failed: action pull (skill): "+sql),
			failedRun("child", "parent", "pull", "action pull (skill): "+sql),
			failedCall("phase of parent", "parent", "nested", "action nested (trigger_agent): flow child ended as failed: action pull (skill): "+sql),
			failedCall("phase of child", "child", "pull", "action pull (skill): "+sql),
			failedCall("query", "child", "pull/call", sql),
			failedCall("notification", "", "", "dial tcp 127.0.0.1:27090: connect: connection refused"),
		}, "query", 4, 1},
		"retries": {[]activity.FailedSpan{
			failedRun("import", "", "fetch", "fetch: no answer within 5 s"),
			failedCall("first", "import", "fetch", "no answer within 5 s"),
			failedCall("second", "import", "fetch", "no answer within 5 s"),
			failedCall("third", "import", "fetch", "no answer within 5 s"),
		}, "third", 1, 3},
		"handled error": {[]activity.FailedSpan{
			failedRun("import", "", "write", "write: disk full"),
			failedCall("handled", "import", "read", "not found"),
			failedCall("cause", "import", "write", "disk full"),
		}, "cause", 1, 1},
		"same text twice": {[]activity.FailedSpan{
			failedRun("import", "", "write", "write: not found"),
			failedCall("cause", "import", "write/put", "not found"),
			failedCall("handled", "import", "look/a/b", "not found"),
		}, "cause", 2, 1}, // a handled error with the same text counts as passing it on
		"two roots": {[]activity.FailedSpan{
			failedRun("retried", "", "write", "disk full"), failedRun("last", "", "send", "no answer"),
		}, "last", 0, 1},
		"newest first": {[]activity.FailedSpan{
			at(failedCall("last", "", "", "no such lane"), 9), at(failedCall("first", "", "", "lane is free"), 1),
		}, "last", 0, 1},
		"same text at each level": {[]activity.FailedSpan{
			failedRun("outer", "", "a", "the disk is full"),
			failedRun("inner", "outer", "b", "the disk is full"),
			failedCall("phase", "inner", "b", "the disk is full"),
			failedCall("put", "inner", "b/put", "the disk is full"),
		}, "put", 3, 1},
		"text is not passed on": {[]activity.FailedSpan{
			failedRun("import", "", "write", "too many attempts"),
			failedCall("earlier", "import", "read", "not found"),
			failedCall("phase", "import", "write", "gave up"),
			failedCall("cause", "import", "write/put", "disk full"),
		}, "cause", 1, 1},
		"execution alone": {[]activity.FailedSpan{
			failedRun("import", "", "", "it has run for more than 1 h"),
			failedCall("handled", "import", "read", "not found"),
		}, "import", 0, 1},
		"handled child": {[]activity.FailedSpan{
			failedRun("child", "parent", "b", "the disk is full"), failedCall("put", "child", "b", "the disk is full"),
		}, "", 0, 0},
		"short text in another word": {[]activity.FailedSpan{
			failedRun("import", "", "", "the export failed"), failedCall("handled", "import", "read", "port"),
		}, "import", 0, 1},
		"cut text": {[]activity.FailedSpan{
			failedRun("import", "", "ask", ("ask: " + long)[:700]), failedCall("cause", "import", "ask/model", long),
		}, "cause", 1, 1},
		"act of an admin": {[]activity.FailedSpan{
			failedCall("first", "", "", "lane is free"), failedCall("last", "", "", "no such lane"),
		}, "last", 0, 1},
		"no texts": {[]activity.FailedSpan{
			failedRun("import", "", "write", ""), failedCall("put", "import", "write", ""),
		}, "put", 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for i := range test.failures {
				if test.failures[i].At.IsZero() {
					test.failures[i].At = time.Unix(int64(i), 0)
				}
			}
			got := activity.FindRootCause(test.failures)
			switch {
			case got == nil && test.want == "":
			case got == nil || got.ID != test.want:
				t.Fatalf("root cause is %+v, want %q", got, test.want)
			case got.Upstream != test.upstream || got.Attempts != test.attempts:
				t.Errorf("×%d upstream, %d attempts, want %d and %d", got.Upstream, got.Attempts, test.upstream, test.attempts)
			}
		})
	}
}

func TestFailedTraceHasRootCause(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := trace.New(trace.Flow)
	parent := run(t, db, id, "failed", time.Minute, nil)
	child := run(t, db, id, "failed", 50*time.Second, parent)
	pgtest.Exec(t, db, `
		update agent_executions set failed_step = 'pull', error_message = case when parent_id is null
		         then 'flow beat ended as failed: action pull: no such table' else 'action pull: no such table' end
		 where trace_id = @id`, postgres.Strict{"id": string(id)})
	for _, message := range []string{"no such table", "connection refused"} {
		pgtest.Exec(t, db, `
			insert into agent_activity (trace_id, execution_id, skill_name, step, status, error_message, error_class, finished_at)
			values (@id, @child::uuid, 'query', 'pull/call', 'error', @message, 'sql', clock_timestamp())`,
			postgres.Strict{"id": string(id), "child": child, "message": message})
	}
	got, err := activity.TraceOf(t.Context(), db, string(id))
	require.NoError(t, err)
	cause := got.RootCause
	require.True(t, cause != nil, "no root cause")
	assert.Equal(t, "no such table", cause.Message)
	assert.Equal(t, child, cause.ExecutionID)
	assert.Equal(t, 2, cause.Upstream, "upstream rows")
	ofChild, err := activity.RootCauseOfExecution(t.Context(), db, string(id), child)
	require.NoError(t, err)
	assert.Truef(t, ofChild != nil && ofChild.ID == cause.ID && ofChild.Upstream == 1, "the child's is %+v", ofChild)
	other := run(t, db, id, "completed", time.Minute, nil)
	ofOther, err := activity.RootCauseOfExecution(t.Context(), db, string(id), other)
	require.NoError(t, err)
	assert.Truef(t, ofOther == nil, "a completed execution has the root cause %+v", ofOther)
	var story strings.Builder
	require.NoError(t, activity.WriteStory(&story, got, false))
	assert.Contains(t, story.String(), "root cause: query: no such table, 2 attempts, ×2 upstream")
	answer, err := why.Of(t.Context(), db, string(id))
	require.NoError(t, err)
	assert.Truef(t, answer.RootCause != nil && answer.RootCause.ID == got.RootCause.ID, "why names %+v", answer.RootCause)
}
