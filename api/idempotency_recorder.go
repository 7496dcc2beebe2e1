package api

import (
	"bytes"
	"cmp"
	"mime"
	"net/http"
)

// responseRecorder buffers a response until the server has stored it. A stream or an oversized response passes through.
// The server stores no body of a response with a secret.
type responseRecorder struct {
	http.ResponseWriter
	status      int
	body        bytes.Buffer
	passthrough bool
	secret      bool
}

func (w *responseRecorder) WriteHeader(status int) {
	switch {
	case status < http.StatusOK:
		w.ResponseWriter.WriteHeader(status)
	case w.status == 0:
		w.status = status
		if kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type")); err == nil && kind == "text/event-stream" {
			w.passThrough()
		}
	}
}

func (w *responseRecorder) Write(b []byte) (int, error) {
	w.WriteHeader(w.code())
	if !w.passthrough && w.body.Len()+len(b) > maxStored {
		w.passThrough()
	}
	if w.passthrough {
		return w.ResponseWriter.Write(b)
	}
	return w.body.Write(b)
}

// passThrough sends the buffered part and stops buffering.
func (w *responseRecorder) passThrough() {
	if !w.passthrough {
		w.passthrough = true
		w.flushBuffer()
	}
}

// flushBuffer sends the buffered part. The next write reports a disconnected client.
func (w *responseRecorder) flushBuffer() {
	w.ResponseWriter.WriteHeader(w.code())
	if w.body.Len() > 0 {
		_, _ = w.ResponseWriter.Write(w.body.Bytes())
	}
}

// finish sends a buffered response.
func (w *responseRecorder) finish() {
	if !w.passthrough {
		w.flushBuffer()
	}
}

// Flush implements http.Flusher. A flush means a stream.
func (w *responseRecorder) Flush() { _ = w.FlushError() } // the next write reports a disconnected client

func (w *responseRecorder) FlushError() error {
	w.WriteHeader(w.code())
	w.passThrough()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap supports http.ResponseController.
func (w *responseRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *responseRecorder) code() int { return cmp.Or(w.status, http.StatusOK) }

func (w *responseRecorder) storedBody() []byte {
	if w.passthrough || w.secret || w.body.Len() == 0 {
		return []byte{}
	}
	return w.body.Bytes()
}

// storedHeaders returns the headers that belong to the response, not to its connection.
func (w *responseRecorder) storedHeaders() map[string]string {
	list := map[string]string{}
	for _, name := range []string{"Content-Type", "Location", "X-Trace-Id", "X-Thread-Id", "X-Request-Id", "ETag"} {
		if v := w.Header().Get(name); v != "" {
			list[name] = v
		}
	}
	return list
}
