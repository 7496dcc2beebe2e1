package main

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// commandHost runs the commands of callers in the process of a server. A command uses the server's database and
// settings. It has no access to the server's files, terminal or standard input. It reads only the caller's input.
type commandHost struct {
	environ    map[string]string
	references map[string]string
	session    *session
	slots      chan struct{}
}

func newCommandHost(c *cli, s *session) *commandHost {
	environ := maps.Clone(c.environ)
	for _, name := range append(slices.Clone(sentVariables), clientVariables...) {
		delete(environ, name)
	}
	return &commandHost{
		environ: environ, references: c.references, session: s,
		slots: make(chan struct{}, maxCommands),
	}
}

// maxCommands bounds the commands that run at once in a process.
const maxCommands = 16

// ServeHTTP runs one command and streams its output. The end of the request interrupts the command.
func (h *commandHost) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	req, folder, err := readCommand(r)
	if err == nil {
		select {
		case h.slots <- struct{}{}:
			defer func() { <-h.slots }()
		default:
			w.Header().Set("Retry-After", "1")
			err = problem.New(http.StatusTooManyRequests, "%d commands run at once; try again", maxCommands)
		}
	}
	if err != nil {
		problem.Write(w, r, err, "", h.session.log)
		return
	}
	w.Header().Set("Content-Type", framesType)
	w.Header().Set("X-Accel-Buffering", "no")
	out := &frameWriter{w: w, control: http.NewResponseController(w)}
	defer out.keepAlive()()
	if out.send(commandFrame{Version: buildVersion()}) != nil {
		return // the caller has left
	}
	ctx := r.Context()
	if caller := principals.From(ctx); caller != nil {
		ctx = principals.WithCaller(ctx, caller, "cli")
	}
	code := h.run(ctx, req, folder, out)
	_ = out.send(commandFrame{Exit: &code}) // no caller is left for the exit code
	out.end()
}

// run runs a command as the program does, and returns its exit code.
func (h *commandHost) run(ctx context.Context, req commandRequest, folder fs.FS, out *frameWriter) int {
	c := &cli{
		environ: maps.Clone(h.environ), references: h.references, args: req.Args, in: bytes.NewReader(req.Stdin),
		out:  &callerStream{out, false, req.OutTerminal, req.Width},
		err:  &callerStream{out, true, req.ErrTerminal, req.Width},
		host: h, sent: req, folder: folder,
	}
	for _, name := range sentVariables {
		if value := req.Environ[name]; value != "" {
			c.environ[name] = value
		}
	}
	err := c.execute(ctx)
	if err == nil {
		return 0
	}
	code := exitCode(ctx, err)
	if code == exitInterrupted && errors.Is(context.Cause(ctx), executions.ErrDraining) {
		code, err = exitFailed, hint(errors.New("the server shuts down"), unknownOutcome)
	}
	c.reportError(code, err)
	return code
}

// readCommand decodes a request and opens its folder.
func readCommand(r *http.Request) (req commandRequest, folder fs.FS, err error) {
	dec := json.NewDecoder(r.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&req); err != nil {
		return req, nil, problem.New(http.StatusBadRequest, "the body is no command: %.200s", err.Error())
	}
	for name := range req.Environ {
		if !slices.Contains(sentVariables, name) {
			return req, nil, problem.New(http.StatusBadRequest, "environ: %.60q cannot be set; it takes %s", name,
				strings.Join(sentVariables, ", "))
		}
	}
	if len(req.Folder) == 0 {
		return req, nil, nil
	}
	packed, err := zip.NewReader(bytes.NewReader(req.Folder), int64(len(req.Folder)))
	if err != nil {
		return req, nil, problem.New(http.StatusBadRequest, "folder: %.200s", err.Error())
	}
	size := uint64(0)
	for _, file := range packed.File {
		if size += file.UncompressedSize64; size > maxSentBytes || file.UncompressedSize64 > maxSentBytes {
			return req, nil, problem.New(http.StatusRequestEntityTooLarge, "folder: more than %d bytes", maxSentBytes)
		}
	}
	return req, packed, nil
}

// frameWriter writes frames of a command. Nothing is written after end.
type frameWriter struct {
	mu      sync.Mutex
	w       io.Writer
	control *http.ResponseController
	ended   bool
	err     error
}

// framesType is the content type of a command's output.
const framesType = "application/x-ndjson"

func (f *frameWriter) send(frame commandFrame) error {
	text, err := json.Marshal(frame)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended || f.err != nil {
		return cmp.Or(f.err, io.ErrClosedPipe)
	}
	if _, f.err = f.w.Write(append(text, '\n')); f.err == nil {
		f.err = f.control.Flush()
	}
	return f.err
}

func (f *frameWriter) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
}

// keepAlive sends empty frames until stop.
func (f *frameWriter) keepAlive() (stop func()) {
	ended := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		tick := time.NewTicker(keepAliveInterval)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = f.send(commandFrame{}) // the command notices a lost connection by its context
			case <-ended:
				return
			}
		}
	})
	return func() {
		close(ended)
		group.Wait()
	}
}

// maxFrame bounds the bytes in one frame, so that each is written in time on a slow connection.
const maxFrame = 32 << 10

// callerStream is standard output or standard error of a caller.
type callerStream struct {
	frames   *frameWriter
	isErr    bool
	terminal bool
	width    int
}

func (s *callerStream) Write(text []byte) (n int, err error) {
	for part := range slices.Chunk(text, maxFrame) {
		frame := commandFrame{Out: part}
		if s.isErr {
			frame = commandFrame{Err: part}
		}
		if err := s.frames.send(frame); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// onInterrupt sends the text that a caller prints if it interrupts the command. After an interrupt the server cannot
// reach the caller.
func (c *cli) onInterrupt(text string) {
	if out, remote := c.out.(*callerStream); remote {
		_ = out.frames.send(commandFrame{Interrupted: text}) // a caller that is gone ends the command
	}
}

// endQuestion ends a question of askCaller: the command no longer waits for the approval.
func (c *cli) endQuestion() {
	if out, remote := c.out.(*callerStream); remote {
		_ = out.frames.send(commandFrame{Continues: true}) // a caller that is gone ends the command
	}
}

// askCaller asks a remote caller about an approval of an execution. The caller prints leftOpen if it leaves the
// approval open.
func (c *cli) askCaller(a operate.Approval, execution, leftOpen string) {
	if out, remote := c.out.(*callerStream); remote {
		frame := commandFrame{Ask: a.ID, Execution: execution, LeftOpen: leftOpen}
		_ = out.frames.send(frame) // a caller that is gone ends the command
	}
}
