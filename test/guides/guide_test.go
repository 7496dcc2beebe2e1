package guides_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// program is the agent, built once.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "guides", &program) }

// pages returns the guides, the README, and each page of docs with a console.
func pages(t *testing.T) []page {
	t.Helper()
	paths, err := filepath.Glob("../../docs/guide/*.md")
	require.Truef(t, err == nil && len(paths) >= 8, "%d guides: %v", len(paths), err)
	docs, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	var list []page
	for _, path := range slices.Concat(paths, []string{"../../README.md"}, docs) {
		p := readPage(t, path)
		console := slices.ContainsFunc(p.blocks, func(b block) bool { return b.hasInfo("console") })
		if console || !slices.Contains(docs, path) {
			list = append(list, p)
		}
	}
	return list
}

// skippedCommands lists the commands that need a missing environment. deploy and deploy/checks read the files of those
// commands.
var skippedCommands = []string{
	"OPENAI_API_KEY=… AGENT_MODEL=gpt-4o-mini agent dev      # or OPENAI_BASE_URL=… for any compatible server",
	"agent apply ./workspace          # skills, automations, objectives, webhooks as YAML; shows a diff, applies it in one transaction",
	"agent migrate",
	"agent serve                      # as many as wanted on one database",
	"docker build -f deploy/Dockerfile --build-arg VERSION=v1.2.3 -t lanekeeper .",
	"docker compose -f deploy/compose.yaml up --build --wait",
	"export DATABASE_URL=postgres://… AGENT_ADMIN_TOKEN=$(openssl rand -hex 32)",
	"helm upgrade --install agent deploy/helm/lanekeeper --set existingSecret=lanekeeper",
	"kubectl apply -f deploy/k8s/lanekeeper.yaml",
	"kubectl rollout restart deployment/lanekeeper",
	"sudo -u postgres createdb -O agent shop && sudo -u postgres createdb -O agent agent",
	`sudo -u postgres psql -c "create role agent login superuser password 'agent'"`,
	"sudo apt install ./lanekeeper_1.2.3_linux_amd64.deb",
	"sudo apt-get install -y postgresql",
	"sudo systemctl enable --now lanekeeper",
	"sudo systemctl restart lanekeeper",
}

func TestSkippedCommandsAreListed(t *testing.T) {
	var found []string
	for _, p := range pages(t) {
		for _, b := range p.blocks {
			assert.Truef(t, !b.hasInfo("sh") && !b.hasInfo("bash") && !b.hasInfo("shell") || b.isQuickStart(p),
				"%s:%d: make it a console: what it shows is run then", p.path, b.line)
			if !b.hasInfo("console") && slices.ContainsFunc(b.lines, func(l string) bool { return strings.HasPrefix(l, "$ ") }) {
				t.Errorf("%s:%d: it has commands and is no console", p.path, b.line)
			}
			if b.hasInfo("elsewhere") {
				for _, c := range b.commands() {
					found = append(found, c.text)
				}
			}
		}
	}
	slices.Sort(found)
	assert.NoDiff(t, skippedCommands, slices.Compact(found))
}

func TestCommandsOfPages(t *testing.T) {
	var commands atomic.Int64
	t.Cleanup(func() {
		assert.Truef(t, t.Failed() || commands.Load() >= 40,
			"%d commands in all pages: the test does not see them", commands.Load())
	})
	for _, p := range pages(t) {
		t.Run(strings.TrimPrefix(p.path, "../../"), func(t *testing.T) {
			t.Parallel()
			var s *shell
			for _, b := range p.blocks {
				if (b.hasInfo("console") && !b.hasInfo("elsewhere") || b.file() != "" || b.isQuickStart(p)) && s == nil {
					s = newShell(t, p)
				}
				commands.Add(s.runBlock(t, p, b))
			}
		})
	}
}

// The commands also work as in the pages from another folder, with only a token.
func TestCommandsOfPagesOnServer(t *testing.T) {
	for name, least := range map[string]int{"getting-started": 9, "your-first-agent": 14, "skills-and-flows": 4} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := readPage(t, "../../docs/guide/"+name+".md")
			s := newShell(t, p)
			sent := s.sendCommands()
			for _, b := range p.blocks {
				s.runBlock(t, p, b)
			}
			text, err := os.ReadFile(sent)
			require.NoError(t, err)
			n := strings.Count(string(text), "\n")
			assert.Truef(t, n >= least, "%d commands ran on the server, want %d:\n%s", n, least, text)
		})
	}
}

