//go:build linux

package checks_test

import (
	"archive/tar"
	"debug/elf"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// stages reads the Dockerfile.
func stages(t *testing.T) []instructions.Stage {
	t.Helper()
	file, err := os.Open("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	tree, err := parser.Parse(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range tree.Warnings {
		t.Errorf("the Dockerfile: %s", w.Short)
	}
	list, _, err := instructions.Parse(tree.AST, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 2 {
		t.Fatalf("%d stages, want a build stage and a run stage", len(list))
	}
	return list
}

// last returns the last command of a kind in a stage.
func last[T instructions.Command](t *testing.T, s instructions.Stage) (found T) {
	t.Helper()
	has := false
	for _, c := range s.Commands {
		if one, is := c.(T); is {
			found, has = one, true
		}
	}
	if !has {
		t.Fatalf("the stage has no %T", found)
	}
	return found
}

func TestTheImageRunsTheAgentAndNothingElse(t *testing.T) {
	s := stages(t)[1]
	if s.BaseName != "gcr.io/distroless/static-debian12:nonroot" {
		t.Errorf("the image is made on %s", s.BaseName)
	}
	if got := last[*instructions.UserCommand](t, s).User; got != "65532:65532" {
		t.Errorf("it runs as %s", got)
	}
	check := last[*instructions.HealthCheckCommand](t, s).Health
	if want := []string{"CMD", "/usr/bin/agent", "healthcheck"}; !slices.Equal(check.Test, want) {
		t.Errorf("its health is asked by %q", check.Test)
	}
	entry := last[*instructions.EntrypointCommand](t, s)
	if want := []string{"/usr/bin/agent"}; !slices.Equal(entry.CmdLine, want) || entry.PrependShell {
		t.Errorf("its entry point is %q, through a shell %t", entry.CmdLine, entry.PrependShell)
	}
	if cmd := last[*instructions.CmdCommand](t, s); !slices.Equal(cmd.CmdLine, []string{"serve"}) || cmd.PrependShell {
		t.Errorf("its command is %q, through a shell %t", cmd.CmdLine, cmd.PrependShell)
	}
	if from := last[*instructions.CopyCommand](t, s); from.From != stages(t)[0].Name || from.DestPath != "/usr/bin/agent" {
		t.Errorf("it copies from %q to %q", from.From, from.DestPath)
	}
	for _, c := range s.Commands {
		if _, is := c.(*instructions.RunCommand); is {
			t.Error("it runs a command in an image that has no shell")
		}
	}
}

// build runs the Dockerfile's build command for the agent.
func build(t *testing.T) string {
	t.Helper()
	run := strings.Join(last[*instructions.RunCommand](t, stages(t)[0]).CmdLine, " ")
	if !strings.Contains(run, "go build") || !strings.Contains(run, " /out/agent ") {
		t.Fatalf("the last command of the building stage is %q", run)
	}
	path := filepath.Join(t.TempDir(), "agent")
	cmd := exec.Command("sh", "-c", strings.Replace(run, "/out/agent", path, 1))
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "TARGETOS=linux", "TARGETARCH="+runtime.GOARCH, "VERSION=v9.8.7")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", run, err, out)
	}
	return path
}

func TestTheBinaryNeedsNothing(t *testing.T) {
	path := build(t)
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("the program is linked dynamically: %v", p.Type)
		}
	}
	root := unpacked(t, path)
	for dir := root; dir != filepath.Dir(dir); dir = filepath.Dir(dir) { // other users cannot enter a test's folders
		if strings.HasPrefix(dir, os.TempDir()) && dir != os.TempDir() {
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	well := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/healthz" {
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	_, port, err := net.SplitHostPort(well.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if code, said := alone(t, root, nil, "version"); code != 0 || !strings.HasPrefix(said, "agent v9.8.7, ") {
		t.Errorf("agent version: exit %d, %s", code, said)
	}
	listen := []string{"AGENT_LISTEN=0.0.0.0:" + port}
	if code, said := alone(t, root, listen, "healthcheck"); code != 0 {
		t.Errorf("agent healthcheck beside a well process: exit %d, %s", code, said)
	}
	well.Close()
	if code, said := alone(t, root, listen, "healthcheck"); code != 1 {
		t.Errorf("agent healthcheck without a server: exit %d, %s", code, said)
	}
	zone := []string{"DATABASE_URL=postgres://127.0.0.1:1/none?connect_timeout=1", "AGENT_ADMIN_TOKEN=0123456789abcdef",
		"AGENT_TIMEZONE=Europe/Madrid", "AGENT_LISTEN=127.0.0.1:0"}
	if code, said := alone(t, root, zone, "migrate"); code != 1 || strings.Contains(said, "AGENT_TIMEZONE") {
		t.Errorf("without files of time zones: exit %d, %s", code, said)
	}
}

// unpacked builds the image of the real program without a daemon, and returns a folder with its files.
func unpacked(t *testing.T, program string) (root string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "image.tar")
	id := command(t, ".", nil, "go", "run", "./image", "-binary", program, "-dockerfile", "../Dockerfile", "-o", out)
	image, err := tarball.ImageFromPath(out, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := image.ConfigName(); err != nil || got.String() != id {
		t.Errorf("the image has the id %s, and %s was said: %v", got, id, err)
	}
	config, err := image.ConfigFile()
	if err != nil || config.Config.User != "65532:65532" ||
		!slices.Equal(config.Config.Entrypoint, []string{"/usr/bin/agent"}) {
		t.Errorf("the image runs %q as %q: %v", config.Config.Entrypoint, config.Config.User, err)
	}
	content := mutate.Extract(image)
	defer content.Close()
	root = t.TempDir()
	for files := tar.NewReader(content); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return root
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(root, filepath.FromSlash(h.Name))
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(to, 0o755)
		} else {
			var file *os.File
			if file, err = os.OpenFile(to, os.O_CREATE|os.O_WRONLY, os.FileMode(h.Mode)&0o777); err == nil {
				_, err = io.Copy(file, files)
				err = errors.Join(err, file.Close())
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// alone runs the agent in an otherwise empty root, as the image's user. Without root rights, it runs the agent
// directly.
func alone(t *testing.T, root string, environ []string, args ...string) (code int, said string) {
	t.Helper()
	cmd := exec.Command("/usr/bin/agent", args...)
	cmd.Env = append([]string{}, environ...)
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65532, Gid: 65532}}
		cmd.Path, cmd.Err, cmd.Dir = "/usr/bin/agent", nil, "/"
	} else {
		cmd.Path, cmd.Err, cmd.Dir = filepath.Join(root, "usr/bin/agent"), nil, root
	}
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}
