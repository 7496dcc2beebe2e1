package guides_test

import (
	"bufio"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// block is a fenced block of a page.
type block struct {
	line  int // of its first line
	info  []string
	lines []string
}

// hasInfo reports whether the fence has a word.
func (b block) hasInfo(word string) bool { return slices.Contains(b.info, word) }

// file returns the name of the file that the block defines, or "".
func (b block) file() string {
	for _, word := range b.info {
		if name, is := strings.CutPrefix(word, "file="); is {
			return name
		}
	}
	return ""
}

// command is a command of a block, with the output on the page.
type command struct {
	line   int
	text   string
	output []string
}

// shownDatabases matches the databases that pages name.
var shownDatabases = regexp.MustCompile(`postgres://agent:agent@localhost/\w+`)

// page is a guide.
type page struct {
	path      string
	database  bool // DATABASE_URL is set from the start
	model     bool // a scripted model answers
	databases []string
	blocks    []block
}

func readPage(t testing.TB, path string) page {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	p := page{path: path, database: strings.Contains(string(text), "<!-- database -->")}
	p.model = strings.Contains(string(text), "<!-- model -->")
	p.databases = shownDatabases.FindAllString(string(text), -1)
	if p.database {
		p.databases = append(p.databases, shownDatabase)
	}
	slices.Sort(p.databases)
	p.databases = slices.Compact(p.databases)
	var open *block
	for i, line := range strings.Split(string(text), "\n") {
		fence, is := strings.CutPrefix(line, "```")
		switch {
		case is && open == nil:
			open = &block{line: i + 2, info: strings.Fields(fence)}
		case is:
			p.blocks = append(p.blocks, *open)
			open = nil
		case open != nil:
			open.lines = append(open.lines, line)
		}
	}
	require.Truef(t, open == nil, "%s: its last block does not end", path)
	return p
}

// commands returns the commands of a console.
func (b block) commands() (list []command) {
	for i, line := range b.lines {
		switch text, is := strings.CutPrefix(line, "$ "); {
		case is:
			list = append(list, command{line: b.line + i, text: text})
		case len(list) == 0:
		case strings.HasPrefix(line, "> ") && len(list[len(list)-1].output) == 0:
			list[len(list)-1].text += "\n" + line[2:]
		default:
			list[len(list)-1].output = append(list[len(list)-1].output, line)
		}
	}
	return list
}

// difference returns the difference between an output and the page, or "".
func difference(want []string, got string) string {
	for len(want) > 0 && strings.TrimSpace(want[len(want)-1]) == "" {
		want = want[:len(want)-1]
	}
	lines := strings.Split(strings.TrimRight(got, "\n"), "\n")
	if len(want) == 0 || matches(want, lines) {
		return ""
	}
	return fmt.Sprintf("the page shows\n%s\nit says\n%s", strings.Join(want, "\n"), got)
}

// matches reports whether lines are as on the page. A line of … stands for any number of lines.
func matches(want, got []string) bool {
	if len(want) == 0 {
		return len(got) == 0
	}
	if strings.TrimSpace(want[0]) == "…" {
		for i := range len(got) + 1 {
			if matches(want[1:], got[i:]) {
				return true
			}
		}
		return false
	}
	return len(got) > 0 && matchesLine(want[0], got[0]) && matches(want[1:], got[1:])
}

// spaces match the gaps of table columns, whose widths differ from the page.
var spaces = regexp.MustCompile(`  +`)

// matchesLine reports whether a line is as on the page. … stands for any text.
func matchesLine(want, got string) bool {
	squeeze := func(s string) string { return spaces.ReplaceAllString(strings.TrimSpace(s), "  ") }
	var parts []string
	for part := range strings.SplitSeq(squeeze(want), "…") {
		parts = append(parts, regexp.QuoteMeta(part))
	}
	return regexp.MustCompile("^" + strings.Join(parts, ".*") + "$").MatchString(squeeze(got))
}

func TestOutputIsCompared(t *testing.T) {
	for _, c := range []struct {
		want, got string
		same      bool
	}{
		{"a", "a\n", true},
		{"a", "b", false},
		{"a…c", "abc", true},
		{"a…c", "ab", false},
		{"…\nb", "a\na\nb", true},
		{"…\nb", "a\na", false},
		{"a\n…", "a", true},
		{"a\n…\nd", "a\nb\nc\nd", true},
		{"a", "a\nb", false},
		{"A  B", "A      B", true},
		{"a (b)", "a (b)", true},
		{"", "anything", true},
	} {
		got := difference(strings.Split(c.want, "\n"), c.got) == ""
		assert.Truef(t, got == c.same, "%q and %q are the same: %t", c.want, c.got, got)
	}
}

const (
	// waitTimeout bounds the time of a command.
	waitTimeout = 2 * time.Minute
	// shownAddress is the address in the pages.
	shownAddress = "127.0.0.1:8080"
	// shownDatabase is the database of pages with a database from the start.
	shownDatabase = "postgres://agent:agent@localhost/agent"
)

// shell runs the commands of a page, one after the other.
type shell struct {
	t          testing.TB
	page       page
	dir        string
	address    string
	urls       map[string]string // URLs of databases, by those on the page
	model      string            // the URL of a scripted model; "" for the offline one
	in         io.Writer
	out        *bufio.Reader
	background []*exec.Cmd
}

// newShell starts bash in its own folder.
func newShell(t testing.TB, p page) *shell {
	t.Helper()
	s := &shell{t: t, dir: t.TempDir(), address: testkit.FreeAddress(t), page: p, urls: map[string]string{}}
	for _, shown := range p.databases {
		s.urls[shown] = pgtest.EmptyURL(t)
	}
	if p.model {
		s.model = scriptedModel(t).URL()
	}
	cmd := s.command("bash", "--noprofile", "--norc")
	reader, writer, err := os.Pipe()
	require.NoError(t, err)
	cmd.Stdout, cmd.Stderr = writer, writer
	s.in, err = cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_ = writer.Close()
	s.out = bufio.NewReader(reader)
	t.Cleanup(func() {
		for _, c := range append(s.background, cmd) {
			_ = syscall.Kill(-c.Process.Pid, syscall.SIGTERM)
			done := make(chan struct{})
			go func() { _ = c.Wait(); close(done) }()
			select {
			case <-done:
			case <-time.After(30 * time.Second):
				_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
				<-done
			}
		}
		_ = reader.Close()
	})
	return s
}

// command returns a program in the page's folder and environment, in its own process group.
func (s *shell) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = s.dir
	cmd.Env = []string{
		"PATH=" + filepath.Dir(program) + ":" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "USER=" + os.Getenv("USER"),
		"LANG=C.UTF-8",
		"AGENT_LISTEN=" + s.address, "AGENT_HEARTBEAT_CRON=0 0 1 1 *", "PSQLRC=/dev/null", "PAGER=cat",
	}
	if s.page.database {
		cmd.Env = append(cmd.Env, "DATABASE_URL="+s.urls[shownDatabase])
	}
	if s.model != "" {
		cmd.Env = append(cmd.Env, "OPENAI_BASE_URL="+s.model, "OPENAI_API_KEY=k", "AGENT_MODEL=gpt-4o-mini")
	}
	cmd.SysProcAttr = proctest.DieWithUs()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	return cmd
}

