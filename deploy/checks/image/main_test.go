package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func TestTheImageHasTheAgentAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"agent": "\x7fELF of the agent", "certs": "authorities"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	make := func(out string) (id string) {
		id, err := write(filepath.Join(dir, "agent"), filepath.Join(dir, "certs"), "../../Dockerfile", "arm64",
			"lanekeeper:v1.2.3", filepath.Join(dir, out))
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	if one, two := make("image.tar"), make("again.tar"); one != two {
		t.Errorf("the same input makes %s and %s", one, two)
	}
	image, err := tarball.ImageFromPath(filepath.Join(dir, "image.tar"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, f := range files(t, image) {
		found = append(found, f.name)
		switch {
		case f.name == "usr/bin/agent" && (f.mode != 0o755 || string(f.content) != "\x7fELF of the agent"),
			f.name == "etc/ssl/certs/ca-certificates.crt" && string(f.content) != "authorities":
			t.Errorf("%s has the mode %o and %q", f.name, f.mode, f.content)
		case f.mode&0o022 != 0 && f.name != "tmp/", f.mode&0o6000 != 0:
			t.Errorf("%s has the mode %o", f.name, f.mode)
		}
	}
	if want := []string{
		"etc/", "etc/group", "etc/passwd", "etc/ssl/", "etc/ssl/certs/", "etc/ssl/certs/ca-certificates.crt", "tmp/",
		"usr/", "usr/bin/", "usr/bin/agent",
	}; !slices.Equal(found, want) {
		t.Errorf("the image has %q", found)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c := config.Config
	if config.OS != "linux" || config.Architecture != "arm64" || c.User != "65532:65532" ||
		!slices.Equal(c.Entrypoint, []string{"/usr/bin/agent"}) || !slices.Equal(c.Cmd, []string{"serve"}) ||
		!slices.Contains(c.Env, "AGENT_LISTEN=0.0.0.0:8080") || c.Labels["org.opencontainers.image.title"] != "Lanekeeper" ||
		c.Healthcheck == nil || !slices.Equal(c.Healthcheck.Test, []string{"CMD", "/usr/bin/agent", "healthcheck"}) {
		t.Errorf("the configuration is %+v", config)
	}
	if _, exposed := c.ExposedPorts["8080/tcp"]; !exposed || strings.Contains(strings.Join(c.Env, " "), "TOKEN") {
		t.Errorf("ports %v, environment %q", c.ExposedPorts, c.Env)
	}
}

// files returns the files of all layers.
func files(t *testing.T, image v1.Image) (list []file) {
	t.Helper()
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	for _, layer := range layers {
		content, err := layer.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(content); ; {
			header, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if header.Uid != 0 || header.Gid != 0 {
				t.Errorf("%s is of user %d", header.Name, header.Uid)
			}
			text, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, file{header.Name, header.Mode, text})
		}
		if err := content.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return list
}
