package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
	"github.com/lanekeeper/lanekeeper/threads"
)

// cliVisitor owns the threads of agent chat. No chat key can have this name.
const cliVisitor = "cli: local visitor"

func (c *cli) chatCommand() *cobra.Command {
	var thread, agent string
	var files []string
	cmd := &cobra.Command{
		Use:   "chat [MESSAGE]",
		Short: "Talk with the agent as a visitor",
		Long: `Talk with the agent as a visitor does: it has only the skills meant for visitors. On a terminal line by line, from a
pipe one turn per line, with MESSAGE one turn. The answer goes to stdout; the thread's id goes to stderr, to go on with
--thread. ^C cancels the turn; at the prompt it leaves, as ^D does. The files of --file go with the first message.`,
		Example: "  agent chat\n  agent chat 'when do you open?'\n  agent chat --thread th_… 'and on Sundays?' --json\n  agent chat --thread th_… --file damage.jpg 'here it is'",
		Args:    message,
		RunE: func(cmd *cobra.Command, args []string) error {
			if thread != "" && threads.CheckID(thread) != nil {
				return usageError("--thread: %w", threads.ErrInvalid)
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app) (err error) {
				if err := letInCLI(ctx, s, thread); err != nil {
					return err
				}
				v := &visitor{cli: c, chat: a.chat, thread: thread, agent: agent}
				if v.files, err = c.attach(ctx, s, files); err != nil {
					return documentHint(err)
				}
				switch {
				case len(args) > 0:
					return v.turn(ctx, args[0])
				case len(files) > 0 && !terminal(c.in):
					return v.turn(ctx, "")
				case !c.json && terminal(c.in) && terminal(c.out):
					return v.converse(ctx)
				}
				return v.lines(ctx)
			})
		},
	}
	cmd.Flags().StringVar(&thread, "thread", "", "go on in this thread")
	cmd.Flags().StringArrayVar(&files, "file", nil, "send this file with the message; may be given again")
	cmd.Flags().StringVar(&agent, "agent", agents.Alias, "talk with this agent instead of the default one")
	return cmd
}

// visitor is somebody at the command line who talks with the agent.
type visitor struct {
	*cli
	chat   *chat.Chat
	thread string
	agent  string
	files  []string // ids of documents, for the next message
}

// attach stores files as documents of the command line's visitor, and returns their ids.
func (c *cli) attach(ctx context.Context, s *session, paths []string) (ids []string, err error) {
	for _, path := range paths {
		u := documents.Upload{MaxBytes: int64(s.config.DocumentMaxBytes), By: threads.Key(cliVisitor)}
		if err := c.readFile(&u, path); err != nil {
			return nil, err
		}
		var d documents.Document
		err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) (err error) {
			d, err = documents.Add(ctx, tx, u)
			return err
		})
		if err != nil {
			return nil, err
		}
		ids = append(ids, d.ID)
	}
	return ids, nil
}

// letInCLI opens a thread of an admin, a flow, an endpoint or a channel to the command line: who is at it has the
// database. The threads of visitors stay theirs.
func letInCLI(ctx context.Context, s *session, thread string) error {
	if thread == "" {
		return nil
	}
	got, err := threads.Get(ctx, s.pool, thread)
	switch {
	case errors.Is(err, threads.ErrNotFound):
		return nil
	case err != nil:
		return err
	case got.OwnerKind == threads.ByKey, got.OwnerKind == threads.ByVisitor, got.OwnerKind == "" && got.Owner != "":
		return nil
	}
	if _, err = threads.Let(ctx, s.pool, thread, threads.Key(cliVisitor), thread, commandLine); errors.Is(err, threads.ErrTaken) {
		return nil // its own of that name is meant
	}
	return err
}

// fileIDs are the files of the next message.
func (v *visitor) fileIDs() (files []chat.File) {
	for _, id := range v.files {
		files = append(files, chat.File{ID: id})
	}
	return files
}

// turn takes one turn. The answer is shown as it comes, or with --json as one document.
func (v *visitor) turn(ctx context.Context, text string) error {
	out := &printer{to: v.out}
	show := func(piece string) { fmt.Fprint(out, speech(piece)) }
	if v.json {
		show = nil
	}
	got, err := v.chat.Say(ctx, chat.Ask{
		Owner: cliVisitor, Name: v.thread, Participant: "command line", Texts: []string{text}, Model: v.agent,
		Files: [][]chat.File{v.fileIDs()},
	}, show)
	v.files = nil
	if got.ThreadID != "" {
		v.thread = got.ThreadID
	}
	if !v.json && got.ThreadID != "" {
		fmt.Fprintln(out)
	}
	refusal, refused := errors.AsType[*chat.Refusal](err)
	switch {
	case ctx.Err() != nil:
		return &exitError{exitInterrupted, nil}
	case refused && got.TraceID != "":
		return &traced{refusal, got.TraceID}
	case err != nil:
		return err
	case v.json:
		return v.print(got, nil)
	case out.err != nil:
		return fmt.Errorf("print answer: %w", out.err)
	}
	v.say("thread %s, trace %s", printable(got.ThreadID), got.TraceID)
	return nil
}

// lines takes a turn for each line of a pipe.
func (v *visitor) lines(ctx context.Context) error {
	return v.eachLine(ctx, func(line string) (bool, error) { return true, v.turn(ctx, line) })
}

// converse takes turns on a terminal. An interrupt ends the turn under way, or at the prompt the conversation.
func (v *visitor) converse(ctx context.Context) error {
	signal.Reset(os.Interrupt)
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	lines, failed, stop := readLines(v.in)
	defer stop()
	if err := v.greet(ctx); err != nil {
		return err
	}
	for {
		fmt.Fprint(v.out, "> ")
		select {
		case <-ctx.Done():
			return &exitError{exitInterrupted, nil}
		case <-interrupts:
			fmt.Fprintln(v.out)
			return &exitError{exitInterrupted, nil}
		case line, more := <-lines:
			if !more {
				fmt.Fprintln(v.out)
				return failed()
			}
			if strings.TrimSpace(line) == "" {
				continue
			}
			if err := v.interruptibly(ctx, interrupts, line); err != nil {
				return err
			}
		}
	}
}

// greet prints the agent's greeting when the conversation is new. The first message stores it in the thread.
func (v *visitor) greet(ctx context.Context) error {
	if v.thread != "" {
		_, known, err := threads.Resolve(ctx, v.chat.Front, threads.Key(cliVisitor), v.thread)
		if err != nil || known || threads.GivenOut(v.thread) {
			return err
		}
	}
	a, err := v.chat.Agents.Find(ctx, v.chat.Front, v.agent)
	if err == nil && a.Greeting != "" {
		fmt.Fprintln(v.out, speech(a.Greeting))
	}
	return err
}

// interruptibly takes a turn that an interrupt ends. What goes wrong with one turn does not end the conversation.
func (v *visitor) interruptibly(ctx context.Context, interrupts <-chan os.Signal, line string) error {
	turn, cancel := context.WithCancel(ctx)
	defer cancel()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = v.turn(turn, line)
	}()
	select {
	case <-done:
		if err != nil {
			v.say("%s", printable(err.Error()))
		}
	case <-interrupts:
		cancel()
		<-done // whose error says no more than this
		v.say("cancelled")
	}
	return ctx.Err()
}

// speech is what somebody says, without what could steer a terminal. Its lines stay.
func speech(text string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
}