// toLocal replaces the addresses of the pages by those of this run; there does the opposite.
func (s *shell) toLocal(text string) string {
	text = strings.ReplaceAll(text, shownAddress, s.address)
	for shown, url := range s.urls {
		text = strings.ReplaceAll(text, shown, url)
	}
	return text
}

func (s *shell) toShown(text string) string {
	text = strings.ReplaceAll(text, s.address, shownAddress)
	for shown, url := range s.urls {
		text = strings.ReplaceAll(text, url, shown)
	}
	return text
}

// run runs a command and returns its output and its exit code.
func (s *shell) run(text string) (output string, code int) {
	s.t.Helper()
	mark := "end-" + rand.Text()
	late := time.AfterFunc(waitTimeout, func() {
		s.t.Errorf("after %s the command still runs: %s", waitTimeout, text)
	})
	defer late.Stop()
	// The command reads no input. Variables that it sets stay.
	_, err := fmt.Fprintf(s.in, "{ %s\n} </dev/null\nprintf '\\n%s %%d\\n' $?\n", s.toLocal(text), mark)
	require.NoError(s.t, err)
	var printed strings.Builder
	for {
		line, err := s.out.ReadString('\n')
		require.Truef(s.t, err == nil, "the shell ended at %q: %v\n%s", text, err, printed.String())
		if rest, is := strings.CutPrefix(line, mark+" "); is {
			_, err := fmt.Sscan(rest, &code)
			require.NoError(s.t, err)
			return s.toShown(strings.TrimSuffix(printed.String(), "\n")), code
		}
		printed.WriteString(line)
	}
}

