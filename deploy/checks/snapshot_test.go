//go:build linux

package checks_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// command runs a command and returns its output.
func command(t *testing.T, dir string, environ []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), environ...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, said.String())
	}
	return strings.TrimSpace(string(out))
}

// goreleaser builds a snapshot of the commit, and syft lists its contents. The test opens each archive, package, list
// and checksum, and runs the program of this machine.
func TestASnapshotIsReleased(t *testing.T) {
	goreleaser := command(t, "../..", nil, "scripts/tool", "github.com/goreleaser/goreleaser/v2", "v2.13.3")
	syft := command(t, "../..", nil, "scripts/tool", "github.com/anchore/syft/cmd/syft", "v1.38.2")
	bin, tree := t.TempDir(), filepath.Join(t.TempDir(), "lanekeeper")
	if err := os.Symlink(syft, filepath.Join(bin, "syft")); err != nil {
		t.Fatal(err)
	}
	command(t, "../..", nil, "git", "clone", "--quiet", "--no-hardlinks", ".", tree)
	path := "PATH=" + bin + ":" + os.Getenv("PATH")
	command(t, tree, nil, "git", "tag", "--force", "v0.9.0")
	command(t, tree, []string{path}, goreleaser, "release", "--snapshot", "--clean", "--parallelism", "2")
	dist := filepath.Join(tree, "dist")

	sums, err := os.ReadFile(filepath.Join(dist, "checksums.txt"))
	if err != nil {
		t.Fatal(err)
	}
	var archives, packages, lists int
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		content, err := os.ReadFile(filepath.Join(dist, name))
		if err != nil {
			t.Fatal(err)
		}
		if got := sha256.Sum256(content); hex.EncodeToString(got[:]) != sum {
			t.Errorf("the checksum of %s is wrong", name)
		}
		switch {
		case strings.HasSuffix(name, ".tar.gz"):
			archives++
			archive(t, name, content)
		case strings.HasSuffix(name, ".deb"):
			packages++
			debian(t, filepath.Join(dist, name))
		case strings.HasSuffix(name, ".rpm"):
			packages++
			if !bytes.HasPrefix(content, []byte{0xed, 0xab, 0xee, 0xdb}) || !bytes.Contains(content, []byte("lanekeeper")) {
				t.Errorf("%s is no RPM of lanekeeper", name)
			}
		case strings.HasSuffix(name, ".sbom.json"):
			lists++
			contents(t, name, content)
		default:
			t.Errorf("unexpected file %s", name)
		}
	}
	if archives != 4 || packages != 4 || lists != 8 {
		t.Errorf("%d archives, %d packages and %d lists of contents", archives, packages, lists)
	}
}

// archive checks a tarball, and runs the program of this machine.
func archive(t *testing.T, name string, content []byte) {
	t.Helper()
	zipped, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for files := tar.NewReader(zipped); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, h.Name)
		if h.Name != "agent" || !strings.Contains(name, "linux_"+runtime.GOARCH) {
			continue
		}
		program := filepath.Join(t.TempDir(), "agent")
		binary, err := io.ReadAll(files)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(program, binary, 0o700); err != nil { // #nosec G306
			t.Fatal(err)
		}
		if said := command(t, ".", nil, program, "version"); !strings.HasPrefix(said, "agent v0.9.1-next") {
			t.Errorf("the program is %s", said)
		}
	}
	for _, want := range []string{
		"agent", "LICENSE", "README.md", "docs/settings.md", "deploy/helm/lanekeeper/Chart.yaml",
		"deploy/monitoring/alerts.yaml", "deploy/systemd/lanekeeper.service",
	} {
		if !slices.Contains(found, want) {
			t.Errorf("%s has no %s; it has %q", name, want, found)
		}
	}
}

// debian checks a package with dpkg-deb.
func debian(t *testing.T, path string) {
	t.Helper()
	listed := command(t, ".", nil, "dpkg-deb", "--contents", path)
	for _, want := range []string{
		"./usr/bin/agent", "./usr/lib/systemd/system/lanekeeper.service", "drwx------", "./usr/share/doc/lanekeeper/LICENSE",
	} {
		if !strings.Contains(listed, want) {
			t.Errorf("%s has no %s:\n%s", path, want, listed)
		}
	}
	if about := command(t, ".", nil, "dpkg-deb", "--field", path); !strings.Contains(about, "Package: lanekeeper") ||
		!strings.Contains(about, "Version: 0.9.1~next") {
		t.Errorf("%s is %s", path, about)
	}
}

// contents checks a list of contents: SPDX with the modules of the program.
func contents(t *testing.T, name string, content []byte) {
	t.Helper()
	var list struct {
		SpdxVersion string
		Packages    []struct{ Name, VersionInfo string }
	}
	if err := json.Unmarshal(content, &list); err != nil {
		t.Fatal(err)
	}
	modules := map[string]bool{}
	for _, p := range list.Packages {
		modules[p.Name] = true
	}
	if list.SpdxVersion == "" || !modules["github.com/jackc/pgx/v5"] || !modules["github.com/riverqueue/river"] {
		t.Errorf("%s: SPDX %q with %d packages, without those of the program", name, list.SpdxVersion, len(list.Packages))
	}
}
