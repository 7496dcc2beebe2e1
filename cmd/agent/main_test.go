package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// asAgent makes the test binary run as agent, for tests that need a process.
const asAgent = "LANEKEEPER_TEST_AS_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		main()
	}
	time.Local = time.FixedZone("elsewhere", 2*60*60) // so that a missing conversion to UTC shows
	pgtest.AtOnce(4)
	pgtest.Main(browser.Tests{M: m})
}

// caretaker is the example workspace.
const caretaker = "../../examples/caretaker"

// program is agent with settings.
type program struct {
	t       *testing.T
	environ []string
}

type commandResult struct {
	code     int
	out, err string
}

// newProgram returns the program on a database. Settings are NAME=value.
func newProgram(t *testing.T, url string, settings ...string) program {
	t.Helper()
	return program{t, append([]string{"DATABASE_URL=" + url, "AGENT_LOG_LEVEL=warn"}, settings...)}
}

func newProgramWithoutDatabase(t *testing.T, settings ...string) program {
	t.Helper()
	return program{t, settings}
}

func (p program) run(args ...string) commandResult {
	p.t.Helper()
	return p.runWith(p.t.Context(), strings.NewReader(""), args...)
}

func (p program) runWith(ctx context.Context, in io.Reader, args ...string) commandResult {
	p.t.Helper()
	var out, errs testkit.Log
	code := run(ctx, args, p.environ, in, &out, &errs)
	return commandResult{code, out.String(), errs.String()}
}

// must runs a command, expects success and returns its output.
func (p program) must(args ...string) string {
	p.t.Helper()
	got := p.run(args...)
	require.Truef(p.t, got.code == 0, "agent %s: exit %d, stderr: %s", strings.Join(args, " "), got.code, got.err)
	return got.out
}

// mustFail runs a command. It must exit with code, and its stderr must contain a text.
func (p program) mustFail(code int, stderr string, args ...string) {
	p.t.Helper()
	if got := p.run(args...); got.code != code || !strings.Contains(got.err, stderr) {
		p.t.Errorf("agent %.200q: exit %d, stderr %q, want %d with %q", args, got.code, got.err, code, stderr)
	}
}

// mustJSON runs a command with --json and decodes its one document.
func (p program) mustJSON(into any, args ...string) {
	p.t.Helper()
	text := p.must(append(args, "--json")...)
	require.NoError(p.t, decodeOne(text, into), "agent", strings.Join(args, " "), "--json", "in", text)
}

// decodeOne decodes a text of exactly one JSON document.
func decodeOne(text string, into any) error {
	d := json.NewDecoder(strings.NewReader(text))
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows the document")
	}
	return nil
}

// started is a command in the background.
type started struct {
	out, err testkit.Log
	stop     context.CancelFunc
	ended    chan int
}

// start runs a command in the background until the test ends.
func (p program) start(args ...string) *started {
	p.t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(p.t.Context())) // it outlives pages that read from it
	s := &started{stop: cancel, ended: make(chan int, 1)}
	var group sync.WaitGroup
	group.Go(func() { s.ended <- run(ctx, args, p.environ, strings.NewReader(""), &s.out, &s.err) })
	p.t.Cleanup(func() {
		cancel()
		group.Wait()
	})
	return s
}

// find waits until stderr matches, and returns the first group.
func (s *started) find(t *testing.T, pattern string) string {
	t.Helper()
	expression := regexp.MustCompile(pattern)
	var found []string
	pgtest.Eventually(t, func() bool {
		found = expression.FindStringSubmatch(s.err.String())
		return found != nil || len(s.ended) > 0
	}, "stderr matches "+pattern)
	if found == nil {
		t.Fatalf("ended with %d before stderr matched %s:\n%s", <-s.ended, pattern, s.err.String())
	}
	return found[len(found)-1]
}

func connect(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, url, postgres.Options{MaxConns: 4, ApplicationName: "test"})
}

func TestVersionFlag(t *testing.T) {
	t.Parallel()
	p := newProgramWithoutDatabase(t)
	if flag, command := p.must("--version"), p.must("version"); flag != command || !strings.HasPrefix(flag, "agent ") {
		t.Errorf("--version says %q, version %q", flag, command)
	}
}

// timeout(1) signals a process and then its group. Neither signal may end the process before it has cancelled.
func TestSignalSentTwiceIsOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		caught, done := make(chan os.Signal), make(chan struct{})
		defer close(done)
		ctx, cancel := context.WithCancel(t.Context())
		exits := make(chan bool, 1)
		go func() { exits <- awaitSecondSignal(caught, done, cancel) }()
		caught <- syscall.SIGTERM
		caught <- syscall.SIGTERM
		synctest.Wait()
		assert.Error(t, ctx.Err())
		assert.Equal(t, 0, len(exits), "the process exits")
		<-time.After(time.Second)
		caught <- syscall.SIGTERM
		assert.True(t, <-exits)
	})
}
