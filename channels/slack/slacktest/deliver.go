package slacktest

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

// tries bounds the deliveries of an event, as Slack does.
const tries = 4

// socket is a connection of Socket Mode.
type socket struct {
	conn  *websocket.Conn
	write sync.Mutex
}

func (s *socket) send(v any) error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.conn.WriteJSON(v)
}

// open serves a socket: hello, pings, and the acknowledgements of its client.
func (s *Server) open(w http.ResponseWriter, r *http.Request) {
	conn, err := (&websocket.Upgrader{CheckOrigin: func(*http.Request) bool { return true }}).Upgrade(w, r, nil)
	if err != nil {
		return
	}
	one := &socket{conn: conn}
	done := make(chan struct{})
	defer close(done)
	go s.ping(one, done)
	if one.send(map[string]any{
		"type": "hello", "num_connections": 1, "connection_info": map[string]any{"app_id": "A0APP"},
	}) != nil {
		return
	}
	s.mu.Lock()
	s.sockets = append(s.sockets, one)
	s.mu.Unlock()
	for {
		var ack struct {
			EnvelopeID string `json:"envelope_id"`
		}
		if conn.ReadJSON(&ack) != nil {
			break
		}
		s.acknowledge(ack.EnvelopeID)
	}
	s.mu.Lock()
	s.sockets = slices.DeleteFunc(s.sockets, func(other *socket) bool { return other == one })
	s.mu.Unlock()
	_ = conn.Close()
}

func (s *Server) ping(one *socket, done chan struct{}) {
	every := time.NewTicker(100 * time.Millisecond)
	defer every.Stop()
	for {
		select {
		case <-done:
			return
		case <-every.C:
			s.mu.Lock()
			drop := s.dropFrames
			s.mu.Unlock()
			if !drop && one.conn.WriteControl(websocket.PingMessage, []byte("ping"), time.Now().Add(time.Second)) != nil {
				return
			}
		}
	}
}

func (s *Server) acknowledge(envelope string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.loseAcks > 0 {
		s.loseAcks--
		return
	}
	if waits, ok := s.waiting[envelope]; ok {
		delete(s.waiting, envelope)
		close(waits)
	}
}

// Connected returns the number of open sockets.
func (s *Server) Connected() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sockets)
}

// Disconnect makes all clients reconnect, as Slack does every few hours.
func (s *Server) Disconnect() {
	s.mu.Lock()
	open := slices.Clone(s.sockets)
	s.mu.Unlock()
	for _, one := range open {
		_ = one.send(map[string]any{"type": "disconnect", "reason": "refresh_requested"})
	}
}

// DropFrames makes the open sockets carry no frames.
func (s *Server) DropFrames(drop bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropFrames = drop
}

// Deliver sends a payload until it is acknowledged, in the background.
func (s *Server) Deliver(kind string, payload map[string]any) {
	copies := 1
	if s.Twice && kind == "events_api" {
		copies = 2
	}
	raw, err := json.Marshal(payload)
	if err != nil {
		panic(err)
	}
	for range copies {
		s.undone.Go(func() {
			for attempt := range tries {
				if attempt > 0 {
					s.mu.Lock()
					s.retries++
					s.mu.Unlock()
				}
				if s.deliver(kind, raw, attempt) {
					return
				}
				select {
				case <-s.closed:
					return
				default:
				}
			}
			s.mu.Lock()
			s.givenUp++
			s.mu.Unlock()
		})
	}
}

func (s *Server) deliver(kind string, raw []byte, attempt int) bool {
	if s.EventsURL != "" {
		return s.post(kind, raw, attempt)
	}
	to := s.awaitSocket()
	if to == nil {
		return false
	}
	s.mu.Lock()
	s.clock++
	envelope := fmt.Sprintf("envelope-%d", s.clock)
	acked := make(chan struct{})
	s.waiting[envelope] = acked
	s.mu.Unlock()
	_ = to.send(map[string]any{
		"type": kind, "envelope_id": envelope, "payload": json.RawMessage(raw), "accepts_response_payload": false,
		"retry_attempt": attempt, "retry_reason": map[bool]string{true: "timeout"}[attempt > 0],
	})
	select {
	case <-acked:
		return true
	case <-s.closed:
	case <-time.After(s.RetryAfter):
	}
	return false
}

// awaitSocket waits for a socket that carries something; nil if the fake is closed.
func (s *Server) awaitSocket() *socket {
	for {
		s.mu.Lock()
		if len(s.sockets) > 0 && !s.dropFrames {
			defer s.mu.Unlock()
			return s.sockets[len(s.sockets)-1]
		}
		s.mu.Unlock()
		select {
		case <-s.closed:
			return nil
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Sign returns the headers of a signed body.
func Sign(secret string, at time.Time, body []byte) http.Header {
	mac := hmac.New(sha256.New, []byte(secret))
	fmt.Fprintf(mac, "v0:%d:%s", at.Unix(), body)
	h := http.Header{}
	h.Set("X-Slack-Request-Timestamp", strconv.FormatInt(at.Unix(), 10))
	h.Set("X-Slack-Signature", "v0="+hex.EncodeToString(mac.Sum(nil)))
	return h
}

// post delivers by HTTP.
func (s *Server) post(kind string, raw []byte, attempt int) bool {
	contentType, body := "application/json", raw
	if kind == "interactive" {
		contentType, body = "application/x-www-form-urlencoded", []byte(url.Values{"payload": {string(raw)}}.Encode())
	}
	h := Sign(SigningSecret, time.Now(), body)
	h.Set("Content-Type", contentType)
	if attempt > 0 {
		h.Set("X-Slack-Retry-Num", strconv.Itoa(attempt))
		h.Set("X-Slack-Retry-Reason", "http_timeout")
	}
	status, _ := s.Post(h, body)
	s.mu.Lock()
	defer s.mu.Unlock()
	if status/100 == 2 && s.loseAcks > 0 {
		s.loseAcks--
		return false
	}
	return status/100 == 2
}

// Post sends a request to EventsURL and returns its answer.
func (s *Server) Post(h http.Header, body []byte) (int, string) {
	ctx, cancel := context.WithTimeout(context.Background(), s.RetryAfter)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.EventsURL, bytes.NewReader(body))
	if err != nil {
		return 0, err.Error()
	}
	r.Header = h
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = got.Body.Close() }()
	text, _ := io.ReadAll(got.Body)
	return got.StatusCode, strings.TrimSpace(string(text))
}
