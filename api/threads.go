package api

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

// threadRoutes returns the routes that read, create and name threads, and send messages to them. Others manage access.
func (s *server) threadRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/threads", response: page[threads.Thread]{}, handle: s.listThreads,
			about: "Conversations, most recent first. A new message moves its conversation to the front.",
			params: listParams(textParam("channel", "Channel of the conversation"),
				textParam("owner", "Owner of the conversation"), textParam("agent", "Agent of the conversation")),
		}, {
			method: "GET", path: "/v1/threads/{id}", response: threadDetail{}, handle: s.getThread, params: listParams(),
			about: "One conversation with a page of its messages, newest first.",
		}, {
			method: "POST", path: "/v1/threads", body: threadRequest{}, response: threads.Thread{}, status: http.StatusCreated,
			handle: s.openThread, conflicts: true, about: "Create a conversation. 409 if the id exists.",
		}, {
			method: "PATCH", path: "/v1/threads/{id}", body: titleRequest{}, response: threads.Thread{}, handle: s.nameThread,
			about: "Name a conversation for people. Lists show the title and searches use it; it identifies no thread.",
		}, {
			method: "POST", path: "/v1/threads/{id}/messages", body: messageRequest{}, response: messageResponse{},
			status: http.StatusCreated, handle: s.sendMessage, conflicts: true, derivesKey: true,
			about: "Send a message to a conversation: for a locked external execution with execution_id and lock_id, " +
				"else as the admin. The thread's holder sends at once; other messages are queued, first in, first out.",
		},
	}
}

// listThreads lists threads by their last message. A thread that gets a message during a listing moves to the front, so
// the later pages miss it.
func (s *server) listThreads(r request) (response, error) {
	key := func(t threads.Thread) string { return t.UpdatedAt.UTC().Format(time.RFC3339Nano) + " " + t.ID }
	list, err := readPageByKey("threads", r.query, key, func(after string, limit int) (_ []threads.Thread, err error) {
		f := threads.Filter{Channel: r.query["channel"], Owner: r.query["owner"], Agent: r.query["agent"], Limit: limit}
		if after != "" {
			at, id, _ := strings.Cut(after, " ")
			f.BeforeID = id
			if f.BeforeTime, err = time.Parse(time.RFC3339Nano, at); err != nil {
				return nil, activity.ErrCursor
			}
		}
		return threads.List(r.Context(), s.pool, f)
	})
	return response{body: list}, err
}

// threadDetail is a thread with a page of messages, newest first.
type threadDetail struct {
	threads.Thread
	Messages   []threads.Message `json:"messages"`
	NextCursor *string           `json:"next_cursor"`
}

func (s *server) getThread(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	t, err := threads.Find(r.Context(), s.pool, id)
	if err != nil {
		return response{}, threadError(err)
	}
	messages, next, err := s.messages(r, t.ID)
	if err != nil {
		return response{}, err
	}
	p := pageOf(messages, next)
	return response{body: threadDetail{t, p.Items, p.NextCursor}}, nil
}

// messages reads a page of a thread. Queued messages have no sequence number and come first, all on the first page.
func (s *server) messages(r request, thread string) (rows []threads.Message, next string, err error) {
	f := threads.MessageFilter{ThreadID: thread, Limit: r.query.limit()}
	after, err := decodeCursor("messages", r.query["cursor"])
	if err != nil {
		return nil, "", err
	}
	if after != "" {
		if f.Before, err = strconv.ParseInt(after, 10, 64); err != nil || f.Before <= 0 {
			return nil, "", activity.ErrCursor
		}
	}
	rows, err = threads.Messages(r.Context(), s.pool, f)
	if err != nil || len(rows) < f.Limit {
		return rows, "", err
	}
	f.Before = int64(math.MaxInt64)
	if last := rows[len(rows)-1].Seq; last != nil {
		f.Before = *last
	} else if rows, err = s.queued(r, thread); err != nil {
		return nil, "", err
	}
	f.Limit = 1
	more, err := threads.Messages(r.Context(), s.pool, f)
	if err != nil || len(more) == 0 {
		return rows, "", err
	}
	return rows, encodeCursor("messages", strconv.FormatInt(f.Before, 10)), nil
}

// queued lists the messages without a sequence number.
func (s *server) queued(r request, thread string) (rows []threads.Message, err error) {
	f := threads.MessageFilter{ThreadID: thread, Limit: maxPage}
	for {
		some, err := threads.Messages(r.Context(), s.pool, f)
		some = slices.DeleteFunc(some, func(m threads.Message) bool { return m.Seq != nil })
		rows = append(rows, some...)
		if err != nil || len(some) < maxPage {
			return rows, err
		}
		f.UnsentBefore = some[len(some)-1].ID
	}
}

type threadRequest struct {
	ID          string `json:"id"`
	Channel     string `json:"channel,omitempty" doc:"chat (default), webhook or log"`
	Target      string `json:"target,omitempty" doc:"the outgoing target of channel webhook"`
	Participant string `json:"participant,omitempty"`
	Owner       string `json:"owner,omitempty" doc:"a chat key with access; empty: no access until an admin grants it"`
	IdleSeconds *int   `json:"idle_seconds,omitempty" doc:"idle time after which other senders may send; default 600"`
}

