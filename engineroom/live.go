package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/sse"
)

// The event stream of a page, at /live and the page's path:
//
//   - hello comes first. Its data is the server's build, so a page of an older build can report the newer build.
//   - part is a changed part; data {id, html}. In a part of minDiffSize or more, a row that the page has already may be
//     empty, with the attribute data-same: see rowHashes. The event's id names the state of all live parts of the page
//     after the event. Last-Event-ID, or ?seen= at first, names the state that the page has. A reconnected stream sends
//     only the parts that differ from that state.
//   - expired reports that the login has expired. Then the stream ends, as at shutdown.
//
// The server sends a ping every few seconds; its data is the server's time in milliseconds. Pings are events, because
// the page's script sees no comments. The script treats a silent stream as a dead server.
const (
	pingInterval = 3 * time.Second
	// reconnectDelay is the pause of a browser before it reconnects.
	reconnectDelay = time.Second
)

// live streams a page's changed parts.
func (room *Room) live(p page) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayView(r); err != nil {
			room.Refuse(w, r, err)
			return
		}
		req := newPageRequest(r, p, "/live")
		if err := (&pageData{pageRequest: req}).loadSubject(r.Context(), p); err != nil {
			if refused, _ := problem.Of(err); refused.Status < http.StatusInternalServerError {
				room.Refuse(w, r, err) // the page does not exist; a temporary failure is shown in each part
				return
			}
		}
		seen := r.Header.Get("Last-Event-ID")
		if seen == "" {
			seen = r.URL.Query().Get("seen")
		}
		if r.Method == http.MethodHead { // an endless response would occupy the connection
			w.Header().Set("Content-Type", "text/event-stream")
			return
		}
		sub, leave, err := room.hub.join(p, req, seen)
		if err != nil {
			room.Refuse(w, r, err)
			return
		}
		defer leave()
		h := w.Header()
		setSecurityHeaders(h)
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no")
		out := &stream{w: w, control: http.NewResponseController(w)}
		out.write(sse.Event{Name: "hello", Data: build(), Retry: reconnectDelay}.Append(nil))
		if err := out.follow(r.Context(), sub, room.hub.pingInterval); err != nil {
			room.Logger.DebugContext(r.Context(), "viewer disconnected", "path", problem.Path(r), "error", err)
		}
	})
}

// stream is the response. After an error it writes nothing.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	err     error
}

// follow writes updates until the viewer leaves.
func (out *stream) follow(ctx context.Context, sub *subscriber, pingInterval time.Duration) error {
	tick := time.NewTicker(pingInterval)
	defer tick.Stop()
	for out.flush(); out.err == nil; out.flush() {
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				out.write(sse.Event{Name: "expired", Data: "login"}.Append(nil))
				out.flush()
			}
			return out.err
		case <-sub.notify:
			for _, event := range sub.pendingUpdates() {
				out.write(event)
			}
		case <-tick.C:
			out.write(sse.Event{Name: "ping", Data: strconv.FormatInt(time.Now().UnixMilli(), 10)}.Append(nil))
		}
	}
	return out.err
}

// encodePart returns the data of a part's event. All viewers share it.
func encodePart(name string, html []byte) string {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(struct {
		ID   string `json:"id"`
		HTML string `json:"html"`
	}{name, string(html)}); err != nil {
		panic(err) // a struct of two strings always encodes
	}
	return strings.TrimSuffix(b.String(), "\n")
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

var digestPattern = regexp.MustCompile(`^[\w-]{12}$`)

// parseDigests returns the digests in the id of a state, one for each of n parts. An invalid digest becomes empty, and
// matches no part.
func parseDigests(state string, n int) []string {
	digests := strings.Split(state, ".")
	if len(digests) != n {
		return make([]string, n)
	}
	for i, d := range digests {
		if !digestPattern.MatchString(d) {
			digests[i] = ""
		}
	}
	return digests
}
