package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/app"
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
		Short: "Talk to the agent as a visitor",
		Long: `Talk to the agent as a visitor, with visitor skills only. MESSAGE runs one turn; a pipe runs one turn per
line; a terminal is interactive (/help lists commands). The answer goes to stdout, the thread id to stderr; continue
with --thread. ^C cancels the turn; ^D leaves. --file attaches files to the first message.`,
		Example: "  agent chat\n  agent chat 'when do you open?'\n  agent chat --thread th_… 'and on Sundays?' --json\n  " +
			"agent chat --thread th_… --file damage.jpg 'here it is'",
		Args: messageArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			if thread != "" && threads.CheckID(thread) != nil {
				return usageError("--thread: %w", threads.ErrInvalid)
			}
			c.talks = true
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) (err error) {
				if err := grantCLIAccess(ctx, s, thread); err != nil {
					return err
				}
				chatting := &chatSession{cli: c, chat: a.Chat, thread: thread, agent: agent}
				if chatting.files, err = c.storeFiles(ctx, s, files); err != nil {
					return documentHint(err)
				}
				switch {
				case len(args) > 0:
					return chatting.send(ctx, args[0])
				case c.sent.Asks: // a remote console begins
					return chatting.printGreeting(ctx)
				case !c.json && terminal(c.in) && terminal(c.out):
					return chatting.interact(ctx)
				}
				return chatting.sendLines(ctx)
			})
		},
	}
	cmd.Flags().StringVar(&thread, "thread", "", "continue this thread")
	cmd.Flags().StringArrayVar(&files, "file", nil, "attach this file to the message; repeatable")
	cmd.Flags().StringVar(&agent, "agent", agents.Alias, "talk to this agent instead of the default one")
	return cmd
}

// chatSession is a conversation from the command line.
type chatSession struct {
	*cli
	chat   *chat.Chat
	thread string
	agent  string
	files  []string // ids of documents, for the next message
}