// sendCommands puts a wrapper named agent into the PATH. It runs commands on the page's server, from a folder without
// the server's data and settings. Commands without a server, and local ones, run as they are. It returns the file that
// lists the sent commands.
func (s *shell) sendCommands() (list string) {
	s.t.Helper()
	dir := s.t.TempDir()
	list = filepath.Join(dir, "sent")
	script := fmt.Sprintf(`#!/bin/sh
case "$1 $2" in
"dev "*|"serve "*|"init "*|"migrate "*|"lanes run") exec %[1]s "$@";;
esac
case $AGENT_LISTEN in *:0) exec %[1]s "$@";; esac
curl -sf --retry 9 --retry-delay 1 http://%[2]s/readyz > %[3]s/ready || exec %[1]s "$@"
mkdir -p %[3]s/elsewhere && ln -sfn "$PWD"/* %[3]s/elsewhere/ && cd %[3]s/elsewhere || exit 99
echo "$@" >> %[4]s
exec env -i PATH="$PATH" AGENT_SERVER=http://%[2]s AGENT_TOKEN="$AGENT_ADMIN_TOKEN" AGENT_LOG_LEVEL=warn %[1]s "$@"
`, program, s.address, dir, list)
	require.NoError(s.t, os.WriteFile(filepath.Join(dir, "agent"), []byte(script), 0o700))
	_, code := s.run(fmt.Sprintf("export PATH=%s:$PATH AGENT_ADMIN_TOKEN=%s", dir, rand.Text()))
	require.Equal(s.t, 0, code, "set the path: exit code")
	return list
}

// cutLastLine returns text without its last line, and the last line.
func cutLastLine(text string) (before, last string) {
	text = strings.TrimRight(text, "\n")
	i := strings.LastIndexByte(text, '\n')
	return text[:i+1], text[i+1:]
}

// start runs a command until the page's end, and waits until it has printed the output on the page.
func (s *shell) start(c command) {
	s.t.Helper()
	env, _ := s.run("export -p; pwd")
	env, dir := cutLastLine(env)
	cmd := s.command("bash", "--noprofile", "--norc", "-c", s.toLocal(env+"\n"+c.text))
	cmd.Dir = dir
	var printed testkit.Log
	cmd.Stdout, cmd.Stderr = &printed, &printed
	require.NoError(s.t, cmd.Start())
	s.background = append(s.background, cmd)
	want := append(append([]string{"…"}, c.output...), "…")
	pgtest.EventuallyWithin(s.t, waitTimeout, func() bool {
		return difference(want, s.toShown(printed.String())) == "" || strings.HasPrefix(printed.String(), "agent: ")
	}, c.text)
	require.Equal(s.t, "", difference(want, s.toShown(printed.String())), c.text)
}
