package api

import (
	"errors"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

// threadDetail is a thread with a page of what was said in it, newest first.
type threadDetail struct {
	threads.Thread
	Messages   []threads.Message `json:"messages"`
	NextCursor *string           `json:"next_cursor"`
}

// listThreads goes by when a thread was last spoken in. That changes: a thread that is spoken in while the
// listing is read moves to its front.
func (s *server) listThreads(r request) (answer, error) {
	after, err := unseal("threads", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	f := threads.Filter{
		Channel: r.query["channel"], Owner: r.query["owner"], Agent: r.query["agent"], Limit: r.query.limit(),
	}
	if after != "" {
		at, id, _ := strings.Cut(after, " ")
		f.BeforeID = id
		if f.BeforeTime, err = time.Parse(time.RFC3339Nano, at); err != nil {
			return answer{}, activity.ErrCursor
		}
	}
	rows, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(rows) < f.Limit {
		return answer{body: pageOf(rows, "")}, err
	}
	last := rows[len(rows)-1]
	f.BeforeTime, f.BeforeID, f.Limit = last.UpdatedAt, last.ID, 1
	more, err := threads.List(r.Context(), s.pool, f)
	if err != nil || len(more) == 0 {
		return answer{body: pageOf(rows, "")}, err
	}
	return answer{body: pageOf(rows, seal("threads", last.UpdatedAt.UTC().Format(time.RFC3339Nano)+" "+last.ID))}, nil
}

func (s *server) getThread(r request) (answer, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return answer{}, problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	t, err := threads.Find(r.Context(), s.pool, id)
	if errors.Is(err, threads.ErrNotFound) {
		return answer{}, problem.New(http.StatusNotFound, "%s", threads.ErrNotFound)
	}
	if err != nil {
		return answer{}, err
	}
	messages, next, err := s.messages(r, t.ID)
	if err != nil {
		return answer{}, err
	}
	p := pageOf(messages, next)
	return answer{body: threadDetail{t, p.Items, p.NextCursor}}, nil
}

// messages is a page of a thread. What is queued has no place yet and comes first, all on the first page.
func (s *server) messages(r request, thread string) (rows []threads.Message, next string, err error) {
	f := threads.MessageFilter{ThreadID: thread, Limit: r.query.limit()}
	after, err := unseal("messages", r.query["cursor"])
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
	return rows, seal("messages", strconv.FormatInt(f.Before, 10)), nil
}

// queued are the messages of a thread that have no place yet.
func (s *server) queued(r request, thread string) ([]threads.Message, error) {
	rows, err := threads.Messages(r.Context(), s.pool, threads.MessageFilter{ThreadID: thread, Limit: maxPage})
	return slices.DeleteFunc(rows, func(m threads.Message) bool { return m.Seq != nil }), err
}
