package slack

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/gorilla/websocket"
	"github.com/slack-go/slack"
	"github.com/slack-go/slack/socketmode"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	maxBody     = 1 << 20
	maxEnvelope = 4 << 20
	// hookTimeout bounds a request of Slack, which repeats a request after 3 s.
	hookTimeout = 2500 * time.Millisecond
)

// Run implements [channels.Transport]. With the Events API, requests bring the messages ([Transport.Hook]), and Run
// only checks whether Slack still knows the app.
func (t *Transport) Run(ctx context.Context, in channels.Inbox) error {
	if _, err := t.self(ctx); err != nil {
		return err
	}
	if t.socketMode {
		return t.listen(ctx, in)
	}
	tick := time.NewTicker(t.pingInterval)
	defer tick.Stop()
	for {
		if err := t.ping(ctx, in); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// ping checks whether Slack answers the bot.
func (t *Transport) ping(ctx context.Context, in channels.Inbox) error {
	_, err := t.api.AuthTestContext(ctx)
	if err == nil {
		in.Connected(ctx)
	} else if ctx.Err() == nil { // otherwise the worker stops, which is no failure
		return fmt.Errorf("log in at Slack: %w", classify(err))
	}
	return nil
}

// listen receives by Socket Mode until ctx ends. The client reconnects when Slack requests it, and when Slack's pings
// stop.
func (t *Transport) listen(ctx context.Context, in channels.Inbox) error {
	ctx, stop := context.WithCancel(ctx)
	client := socketmode.New(t.api, socketmode.OptionDialer(t.dialer()), socketmode.OptionReadLimit(maxEnvelope),
		socketmode.OptionPingInterval(t.socketPing))
	done := make(chan error, 1)
	go func() { done <- client.RunContext(ctx) }()
	defer func() {
		stop()
		<-done //nolint:errcheck // it was stopped, or its error is returned
	}()
	tick := time.NewTicker(t.pingInterval)
	defer tick.Stop()
	connected := false
	for {
		select {
		case err := <-done:
			done <- err // for the deferred function
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("socket mode: %w", classify(err))
		case <-tick.C:
			if !connected {
				continue
			}
			if err := t.ping(ctx, in); err != nil {
				return err
			}
		case e := <-client.Events:
			e = t.handleEvents(ctx, client, e, in)
			switch e.Type {
			case socketmode.EventTypeHello:
				connected = true
				in.Connected(ctx)
			case socketmode.EventTypeConnecting:
				connected = false
			case socketmode.EventTypeConnectionError:
				failure, _ := e.Data.(*slack.ConnectionErrorEvent)
				if ctx.Err() != nil {
					return nil
				}
				return fmt.Errorf("socket mode: %w", classify(failure.ErrorObj))
			default:
			}
		}
	}
}

// dialer returns a dialer with the transport's rules on addresses, proxies and certificates.
func (t *Transport) dialer() *websocket.Dialer {
	d := &websocket.Dialer{Proxy: http.ProxyFromEnvironment, HandshakeTimeout: 15 * time.Second, WriteBufferSize: 32 << 10}
	if own, ok := t.client.Transport.(*http.Transport); ok {
		d.Proxy, d.NetDialContext, d.TLSClientConfig = own.Proxy, own.DialContext, own.TLSClientConfig
	}
	return d
}

// maxBatch bounds the events that are committed together.
const maxBatch = 100

// batch is an inbox that collects messages, to be committed together.
type batch struct {
	channels.Inbox
	messages []channels.Incoming
}

func (b *batch) Receive(_ context.Context, _ string, messages ...channels.Incoming) error {
	b.messages = append(b.messages, messages...)
	return nil
}

func (b *batch) Known(ctx context.Context, conversation string) (bool, error) {
	if slices.ContainsFunc(b.messages, func(m channels.Incoming) bool { return m.Conversation == conversation }) {
		return true, nil
	}
	return b.Inbox.Known(ctx, conversation)
}

// handleEvents commits e and the events in the queue, up to maxBatch, and then acknowledges them. One transaction for
// all helps a burst to meet Slack's limit of three seconds. An event that cannot be stored is not acknowledged: Slack
// sends it again. If the common transaction fails, each event gets its own. handleEvents stops at an event about the
// connection and returns that event; the zero event if there is none.
func (t *Transport) handleEvents(
	ctx context.Context, client *socketmode.Client, e socketmode.Event, in channels.Inbox,
) (connection socketmode.Event) {
	b := &batch{Inbox: in}
	var events []readEvent
	for n := 1; ; n++ {
		var envelope socketmode.Request
		switch e.Type {
		case socketmode.EventTypeHello, socketmode.EventTypeConnecting, socketmode.EventTypeConnectionError:
			connection = e
		case socketmode.EventTypeEventsAPI, socketmode.EventTypeInteractive, socketmode.EventTypeSlashCommand:
			envelope = *e.Request
		case socketmode.EventTypeErrorBadMessage: // an event of a type that the client does not know
			if bad, ok := e.Data.(*socketmode.ErrorBadMessage); !ok || json.Unmarshal(bad.Message, &envelope) != nil {
				envelope.EnvelopeID = ""
			}
		default:
		}
		if envelope.EnvelopeID != "" {
			before := len(b.messages)
			if err := t.store(ctx, envelope.Payload, b); err != nil {
				t.log.WarnContext(ctx, "message of Slack not read, it comes again", "error", err)
			} else {
				events = append(events, readEvent{envelope.EnvelopeID, b.messages[before:len(b.messages):len(b.messages)]})
			}
		}
		// No other goroutine reads the queue, so the receive below cannot block.
		if connection.Type != "" || n == maxBatch || len(client.Events) == 0 {
			break
		}
		e = <-client.Events
	}
	for _, e := range t.commit(ctx, b.messages, events, in) {
		if err := client.AckCtx(ctx, e.envelope, nil); err != nil && ctx.Err() == nil {
			t.log.WarnContext(ctx, "message of Slack not acknowledged, it comes again", "error", err)
		}
	}
	return connection
}

// readEvent is an event with its messages.
type readEvent struct {
	envelope string
	messages []channels.Incoming
}

// commit stores the messages of events, together if possible, and returns the events that are stored.
func (t *Transport) commit(
	ctx context.Context, all []channels.Incoming, events []readEvent, in channels.Inbox,
) (stored []readEvent) {
	if len(all) == 0 {
		return events
	}
	err := in.Receive(ctx, "", all...)
	if err == nil {
		return events
	}
	t.log.WarnContext(ctx, "messages of Slack not stored together", "messages", len(all), "error", err)
	if len(events) == 1 || ctx.Err() != nil || postgres.Broken(err) || postgres.Unreachable(err) {
		return nil // Slack sends them again
	}
	for _, e := range events {
		if len(e.messages) > 0 {
			if err := in.Receive(ctx, "", e.messages...); err != nil {
				t.log.WarnContext(ctx, "message of Slack not stored, it comes again", "error", err)
				continue
			}
		}
		stored = append(stored, e)
	}
	return stored
}

// Hook implements [channels.Hook]: events and clicks by HTTP. The signature is checked before the body is parsed.
func (t *Transport) Hook(w http.ResponseWriter, r *http.Request, in channels.Inbox) {
	ctx, cancel := context.WithTimeout(r.Context(), hookTimeout)
	defer cancel()
	if t.socketMode {
		http.Error(w, "this channel uses Socket Mode", http.StatusUnauthorized)
		return
	}
	if err := t.verifier.Before(r.Header, time.Now()); err != nil {
		http.Error(w, err.Error(), http.StatusUnauthorized)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, "the body is too large, or ended", http.StatusRequestEntityTooLarge)
		return
	}
	if err := t.verifier.Verify(r.Header, body, time.Now()); err != nil {
		http.Error(w, "the signature is wrong", http.StatusUnauthorized)
		return
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-www-form-urlencoded") {
		form, err := url.ParseQuery(string(body))
		if err != nil || form.Get("payload") == "" {
			w.WriteHeader(http.StatusOK) // a slash command; the app declares none
			return
		}
		body = []byte(form.Get("payload"))
	}
	var check struct{ Type, Challenge string }
	if json.Unmarshal(body, &check) == nil && check.Type == "url_verification" {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]string{"challenge": short(check.Challenge, maxChallenge)})
		return
	}
	if err := t.store(ctx, body, in); err != nil {
		t.log.WarnContext(ctx, "message of Slack not stored, it comes again", "error", err)
		http.Error(w, "not stored, send it again", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusOK)
}

const maxChallenge = 1024