// maxIdle bounds idle_seconds: 30 days.
const maxIdle = 30 * 24 * 60 * 60

func (o threadRequest) check() error {
	channels := []string{threads.ChannelChat, threads.ChannelWebhook, threads.ChannelLog}
	switch {
	case threads.CheckID(o.ID) != nil:
		return problem.BadBody("id: %s", threads.ErrInvalid)
	case o.Channel != "" && !slices.Contains(channels, o.Channel):
		return problem.BadBody("channel is %.60q; use %s", o.Channel, strings.Join(channels, ", "))
	case (o.Channel == threads.ChannelWebhook) != (o.Target != ""):
		return problem.BadBody("target and channel webhook require each other")
	case o.IdleSeconds != nil && (*o.IdleSeconds < 1 || *o.IdleSeconds > maxIdle):
		return problem.BadBody("idle_seconds is %d; use 1 to %d (30 days)", *o.IdleSeconds, maxIdle)
	case threads.IsGenerated(o.ID):
		return problem.BadBody("id has the form of generated ids; choose another")
	case !isPrintableText(o.Participant) || !isPrintableText(o.Owner) || !isPrintableText(o.Target) ||
		len(o.Participant) > 200 || len(o.Owner) > 200:
		return problem.BadBody("participant and owner have at most 200 bytes of text")
	}
	return nil
}

// openThread creates a thread. A taken id is a conflict, so a client that repeats the request needs an Idempotency-Key.
func (s *server) openThread(r request) (response, error) {
	o := r.body.(threadRequest)
	if err := s.auth.checkChatKey(o.Owner); err != nil {
		return response{}, err
	}
	if o.Target != "" {
		var known bool
		err := s.pool.QueryRow(r.Context(), `select exists (select from agent_webhook_targets where name = @name)`,
			postgres.Strict{"name": o.Target}).Scan(&known)
		if err != nil {
			return response{}, err
		}
		if !known {
			return response{}, problem.BadBody("no outgoing webhook target %q; declare it in the workspace", o.Target)
		}
	}
	var thread threads.Thread
	var created bool
	done, err := s.record(r.Context(), "begin_thread", "a conversation was begun", map[string]any{"thread_id": o.ID},
		func(tx pgx.Tx, _ string) (_ any, err error) {
			if thread, created, err = s.createThread(r.Context(), tx, o); err != nil || !created {
				return activity.Unchanged, err
			}
			return map[string]string{"thread_id": thread.ID}, nil
		})
	switch {
	case errors.Is(err, threads.ErrTaken):
		return response{}, problem.New(http.StatusConflict, "the key %s already has a thread %q; choose another id", o.Owner,
			o.ID)
	case errors.Is(err, threads.ErrForeign) || err == nil && !created:
		return response{}, problem.New(http.StatusConflict, "thread %q exists", o.ID)
	case err != nil:
		return response{}, err
	}
	return response{body: thread, status: http.StatusCreated, trace: done.TraceID}, nil
}

// createThread creates a thread of the admin or of its channel, and opens it to the named key.
func (s *server) createThread(ctx context.Context, tx pgx.Tx, o threadRequest) (threads.Thread, bool, error) {
	t := threads.Thread{
		ID: o.ID, Channel: o.Channel, Target: o.Target, Participant: o.Participant, Owner: o.Owner,
		IdleSeconds: postgres.Deref(o.IdleSeconds),
	}
	if o.Channel == "" || o.Channel == threads.ChannelChat || o.Owner != "" {
		return threads.Ensure(ctx, tx, t)
	}
	return threads.Open(ctx, tx, threads.Principal{Kind: threads.ByChannel, Owner: o.Channel}, t)
}

// titleRequest names a thread.
type titleRequest struct {
	Title *string `json:"title" doc:"required; an empty one removes the title"`
}

func (b titleRequest) check() error {
	switch {
	case b.Title == nil:
		return problem.BadBody("title is required; an empty one removes it")
	case utf8.RuneCountInString(*b.Title) > threads.MaxTitle || !isPrintableText(*b.Title):
		return problem.BadBody("title is not text of at most %d characters", threads.MaxTitle)
	}
	return nil
}

func (s *server) nameThread(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	title := strings.TrimSpace(*r.body.(titleRequest).Title)
	c, err := s.record(r.Context(), "name_thread", "a conversation was named",
		map[string]any{"thread_id": id, "title": title},
		func(tx pgx.Tx, _ string) (any, error) {
			before, err := threads.SetTitle(r.Context(), tx, id, title)
			if err == nil && before == title {
				return activity.Unchanged, nil
			}
			return map[string]any{"before": before}, err
		})
	if err != nil {
		return response{trace: c.TraceID}, threadError(err)
	}
	t, err := threads.Get(r.Context(), s.pool, id)
	return response{body: t, trace: c.TraceID}, threadError(err)
}

// pathThread returns the thread's id from the path.
func pathThread(r request) (string, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// threadError maps a missing thread or access to 404.
func threadError(err error) error {
	for _, missing := range []error{threads.ErrNoAccess, threads.ErrNotFound} {
		if errors.Is(err, missing) {
			return problem.New(http.StatusNotFound, "%s", missing)
		}
	}
	return err
}
