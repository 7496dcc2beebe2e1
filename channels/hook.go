package channels

import (
	"maps"
	"net/http"
	"reflect"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ServeHTTP serves POST /channels/{name}, for providers that send messages by HTTP. Any process may serve it.
func (r *Runner) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	name := req.PathValue("name")
	var found []Channel
	var err error
	if name != "" && postgres.IsText(name) {
		found, err = declared(req.Context(), r.Pool, name)
	}
	if err == nil && (len(found) == 0 || !found[0].Enabled) {
		http.Error(w, "there is no such channel", http.StatusNotFound)
		return
	}
	var transport Transport
	var state *stateWriter
	if err == nil {
		transport, state, err = r.hookOf(found[0])
	}
	if err != nil { // a provider drops a message after a 4xx
		r.Logger.WarnContext(req.Context(), "request for a channel not taken, its sender should try again", "channel", name,
			"error", err)
		http.Error(w, "the channel takes no requests now, send it again", http.StatusServiceUnavailable)
		return
	}
	hook, ok := transport.(Hook)
	if !ok {
		http.Error(w, "this channel takes no requests", http.StatusNotFound)
		return
	}
	response := &statusRecorder{ResponseWriter: w}
	hook.Hook(response, req, &inbox{db: r.Pool, pool: r.Pool, name: name, state: state})
	if response.status == http.StatusUnauthorized {
		state.refused(req.Context(), strings.TrimSpace(response.refusal))
	}
}

// openHook is the open transport for a provider's requests.
type openHook struct {
	declared  Channel
	secrets   map[string]string
	transport Transport
	state     *stateWriter
}

// hookOf opens the transport of a channel once for all its requests, until its declaration or a secret changes.
func (r *Runner) hookOf(c Channel) (Transport, *stateWriter, error) {
	r.hooks.Lock()
	defer r.hooks.Unlock()
	secrets, err := r.secrets(c)
	if h := r.hooks.open[c.Name]; h != nil && reflect.DeepEqual(h.declared, c) &&
		(err != nil || maps.Equal(h.secrets, secrets)) {
		return h.transport, h.state, nil
	}
	if err != nil {
		return nil, nil, err
	}
	transport, err := r.open(c, secrets)
	if err != nil {
		return nil, nil, err
	}
	if r.hooks.open == nil {
		r.hooks.open = map[string]*openHook{}
	}
	state := &stateWriter{pool: r.Pool, name: c.Name, log: r.Logger}
	r.hooks.open[c.Name] = &openHook{c, secrets, transport, state}
	return transport, state, nil
}

// statusRecorder remembers the status of a response, and the text of a 401.
type statusRecorder struct {
	http.ResponseWriter
	status  int
	refusal string
}

func (w *statusRecorder) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusRecorder) Write(b []byte) (int, error) {
	if w.status == http.StatusUnauthorized {
		w.refusal += string(b)
	}
	return w.ResponseWriter.Write(b)
}