// isQuickStart reports whether the block has the two commands at the top of README.md.
func (b block) isQuickStart(p page) bool {
	return b.hasInfo("sh") && strings.HasSuffix(p.path, "README.md") && len(b.lines) == 2 &&
		strings.HasPrefix(b.lines[0], "go run ./cmd/agent dev ") && strings.HasPrefix(b.lines[1], "./scripts/test ")
}

// runBlock runs a block, and returns the number of its commands.
func (s *shell) runBlock(t *testing.T, p page, b block) (ran int64) {
	t.Helper()
	if name := b.file(); name != "" {
		path := filepath.Join(s.dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(s.toLocal(strings.Join(b.lines, "\n"))+"\n"), 0o600))
	}
	if b.isQuickStart(p) {
		s.start(command{b.line, "agent dev", []string{"  ^C stops"}})
		return 1
	}
	if !b.hasInfo("console") || b.hasInfo("elsewhere") {
		return 0
	}
	for _, c := range b.commands() {
		ran++
		if b.hasInfo("background") {
			s.start(c)
			continue
		}
		got, code := s.run(c.text)
		if diff := difference(c.output, got); diff != "" || code != 0 {
			t.Fatalf("%s:%d: $ %s: exit code %d; %s\n%s", p.path, c.line, c.text, code, diff, got)
		}
	}
	return ran
}

var link = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)

// The targets of the pages' links exist.
func TestLinkTargetsExist(t *testing.T) {
	for _, p := range pages(t) {
		text, err := os.ReadFile(p.path)
		require.NoError(t, err)
		for _, found := range link.FindAllStringSubmatch(string(text), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(p.path), found[1]))
			assert.NoError(t, err, p.path, found[1])
		}
	}
}

// The Go code of the pages is, line by line, in a test or an example of the repository, so it compiles.
func TestGoCodeOfPagesIsTested(t *testing.T) {
	var paths, sources []string
	err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case strings.HasSuffix(path, ".md"):
			paths = append(paths, path)
		case strings.HasSuffix(path, "_test.go"), strings.Contains(path, "/examples/") && strings.HasSuffix(path, ".go"):
			text, err := os.ReadFile(path)
			sources = append(sources, trimmedLines(strings.Split(string(text), "\n")))
			return err
		}
		return nil
	})
	require.NoError(t, err)
	shown := 0
	for _, path := range paths {
		for _, b := range readPage(t, path).blocks {
			if !b.hasInfo("go") {
				continue
			}
			shown++
			code := trimmedLines(b.lines)
			assert.Truef(t, slices.ContainsFunc(sources, func(s string) bool { return strings.Contains(s, code) }),
				"%s:%d: no test has this code: make it that of an example", path, b.line)
		}
	}
	assert.Truef(t, shown >= 3, "%d blocks of Go in all pages: the test does not see them", shown)
}

// trimmedLines returns text without its indentation, with each line between two newlines.
func trimmedLines(lines []string) string {
	trimmed := make([]string, len(lines))
	for i, line := range lines {
		trimmed[i] = strings.TrimSpace(line)
	}
	return "\n" + strings.Join(trimmed, "\n") + "\n"
}

var asksForOrder = regexp.MustCompile(`order (\d+)\?`)

// scriptedModel looks up orders, and promises refunds until the instructions forbid it.
func scriptedModel(t testing.TB) *modeltest.Server {
	server := modeltest.New(t)
	server.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		order := asksForOrder.FindStringSubmatch(last.Content)
		switch {
		case last.Role == openai.ChatMessageRoleTool:
			return modeltest.Text("It was found.")
		case order != nil:
			return modeltest.ToolCall("check_order", `{"order":`+order[1]+`}`)
		case strings.Contains(req.Messages[0].Content, "Promise no refund."):
			return modeltest.Text("I cannot promise that.")
		}
		return modeltest.Text("You get your money back.")
	})
	return server
}
