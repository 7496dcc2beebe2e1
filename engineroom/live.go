package engineroom

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// The event stream of a page, at /live and the page's path:
//
//   - hello comes first; its data is the build of the server, so that a page of an older one can say so.
//   - part is a part that reads otherwise than what the page has; data {id, html}. The event's id names the state of
//     all parts of the page after it, so Last-Event-ID, or ?seen= at first, says what the page has, and a stream that
//     broke goes on with what differs from that: nothing is missing, nothing comes twice.
//   - expired says that the login is over. The stream ends, as it does at shutdown.
//
// Between them a comment comes four times a minute.

const (
	heartbeat = 15 * time.Second
	// again is after how long a browser comes back when the stream broke.
	again = 2 * time.Second
)

// live streams the parts of a page as they change.
func (room *Room) live(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v := newVisit(r, p, "/live")
		if err := (&show{visit: v}).find(r.Context(), p); err != nil {
			if told, _ := problem.Of(err); told.Status < http.StatusInternalServerError {
				room.Refuse(w, r, err) // there is no such page; what only cannot be read now is told part by part
				return
			}
		}
		seen := r.Header.Get("Last-Event-ID")
		if seen == "" {
			seen = r.URL.Query().Get("seen")
		}
		if r.Method == http.MethodHead {
			w.Header().Set("Content-Type", "text/event-stream")
			return // a browser sends its next request on the connection as soon as it has the headers
		}
		who, leave, err := room.hub.join(p, v, seen)
		if err != nil {
			room.Refuse(w, r, err)
			return
		}
		defer leave()
		h := w.Header()
		guard(h)
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.write(sse.Event{Name: "hello", Data: build(), Retry: again}.Append(nil))
		if err := out.follow(r.Context(), who, room.hub.heartbeat); err != nil {
			room.Logger.DebugContext(r.Context(), "viewer went away", "path", problem.Path(r), "error", err)
		}
	})
}

// stream is the answer. After an error it writes nothing more.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	err     error
}

// follow writes what is new until the viewer leaves.
func (out *stream) follow(ctx context.Context, who *viewer, quiet time.Duration) error {
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	for out.flush(); out.err == nil; out.flush() {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				out.write(sse.Event{Name: "expired", Data: "login"}.Append(nil))
				out.flush()
			}
			return out.err
		case <-who.news:
			for _, n := range who.take() {
				out.part(n)
			}
		case <-tick.C:
			out.write(sse.Comment(nil, "alive"))
		}
	}
	return out.err
}

func (out *stream) part(n update) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(struct {
		ID   string `json:"id"`
		HTML string `json:"html"`
	}{n.name, string(n.html)})
	if err != nil {
		out.err = err
		return
	}
	out.write(sse.Event{ID: n.state, Name: "part", Data: strings.TrimSuffix(b.String(), "\n")}.Append(nil))
}

func (out *stream) write(event []byte) {
	if out.err == nil {
		_, out.err = out.w.Write(event)
	}
}

func (out *stream) flush() {
	if out.err != nil {
		return
	}
	if err := out.control.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		out.err = err
	}
}

var markForm = regexp.MustCompile(`^[\w-]{12}$`)

// marks are the digests in the name of a state; empty where there is none, which is not the digest of any part.
func marks(state string, n int) []string {
	list := strings.Split(state, ".")
	if len(list) != n {
		return make([]string, n)
	}
	for i, mark := range list {
		if !markForm.MatchString(mark) {
			list[i] = ""
		}
	}
	return list
}
