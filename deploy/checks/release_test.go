package checks_test

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/goreleaser/goreleaser/v2/pkg/config"
)

func newBuffered(text string) *bufio.Reader { return bufio.NewReader(strings.NewReader(text)) }

// goreleaser makes a release from its configuration, which it reads strictly.
func TestTheRelease(t *testing.T) {
	p, err := config.Load("../../.goreleaser.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if p.Version != 2 || len(p.Builds) != 1 {
		t.Fatalf("version %d, %d builds", p.Version, len(p.Builds))
	}
	b := p.Builds[0]
	if !slices.Equal(b.Goos, []string{"linux", "darwin"}) || !slices.Equal(b.Goarch, []string{"amd64", "arm64"}) ||
		!slices.Contains(b.Env, "CGO_ENABLED=0") ||
		!slices.Contains([]string(b.Flags), "-trimpath") {
		t.Errorf("the build is %+v", b)
	}
	source, err := os.ReadFile("../../cmd/agent/version.go")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.Join(b.Ldflags, " "), "-X main.version=") ||
		!strings.Contains(string(source), "\nvar version string\n") {
		t.Error("the release does not say its version")
	}
	if len(p.SBOMs) == 0 || p.Checksum.NameTemplate == "" || len(p.Archives) != 1 || len(p.NFPMs) != 1 {
		t.Errorf("%d SBOMs, checksums %q, %d archives, %d packages", len(p.SBOMs), p.Checksum.NameTemplate, len(p.Archives),
			len(p.NFPMs))
	}
	var unit bool
	for _, c := range p.NFPMs[0].Contents {
		unit = unit || c.Destination == "/usr/lib/systemd/system/lanekeeper.service"
		exists(t, c.Source)
	}
	if !unit || p.NFPMs[0].Bindir != "/usr/bin" || !slices.Equal(p.NFPMs[0].Formats, []string{"deb", "rpm"}) {
		t.Errorf("the packages are %+v", p.NFPMs[0])
	}
	for _, f := range p.Archives[0].Files {
		exists(t, f.Source)
	}
}

// exists checks that a pattern finds a file. An entry without a source is a folder to create.
func exists(t *testing.T, pattern string) {
	t.Helper()
	if pattern == "" {
		return
	}
	found, err := filepath.Glob(filepath.Join("../..", strings.ReplaceAll(pattern, "**/", "")))
	if err != nil || len(found) == 0 {
		t.Errorf("%s: there is no such file (%v)", pattern, err)
	}
}
