package api

import (
	"bytes"
	"cmp"
	"mime"
	"net/http"
)

// holding keeps an answer back until it is complete, so that it can be stored first. One that turns out to
// be a stream, or too large to keep, goes through.
type holding struct {
	http.ResponseWriter
	status  int
	body    bytes.Buffer
	through bool
}

func (w *holding) WriteHeader(status int) {
	switch {
	case status < http.StatusOK:
		w.ResponseWriter.WriteHeader(status)
	case w.status == 0:
		w.status = status
		if kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type")); err == nil && kind == "text/event-stream" {
			w.letThrough()
		}
	}
}

func (w *holding) Write(b []byte) (int, error) {
	w.WriteHeader(w.code())
	if !w.through && w.body.Len()+len(b) > maxKept {
		w.letThrough()
	}
	if w.through {
		return w.ResponseWriter.Write(b)
	}
	return w.body.Write(b)
}

// letThrough sends what was held back; from now on nothing is.
func (w *holding) letThrough() {
	if !w.through {
		w.through = true
		w.push()
	}
}

// push writes what was held back. A client that is gone shows at the next write.
func (w *holding) push() {
	w.ResponseWriter.WriteHeader(w.code())
	if w.body.Len() > 0 {
		_, _ = w.ResponseWriter.Write(w.body.Bytes())
	}
}

// send is the end of an answer that was held back.
func (w *holding) send() {
	if !w.through {
		w.push()
	}
}

// Flush is for handlers that ask for an http.Flusher. Whoever flushes streams.
func (w *holding) Flush() { _ = w.FlushError() } // a client that is gone shows at the next write

func (w *holding) FlushError() error {
	w.WriteHeader(w.code())
	w.letThrough()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *holding) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// code is the status of the answer, which is 200 when the handler does not say.
func (w *holding) code() int { return cmp.Or(w.status, http.StatusOK) }

// kept is the body to store.
func (w *holding) kept() []byte {
	if w.through || w.body.Len() == 0 {
		return []byte{}
	}
	return w.body.Bytes()
}

// headers are those that belong to an answer and not to its connection.
func (w *holding) headers() map[string]string {
	list := map[string]string{}
	for _, name := range []string{"Content-Type", "Location", "X-Trace-Id", "X-Thread-Id", "X-Request-Id", "ETag"} {
		if v := w.Header().Get(name); v != "" {
			list[name] = v
		}
	}
	return list
}
