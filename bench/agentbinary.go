package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// agentBinary is the agent's program in a temporary folder.
type agentBinary struct{ path, dir string }

// buildAgent builds the agent from the current folder, unless path names a binary.
func buildAgent(ctx context.Context, path string, stderr io.Writer) (*agentBinary, error) {
	dir, err := os.MkdirTemp("", "agent-bench-")
	if err != nil {
		return nil, err
	}
	if path == "" {
		path = filepath.Join(dir, "agent")
		build := exec.CommandContext(ctx, "go", "build", "-o", path, "./cmd/agent")
		build.Stderr = stderr
		if err := build.Run(); err != nil {
			return nil, errors.Join(fmt.Errorf("build the agent: %w", err), os.RemoveAll(dir))
		}
	}
	return &agentBinary{path, dir}, nil
}

func (b *agentBinary) remove() error { return os.RemoveAll(b.dir) }

// serve runs `agent serve` while fn runs. Later settings of a name replace the defaults.
func (b *agentBinary) serve(
	ctx context.Context, database string, settings []string, fn func(ctx context.Context, url string, pid int) error,
) (err error) {
	address, err := freeAddress(ctx)
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(b.dir, "log"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	agent := exec.CommandContext(ctx, b.path, "serve", "--migrate")
	agent.Dir, agent.Stdout, agent.Stderr = b.dir, log, log
	agent.Cancel = func() error { return agent.Process.Signal(syscall.SIGTERM) }
	agent.WaitDelay = 30 * time.Second
	agent.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + b.dir, "DATABASE_URL=" + database, "AGENT_LISTEN=" + address,
		"AGENT_ADMIN_TOKEN=6b1f0c9e27d84a53b1c7e09f4d2a8836", "AGENT_HEARTBEAT_CRON=0 0 1 1 *",
		"OPENAI_BASE_URL=http://" + address + "/none", "OPENAI_API_KEY=none",
	}, settings...)
	if err := agent.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	if err = untilReady(ctx, "http://"+address+"/readyz"); err == nil {
		err = fn(ctx, "http://"+address, agent.Process.Pid)
	}
	if stopped := agent.Process.Signal(syscall.SIGTERM); stopped != nil && !errors.Is(stopped, os.ErrProcessDone) {
		err = errors.Join(err, stopped)
	}
	if ended := agent.Wait(); ended != nil || err != nil {
		output, _ := os.ReadFile(log.Name())
		err = errors.Join(err, ended, fmt.Errorf("the agent's output: %.2000s", output))
	}
	return err
}

func freeAddress(ctx context.Context) (string, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return l.Addr().String(), l.Close()
}

// untilReady polls for at most two minutes until the agent is ready.
func untilReady(ctx context.Context, ready string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, ready, http.NoBody)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(req)
		if err == nil {
			err = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return err
			}
		}
		if pause(ctx, 100*time.Millisecond) != nil {
			return fmt.Errorf("wait for the agent: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}
