// Command image builds the image of deploy/Dockerfile without a daemon, from a binary that is already built:
//
//	CGO_ENABLED=0 GOOS=linux go build -trimpath -o agent ./cmd/agent
//	go run -C deploy/checks ./image -binary ../../agent -o ../../image.tar && docker load -i image.tar
//
// The image has the binary, the authorities of this machine and the user 65532, and nothing else. Its configuration is
// that of the last stage of the Dockerfile. The same input makes the same digest.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

func main() {
	binary := flag.String("binary", "agent", "the agent, built for linux without cgo")
	certs := flag.String("certs", "/etc/ssl/certs/ca-certificates.crt", "the authorities that the agent trusts")
	dockerfile := flag.String("dockerfile", "../Dockerfile", "has the configuration of the image")
	arch := flag.String("arch", runtime.GOARCH, "the architecture of the binary")
	tag := flag.String("tag", "lanekeeper:latest", "the name of the image")
	out := flag.String("o", "image.tar", "the tarball to write, for docker load, podman load or crane push")
	flag.Parse()
	id, err := write(*binary, *certs, *dockerfile, *arch, *tag, *out)
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
	fmt.Println(id)
}

// write returns the image's id, as docker load prints it. The digest of its manifest depends on who loads it.
func write(binary, certs, dockerfile, arch, tag, out string) (string, error) {
	image, err := build(binary, certs, dockerfile, arch)
	if err != nil {
		return "", err
	}
	ref, err := name.NewTag(tag)
	if err != nil {
		return "", err
	}
	id, err := image.ConfigName()
	if err != nil {
		return "", err
	}
	return id.String(), tarball.WriteToFile(out, ref, image)
}

// file is a file of the image; one that ends with a slash is a folder.
type file struct {
	name    string
	mode    int64
	content []byte
}

// build makes the image: a layer of the system's files, and one of the binary.
func build(binary, certs, dockerfile, arch string) (v1.Image, error) {
	program, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	authorities, err := os.ReadFile(certs)
	if err != nil {
		return nil, err
	}
	image := empty.Image
	for _, files := range [][]file{
		{
			{"etc/", 0o755, nil},
			{"etc/group", 0o644, []byte("nonroot:x:65532:\n")},
			{"etc/passwd", 0o644, []byte("nonroot:x:65532:65532:nonroot:/nonexistent:/sbin/nologin\n")},
			{"etc/ssl/", 0o755, nil},
			{"etc/ssl/certs/", 0o755, nil},
			{"etc/ssl/certs/ca-certificates.crt", 0o644, authorities},
			{"tmp/", 0o1777, nil},
		},
		{{"usr/", 0o755, nil}, {"usr/bin/", 0o755, nil}, {"usr/bin/agent", 0o755, program}},
	} {
		packed, err := pack(files)
		if err != nil {
			return nil, err
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(packed)), nil
		})
		if err != nil {
			return nil, err
		}
		if image, err = mutate.AppendLayers(image, layer); err != nil {
			return nil, err
		}
	}
	return configure(image, dockerfile, arch)
}

// pack makes a tar without times and owners.
func pack(files []file) ([]byte, error) {
	var packed bytes.Buffer
	w := tar.NewWriter(&packed)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.content)), ModTime: time.Unix(0, 0)}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	return packed.Bytes(), w.Close()
}

// configure sets what the last stage of the Dockerfile says.
func configure(image v1.Image, dockerfile, arch string) (v1.Image, error) {
	source, err := os.Open(dockerfile)
	if err != nil {
		return nil, err
	}
	defer source.Close()
	tree, err := parser.Parse(source)
	if err != nil {
		return nil, err
	}
	stages, _, err := instructions.Parse(tree.AST, nil)
	if err != nil {
		return nil, err
	}
	if len(stages) == 0 {
		return nil, errors.New(dockerfile + " has no stage")
	}
	c := v1.Config{Labels: map[string]string{}, ExposedPorts: map[string]struct{}{}}
	for _, command := range stages[len(stages)-1].Commands {
		switch one := command.(type) {
		case *instructions.LabelCommand:
			for _, l := range one.Labels {
				c.Labels[l.Key] = unquote(l.Value)
			}
		case *instructions.EnvCommand:
			for _, e := range one.Env {
				c.Env = append(c.Env, e.Key+"="+unquote(e.Value))
			}
		case *instructions.ExposeCommand:
			for _, port := range one.Ports {
				c.ExposedPorts[port+"/tcp"] = struct{}{}
			}
		case *instructions.UserCommand:
			c.User = one.User
		case *instructions.StopSignalCommand:
			c.StopSignal = one.Signal
		case *instructions.HealthCheckCommand:
			c.Healthcheck = &v1.HealthConfig{
				Test: one.Health.Test, Interval: one.Health.Interval, Timeout: one.Health.Timeout,
				StartPeriod: one.Health.StartPeriod, Retries: one.Health.Retries,
			}
		case *instructions.EntrypointCommand:
			c.Entrypoint = one.CmdLine
		case *instructions.CmdCommand:
			c.Cmd = one.CmdLine
		}
	}
	image = mutate.MediaType(image, "application/vnd.oci.image.manifest.v1+json")
	return mutate.ConfigFile(image, withConfig(image, c, arch))
}

// withConfig returns the configuration file of an image.
func withConfig(image v1.Image, c v1.Config, arch string) *v1.ConfigFile {
	known, err := image.ConfigFile()
	if err != nil {
		known = &v1.ConfigFile{}
	}
	file := known.DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", arch, c
	file.Created = v1.Time{Time: time.Unix(0, 0).UTC()}
	return file
}

// unquote removes the quotes of a Dockerfile's word.
func unquote(text string) string {
	if n := len(text); n > 1 && text[0] == '"' && text[n-1] == '"' {
		return text[1 : n-1]
	}
	return text
}
