package main

import (
	"bytes"
	"io"
	"math"
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) {
	pgserver.GuardMain()
	os.Exit(m.Run())
}

func TestQuantiles(t *testing.T) {
	var s samples
	for i := range 100 {
		s = append(s, time.Duration(100-i)*time.Millisecond)
	}
	if p50, p99, none := s.quantile(0.5), s.quantile(0.99), samples(nil).quantile(0.5); p50 != 51*time.Millisecond ||
		p99 != 100*time.Millisecond || none != 0 {
		t.Errorf("p50 %s, p99 %s, without samples %s", p50, p99, none)
	}
}

func TestABenchmarkIsNamed(t *testing.T) {
	for _, args := range [][]string{nil, {"chat"}} {
		assert.ErrorContains(t, run(t.Context(), args, io.Discard, io.Discard), "chat-priority", args)
	}
}

func TestBenchmarksMeasure(t *testing.T) {
	for name, test := range map[string]struct {
		args     []string
		rows     []string // regular expressions
		progress string
		alone    bool // not beside other benchmarks
	}{
		"chat-priority": {
			args: []string{"-for=500ms", "-background=6", "-workers=2", "-model=20ms"}, alone: true,
			rows: []string{
				`no other work \| [1-9]`, `as shipped\) \| [1-9]`, `no priority\) \| [1-9]`,
				`floor: .* \| 2000 \| \d+\.\d+`,
			},
		},
		"waiting": {
			args: []string{"-n=40", "-events=20", "-workers=2"}, alone: true,
			rows: []string{
				`floor: .*callers: 32 \| 20 \| \d+`, `resumes, callers: 1 \| 20 \| \d+`,
				`growth of the process \| heap`, `by events, .* ended`, `by timers \| .* ended`,
			},
		},
		"executions": {
			args: []string{"-rounds=1", "-for=100ms", "-queued=20", "-orphans=10", "-workers=4"},
			rows: []string{
				`bench_one \| 32 \| [1-9]\d* \| [1-9]`, `bench_ten \| 8 \| [1-9]\d* \| [1-9]`,
				`20 through the queue \| 32 \| [1-9]`, `\n10 orphaned executions.* \d`,
			},
		},
		"lanes": {
			args: []string{"-rounds=1", "-for=100ms", "-tries=200", "-handovers=3", "-others=50"},
			rows: []string{
				`\| 32 \| 0 \| [1-9]\d* \| [1-9]`, `\| 1 \| 50 \| [1-9]\d* \| [1-9]`, `\| 200 \| 50 \| [1-9]`,
				`floor: UPDATE and NOTIFY .* \| 0 \| 3 \| \d`, `AcquireWait returns \| 50 \| 3 \| \d`,
			},
		},
		"story": {
			args: []string{"-rows=2000", "-traces=5", "-visits=2"}, progress: "counted 4000 rows", // of the activity log
			rows: []string{
				`floor: .*\| 5 \| \d`, "by `trace_id`, .* \\| 5 \\| ", "`agent trace ID`.* \\| 5 \\| ",
				"view `agent_skill_health` \\| 2 \\| ",
			},
		},
		"scaling": {
			args: []string{
				"-rows=2000", "-waiting=100", "-threads=100", "-visits=1", "-processes=4", "-idle=100ms", "-for=50ms",
				"-backlog=20", "-watched=0s",
			},
			rows: []string{
				`a row of the activity log \| 200 \| [1-9]\d* \| [1-9]\d* \| 0 \| [1-9]\d* \| 2000 \| \d`,
				`an execution that waits \| 10 \| [1-9]`, `a thread with ten messages \| 10 \| [1-9]`,
				`of one step that has ended \| 10 \| .* \| 20 \|`, `by processes \| 1 \| 1 \| 2 \| 4 \| 4 predicted`,
				`connections \| [1-9]\d* \| [1-9]\d* \| [1-9]\d* \| [1-9]\d* \|`, `20 executions at once: µs \| [1-9]`,
				`an event, .* has ended \| [1-9]\d* \| [1-9]`, "a visit to `/threads` \\| ",
			},
		},
		"why": {
			args: []string{"-rows=2000", "-traces=5"},
			rows: []string{
				`floor: one row by an index \| 5 \| \d`, "`select \\* from why\\(trace\\)` \\| 5 \\| \\d",
				"`agent why ID`.* \\| 5 \\| ", `by all of them: \d+\.`,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if !test.alone {
				t.Parallel()
			}
			var out, progress bytes.Buffer
			require.NoError(t, run(t.Context(), append([]string{name}, test.args...), &out, &progress))
			assert.Contains(t, progress.String(), test.progress)
			for _, row := range test.rows {
				assert.Truef(t, regexp.MustCompile(row).MatchString(out.String()), "no %q in\n%s", row, out.String())
			}
		})
	}
}

// Callers of the floor fail when the listener loses its connection.
func TestTheFloorNeedsItsListener(t *testing.T) {
	t.Parallel()
	err := withDatabase(t.Context(), pgserver.Config{}, 4, io.Discard, func(pool *pgxpool.Pool) error {
		f := &eventFloor{pool: pool}
		require.NoError(t, f.start(t.Context()))
		defer f.stop()
		_, err := f.run(t.Context(), 1, 1)
		require.NoError(t, err)
		_, err = pool.Exec(t.Context(), `
			select pg_terminate_backend(pid, 10000) from pg_stat_activity where query = 'listen bench_events'`)
		require.NoError(t, err)
		_, err = f.run(t.Context(), 1, 1)
		return err
	})
	assert.ErrorContains(t, err, "wait for notifications")
}

func TestAPredictionIsOnTheLineThroughTwoMeasurements(t *testing.T) {
	for _, c := range []struct{ x1, y1, x2, y2, x, want float64 }{
		{1, 10, 16, 40, 64, 136},
		{1, 10, 1, 12, 64, 12}, // one point has no growth
	} {
		if got := extrapolate(c.x1, c.y1, c.x2, c.y2, c.x); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("through (%v, %v) and (%v, %v), at %v: %v, want %v", c.x1, c.y1, c.x2, c.y2, c.x, got, c.want)
		}
	}
	if over, under, none := deviation(120, 100), deviation(80, 100), deviation(1, 0); over != "+20 %" ||
		under != "-20 %" || none != "" {
		t.Errorf("deviations %q, %q and %q", over, under, none)
	}
}