// storeFiles stores files as documents of the command line's visitor and returns their ids.
func (c *cli) storeFiles(ctx context.Context, s *session, paths []string) (ids []string, err error) {
	for _, path := range paths {
		u := documents.Upload{MaxBytes: int64(s.config.DocumentMaxBytes), By: threads.Key(cliVisitor)}
		if err := c.readFile(&u, path); err != nil {
			return nil, err
		}
		var d documents.Document
		err := postgres.InTx(ctx, s.Pool, func(tx pgx.Tx) (err error) {
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

// grantCLIAccess grants the command line access to a thread, unless a chat key or a visitor owns it.
func grantCLIAccess(ctx context.Context, s *session, thread string) error {
	if thread == "" {
		return nil
	}
	existing, err := threads.Get(ctx, s.Pool, thread)
	switch {
	case errors.Is(err, threads.ErrNotFound):
		return nil
	case err != nil:
		return err
	case existing.OwnerKind == threads.ByKey, existing.OwnerKind == threads.ByVisitor,
		existing.OwnerKind == "" && existing.Owner != "":
		return nil
	}
	_, err = threads.Grant(ctx, s.Pool, thread, threads.Key(cliVisitor), thread, grantor(ctx))
	if errors.Is(err, threads.ErrTaken) {
		return nil // the command line has a thread of this name
	}
	return err
}

// fileIDs lists the attachments of the next message.
func (v *chatSession) fileIDs() (files []chat.File) {
	for _, id := range v.files {
		files = append(files, chat.File{ID: id})
	}
	return files
}

// send sends one message and prints the answer: streamed as text, or as one JSON document.
func (v *chatSession) send(ctx context.Context, text string) error {
	out := &errWriter{w: v.out}
	midLine := false
	show := func(piece string) {
		midLine = terminal(v.out) && !strings.HasSuffix(piece, "\n")
		fmt.Fprint(out, printableText(piece))
	}
	if v.json {
		show = nil
	}
	reply, err := v.chat.Say(ctx, chat.UserMessage{
		Owner: cliVisitor, Name: v.thread, Participant: "command line", Texts: []string{text}, Model: v.agent,
		Files: [][]chat.File{v.fileIDs()},
	}, show, func() {
		if midLine {
			fmt.Fprintln(out)
		}
		v.infof("the answer waits for an approval")
	})
	if reply.ThreadID != "" { // the message is stored
		v.thread, v.files = reply.ThreadID, nil
	}
	if !v.json && reply.ThreadID != "" {
		fmt.Fprintln(out)
	}
	refusal, refused := errors.AsType[*chat.Refusal](err)
	switch {
	case ctx.Err() != nil:
		return &exitError{exitInterrupted, nil}
	case refused && reply.TraceID != "":
		return &tracedError{refusal, reply.TraceID}
	case err != nil:
		return err
	case v.json:
		return v.print(reply, nil)
	case out.err != nil:
		return fmt.Errorf("print answer: %w", out.err)
	}
	v.infof("thread %s, trace %s", printable(reply.ThreadID), reply.TraceID)
	return nil
}

func (v *chatSession) sendLines(ctx context.Context) error {
	err := v.eachLine(ctx, func(line string) (bool, error) { return true, v.send(ctx, line) })
	if err == nil && len(v.files) > 0 { // there was no line to send them with
		err = v.send(ctx, "")
	}
	return err
}

// interact reads messages from a terminal. An interrupt cancels the current turn, or clears the line.
func (v *chatSession) interact(ctx context.Context) error {
	signal.Reset(os.Interrupt)
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	defer signal.Stop(interrupts)
	lines, failed, stop := readLines(v.in)
	defer stop()
	if err := v.printGreeting(ctx); err != nil {
		return err
	}
	for {
		fmt.Fprint(v.out, "> ")
		select {
		case <-ctx.Done():
			return &exitError{exitInterrupted, nil}
		case <-interrupts:
			fmt.Fprintln(v.out)
		case line, more := <-lines:
			if !more || strings.TrimSpace(line) == "/quit" {
				fmt.Fprintln(v.out)
				return failed()
			}
			if strings.TrimSpace(line) == "" || v.chatSlash(line) {
				continue
			}
			if err := v.sendInterruptible(ctx, interrupts, line); err != nil {
				return err
			}
		}
	}
}

const chatHelp = `/help                 show this list
/quit                 leave, like ^D; ^C cancels a turn
`

// slashCommand matches a line with a console command: one word, unlike a path or a sentence that begins with one.
var slashCommand = regexp.MustCompile(`^/[a-z]+$`)

// chatSlash runs a slash command of a console of agent chat, and reports whether the line is one.
func (c *cli) chatSlash(line string) bool {
	line = strings.TrimSpace(line)
	if !slashCommand.MatchString(line) {
		return false
	}
	if line == "/help" {
		fmt.Fprint(c.out, chatHelp)
	} else {
		c.infof("agent: unknown command %s; see /help", line)
	}
	return true
}

// printGreeting prints the agent's greeting of a new conversation. The first message stores it in the thread.
func (v *chatSession) printGreeting(ctx context.Context) error {
	if v.thread != "" {
		_, known, err := threads.Resolve(ctx, v.chat.Front, threads.Key(cliVisitor), v.thread)
		if err != nil || known || threads.IsGenerated(v.thread) {
			return err
		}
	}
	a, err := v.chat.Agents.Find(ctx, v.chat.Front, v.agent)
	if err == nil && a.Greeting != "" {
		fmt.Fprintln(v.out, printableText(a.Greeting))
	}
	return err
}

// sendInterruptible sends one message and cancels it on an interrupt. A failed turn does not end the conversation.
func (v *chatSession) sendInterruptible(ctx context.Context, interrupts <-chan os.Signal, line string) error {
	turnCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = v.send(turnCtx, line)
	}()
	select {
	case <-done:
		if err != nil && ctx.Err() == nil {
			v.infof("%s", printable(err.Error()))
		}
	case <-interrupts:
		cancel()
		<-done
		v.infof("cancelled")
	}
	return ctx.Err()
}
