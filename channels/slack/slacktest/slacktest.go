// Package slacktest is a Slack for tests: Web API, Socket Mode, Events API and buttons of one workspace.
//
// It refuses the same calls as Slack: wrong tokens, blocks beyond the limits, edits of others' messages. It sends an
// event again until it is acknowledged. A message that mentions the bot in a channel makes two events. @slack/bolt
// drives the fake in this package's test, which proves the behaviour that bolt relies on.
package slacktest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"
)

// The workspace.
const (
	Team          = "T0TEAM"
	BotUser       = "U0BOT"
	BotID         = "B0BOT"
	Token         = "xoxb-token-of-the-fake"
	AppToken      = "xapp-token-of-the-fake"
	SigningSecret = "signing-secret-of-the-fake"
)

// Message is a stored message.
type Message struct {
	Channel  string          `json:"-"`
	TS       string          `json:"ts"`
	ThreadTS string          `json:"thread_ts,omitempty"`
	User     string          `json:"user"`
	BotID    string          `json:"bot_id,omitempty"`
	Type     string          `json:"type"`
	Subtype  string          `json:"subtype,omitempty"`
	Text     string          `json:"text"`
	Blocks   json.RawMessage `json:"blocks,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
	Files    []File          `json:"files,omitempty"`
	Edits    int             `json:"-"`
	Only     string          `json:"-"` // the user who sees an ephemeral message
}

// File is a file of a message.
type File struct {
	ID         string `json:"id"`
	Name       string `json:"name"`
	Mimetype   string `json:"mimetype"`
	Size       int    `json:"size"`
	URLPrivate string `json:"url_private"`
	Content    string `json:"-"`
}

// Fault is a fault of a call.
type Fault struct {
	RetryAfter int    // seconds: answer 429
	Status     int    // answer this status
	Error      string // answer ok: false
	LoseAnswer bool   // do the call, then cut the connection
	Cut        bool   // cut the connection at once
}

// Server is the fake. Set its fields before use.
type Server struct {
	URL string // its methods are below URL + /api/
	// EventsURL receives events and clicks by HTTP, signed; without it they go to a socket.
	EventsURL string
	// RetryAfter is the time to wait for an acknowledgement. Slack waits 3 s.
	RetryAfter time.Duration
	// Twice delivers each event twice.
	Twice bool

	http       *httptest.Server
	mu         sync.Mutex
	sockets    []*socket
	messages   []Message
	calls      map[string]int
	fault      func(method string, call int) Fault
	clock      int
	events     int
	dropFrames bool
	loseAcks   int
	retries    int
	givenUp    int
	waiting    map[string]chan struct{} // envelopes without an acknowledgement
	undone     sync.WaitGroup
	closed     chan struct{}
	clicks     []map[string]any
}

// New starts a fake.
func New() *Server {
	s := &Server{
		RetryAfter: 3 * time.Second, calls: map[string]int{}, waiting: map[string]chan struct{}{},
		closed: make(chan struct{}),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/api/{method}", s.call)
	mux.HandleFunc("/socket", s.open)
	mux.HandleFunc("/files/{id}", s.download)
	s.http = httptest.NewUnstartedServer(mux)
	s.URL = "http://" + s.http.Listener.Addr().String()
	s.http.Start()
	return s
}

// Close ends the fake.
func (s *Server) Close() {
	close(s.closed)
	s.mu.Lock()
	for _, socket := range s.sockets {
		_ = socket.conn.Close()
	}
	s.mu.Unlock()
	s.undone.Wait()
	s.http.CloseClientConnections()
	s.http.Close()
}

// Faults sets the faults. The call counts from 1 for each method.
func (s *Server) Faults(f func(method string, call int) Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// Calls returns the number of calls of a method.
func (s *Server) Calls(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[method]
}

// Retries returns the number of repeated deliveries.
func (s *Server) Retries() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.retries
}

// GivenUp returns the number of deliveries that were never acknowledged.
func (s *Server) GivenUp() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.givenUp
}

// LoseAcks loses the next n acknowledgements.
func (s *Server) LoseAcks(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loseAcks = n
}

// Messages returns the messages of a channel, in order.
func (s *Server) Messages(channel string) []Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Message
	for _, m := range s.messages {
		if m.Channel == channel {
			all = append(all, m)
		}
	}
	return all
}

// ts makes the next time stamp. The caller holds the lock.
func (s *Server) ts() string {
	s.clock++
	return fmt.Sprintf("%d.%06d", 1_700_000_000+s.clock/10, 100*s.clock%1_000_000)
}

// Say stores a person's message, delivers its events and returns its time stamp.
func (s *Server) Say(user, channel, text, threadTS string, files ...File) string {
	s.mu.Lock()
	for i, f := range files {
		files[i].URLPrivate = s.URL + "/files/" + f.ID
	}
	m := Message{
		Channel: channel, TS: s.ts(), ThreadTS: threadTS, User: user, Type: "message", Text: text, Files: files,
	}
	if len(files) > 0 {
		m.Subtype = "file_share"
	}
	s.messages = append(s.messages, m)
	s.mu.Unlock()
	s.announce(m)
	return m.TS
}

// announce delivers the events of a message.
func (s *Server) announce(m Message) {
	kinds := map[byte]string{'D': "im", 'C': "channel", 'G': "group"}
	event := map[string]any{"type": "message", "channel_type": kinds[m.Channel[0]], "channel": m.Channel, "event_ts": m.TS}
	raw, _ := json.Marshal(m)
	_ = json.Unmarshal(raw, &event)
	s.Deliver("events_api", s.event(event))
	if m.BotID == "" && m.Channel[0] != 'D' && strings.Contains(m.Text, "<@"+BotUser+">") {
		mention := maps.Clone(event)
		mention["type"] = "app_mention"
		delete(mention, "channel_type")
		s.Deliver("events_api", s.event(mention))
	}
}

// event wraps an event as Slack does.
func (s *Server) event(event map[string]any) map[string]any {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events++
	return map[string]any{
		"type": "event_callback", "team_id": Team, "api_app_id": "A0APP", "event": event, "event_time": 1_700_000_000,
		"event_id": fmt.Sprintf("Ev%08d", s.events), "authorizations": []any{map[string]any{
			"team_id": Team, "user_id": BotUser, "is_bot": true,
		}},
	}
}

// Click presses the button with a label below a message.
func (s *Server) Click(user, channel, ts, label string) error {
	s.mu.Lock()
	at := slices.IndexFunc(s.messages, func(m Message) bool { return m.Channel == channel && m.TS == ts && m.Only == "" })
	if at < 0 {
		s.mu.Unlock()
		return fmt.Errorf("there is no message %s in %s", ts, channel)
	}
	m := s.messages[at]
	s.clock++
	trigger := fmt.Sprintf("%d.click", s.clock)
	s.mu.Unlock()
	var blocks []struct {
		Type     string `json:"type"`
		BlockID  string `json:"block_id"`
		Elements []struct {
			ActionID string         `json:"action_id"`
			Value    string         `json:"value"`
			Text     map[string]any `json:"text"`
		} `json:"elements"`
	}
	_ = json.Unmarshal(m.Blocks, &blocks)
	for _, b := range blocks {
		for _, e := range b.Elements {
			if b.Type != "actions" || e.Text["text"] != label {
				continue
			}
			payload := map[string]any{
				"type": "block_actions", "team": map[string]any{"id": Team}, "trigger_id": trigger,
				"user": map[string]any{"id": user, "team_id": Team}, "channel": map[string]any{"id": channel}, "message": m,
				"container":    map[string]any{"type": "message", "message_ts": ts, "channel_id": channel, "thread_ts": m.ThreadTS},
				"api_app_id":   "A0APP",
				"response_url": s.URL + "/respond",
				"actions": []any{map[string]any{
					"type": "button", "action_id": e.ActionID, "block_id": b.BlockID, "value": e.Value, "text": e.Text,
					"action_ts": trigger,
				}},
			}
			s.mu.Lock()
			s.clicks = append(s.clicks, payload)
			s.mu.Unlock()
			s.Deliver("interactive", payload)
			return nil
		}
	}
	return fmt.Errorf("message %s has no button %q: %s", ts, label, m.Blocks)
}

// ClickAgain delivers the last click once more, as a client that recorded it could. A fresh one has another trigger id.
func (s *Server) ClickAgain(fresh bool) {
	s.mu.Lock()
	payload := s.clicks[len(s.clicks)-1]
	if fresh {
		s.clock++
		payload["trigger_id"] = fmt.Sprintf("%d.again", s.clock)
	}
	s.mu.Unlock()
	s.Deliver("interactive", payload)
}

// Wait waits until all deliveries are acknowledged or given up.
func (s *Server) Wait() { s.undone.Wait() }
