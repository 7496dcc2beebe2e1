package slack

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
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

// logger is the log of a channel.
type logger struct{ *slog.Logger }

const (
	maxBody     = 1 << 20
	maxEnvelope = 4 << 20
	// answerWithin is the time limit of a request. Slack repeats a request after 3 s.
	answerWithin = 2500 * time.Millisecond
)

// Run implements [channels.Transport]. With the Events API, requests bring the messages ([Transport.Hook]), and Run
// only checks whether Slack still knows the app.
func (t *Transport) Run(ctx context.Context, in channels.Inbox) error {
	if _, err := t.self(ctx); err != nil {
		return err
	}
	if t.socket {
		return t.listen(ctx, in)
	}
	every := time.NewTicker(t.probe)
	defer every.Stop()
	for {
		if err := t.ask(ctx, in); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-every.C:
		}
	}
}

// ask checks whether Slack answers the bot.
func (t *Transport) ask(ctx context.Context, in channels.Inbox) error {
	_, err := t.api.AuthTestContext(ctx)
	if err == nil {
		in.Connected(ctx)
	} else if ctx.Err() == nil { // else the worker ends
		return fmt.Errorf("log in at Slack: %w", classify(err))
	}
	return nil
}

// listen receives by Socket Mode until ctx ends. The client reconnects when Slack requests it, and when Slack's pings
// stop.
func (t *Transport) listen(ctx context.Context, in channels.Inbox) error {
	ctx, stop := context.WithCancel(ctx)
	client := socketmode.New(t.api, socketmode.OptionDialer(t.dialer()), socketmode.OptionReadLimit(maxEnvelope),
		socketmode.OptionPingInterval(t.pingEvery))
	ended := make(chan error, 1)
	go func() { ended <- client.RunContext(ctx) }()
	defer func() {
		stop()
		<-ended //nolint:errcheck // it was stopped, or its error is returned
	}()
	probe := time.NewTicker(t.probe)
	defer probe.Stop()
	up := false
	for {
		select {
		case err := <-ended:
			ended <- err
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("socket mode: %w", classify(err))
		case <-probe.C:
			if !up {
				continue
			}
			if err := t.ask(ctx, in); err != nil {
				return err
			}
		case e := <-client.Events:
			e = t.take(ctx, client, e, in)
			switch e.Type {
			case socketmode.EventTypeHello:
				up = true
				in.Connected(ctx)
			case socketmode.EventTypeConnecting:
				up = false
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

// dialer connects sockets as the client connects, with the same rules on addresses.
func (t *Transport) dialer() *websocket.Dialer {
	d := &websocket.Dialer{Proxy: http.ProxyFromEnvironment, HandshakeTimeout: 15 * time.Second, WriteBufferSize: 32 << 10}
	if own, is := t.client.Transport.(*http.Transport); is {
		d.Proxy, d.NetDialContext, d.TLSClientConfig = own.Proxy, own.DialContext, own.TLSClientConfig
	}
	return d
}

// maxBatch bounds the events that are committed together.
const maxBatch = 100

// batch is an inbox that collects messages.
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

// take commits an event and the waiting ones in one transaction, then acknowledges them. So a burst meets Slack's limit
// of three seconds. An event that cannot be stored is not acknowledged: Slack sends it again. If the transaction fails
// for a message, each event gets a transaction of its own. It returns the first event about the connection; the zero
// event if there is none.
func (t *Transport) take(
	ctx context.Context, client *socketmode.Client, e socketmode.Event, in channels.Inbox,
) (rest socketmode.Event) {
	b := &batch{Inbox: in}
	var events []taken
	for n := 1; ; n++ {
		var envelope socketmode.Request
		switch e.Type {
		case socketmode.EventTypeHello, socketmode.EventTypeConnecting, socketmode.EventTypeConnectionError:
			rest = e
		case socketmode.EventTypeEventsAPI, socketmode.EventTypeInteractive, socketmode.EventTypeSlashCommand:
			envelope = *e.Request
		case socketmode.EventTypeErrorBadMessage: // an event of a type that the client does not know
			if bad, is := e.Data.(*socketmode.ErrorBadMessage); !is || json.Unmarshal(bad.Message, &envelope) != nil {
				envelope.EnvelopeID = ""
			}
		default:
		}
		if envelope.EnvelopeID != "" {
			before := len(b.messages)
			if err := t.store(ctx, envelope.Payload, b); err != nil {
				t.log.WarnContext(ctx, "message of Slack not read, it comes again", "error", err)
			} else {
				events = append(events, taken{envelope.EnvelopeID, b.messages[before:len(b.messages):len(b.messages)]})
			}
		}
		if rest.Type != "" || n == maxBatch || len(client.Events) == 0 { // no other goroutine reads them
			break
		}
		e = <-client.Events
	}
	for _, e := range t.commit(ctx, b.messages, events, in) {
		if err := client.AckCtx(ctx, e.envelope, nil); err != nil && ctx.Err() == nil {
			t.log.WarnContext(ctx, "message of Slack not acknowledged, it comes again", "error", err)
		}
	}
	return rest
}

// taken is an event with its messages.
type taken struct {
	envelope string
	messages []channels.Incoming
}

// commit stores the messages of events, together if possible, and returns the events that are stored.
func (t *Transport) commit(
	ctx context.Context, all []channels.Incoming, events []taken, in channels.Inbox,
) (stored []taken) {
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
	ctx, cancel := context.WithTimeout(r.Context(), answerWithin)
	defer cancel()
	if err := t.signed.Before(r.Header, time.Now()); t.socket || err != nil {
		http.Error(w, "the request is not signed", http.StatusUnauthorized)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, "the body is too large, or ended", http.StatusRequestEntityTooLarge)
		return
	}
	if err := t.signed.Verify(r.Header, body, time.Now()); err != nil {
		http.Error(w, "the signature is wrong", http.StatusUnauthorized)
		return
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-www-form-urlencoded") {
		form, err := url.ParseQuery(string(body))
		if err != nil || form.Get("payload") == "" {
			w.WriteHeader(http.StatusOK) // a command: there is none
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

// payload is Slack's payload: an event, or a click.
type payload struct {
	Type      string `json:"type"`
	TeamID    string `json:"team_id"`
	Event     event  `json:"event"`
	TriggerID string `json:"trigger_id"`
	User      struct {
		ID     string `json:"id"`
		TeamID string `json:"team_id"`
	} `json:"user"`
	Container struct {
		MessageTS string `json:"message_ts"`
		ThreadTS  string `json:"thread_ts"`
		ChannelID string `json:"channel_id"`
	} `json:"container"`
	Message struct {
		ThreadTS string `json:"thread_ts"`
	} `json:"message"`
	Actions []struct {
		ActionID string `json:"action_id"`
		Value    string `json:"value"`
		ActionTS string `json:"action_ts"`
	} `json:"actions"`
}

// event is a message in an event.
type event struct {
	Type        string `json:"type"`
	Subtype     string `json:"subtype"`
	Channel     string `json:"channel"`
	ChannelType string `json:"channel_type"`
	User        string `json:"user"`
	UserTeam    string `json:"user_team"`
	BotID       string `json:"bot_id"`
	Text        string `json:"text"`
	TS          string `json:"ts"`
	ThreadTS    string `json:"thread_ts"`
	Files       []struct {
		ID       string `json:"id"`
		Name     string `json:"name"`
		Mimetype string `json:"mimetype"`
		Size     int64  `json:"size"`
	} `json:"files"`
}

// clickRef is the data for the answer to a click.
type clickRef struct {
	Channel string `json:"c"`
	Thread  string `json:"t,omitempty"`
	User    string `json:"u"`
}

// store commits a payload. It ignores payloads that are not for the bot.
func (t *Transport) store(ctx context.Context, raw []byte, in channels.Inbox) error {
	me, err := t.self(ctx)
	if err != nil {
		return err
	}
	var p payload
	if err := json.Unmarshal(raw, &p); err != nil {
		t.log.WarnContext(ctx, "message of Slack not understood", "error", err)
		return nil
	}
	switch p.Type {
	case "event_callback":
		m, is, err := message(ctx, p, me, in)
		if err != nil || !is {
			return err
		}
		return in.Receive(ctx, "", m)
	case "block_actions":
		if m, is := click(p, me); is {
			return in.Receive(ctx, "", m)
		}
	}
	return nil
}

// message returns the message of an event, if it is for the bot.
func message(
	ctx context.Context, p payload, me *slack.AuthTestResponse, in channels.Inbox,
) (channels.Incoming, bool, error) {
	e := p.Event
	direct := e.ChannelType == "im"
	switch {
	case e.Type != "message" && e.Type != "app_mention",
		!slices.Contains([]string{"", "file_share", "thread_broadcast"}, e.Subtype),
		e.User == "" || e.User == me.UserID || e.BotID != "", e.Channel == "" || e.TS == "":
		return channels.Incoming{}, false, nil
	}
	conversation := e.Channel
	switch {
	case e.ThreadTS != "":
		conversation += ":" + e.ThreadTS
	case !direct:
		conversation += ":" + e.TS
	}
	if !direct && e.Type != "app_mention" && !strings.Contains(e.Text, "<@"+me.UserID+">") {
		known, err := false, error(nil)
		if e.ThreadTS != "" {
			known, err = in.Known(ctx, conversation)
		}
		if err != nil || !known {
			return channels.Incoming{}, false, err
		}
	}
	m := channels.Incoming{
		ExternalID: p.TeamID + ":" + e.Channel + ":" + e.TS, MessageRef: e.Channel + ":" + e.TS,
		Conversation: conversation, Sender: sender(e.UserTeam, e.User, me), Text: plain(e.Text, me.UserID),
	}
	for _, f := range e.Files {
		m.Files = append(m.Files, channels.File{ID: f.ID, Name: f.Name, Type: f.Mimetype, Size: f.Size})
	}
	return m, true, nil
}

// sender names a person. A person of another workspace never equals one of ours.
func sender(team, user string, me *slack.AuthTestResponse) string {
	if team == "" || team == me.TeamID {
		return user
	}
	return team + "/" + user
}

// click returns the press of a button.
func click(p payload, me *slack.AuthTestResponse) (channels.Incoming, bool) {
	if len(p.Actions) == 0 || !strings.HasPrefix(p.Actions[0].ActionID, "lanekeeper:") || p.User.ID == "" {
		return channels.Incoming{}, false
	}
	a, at := p.Actions[0], p.Container
	thread := cmp.Or(at.ThreadTS, p.Message.ThreadTS)
	if thread == at.MessageTS { // the message is not in a thread, it began one
		thread = ""
	}
	conversation := at.ChannelID
	if thread != "" {
		conversation += ":" + thread
	}
	ref, err := json.Marshal(clickRef{Channel: at.ChannelID, Thread: thread, User: p.User.ID})
	if err != nil {
		return channels.Incoming{}, false
	}
	return channels.Incoming{
		ExternalID: "click:" + p.User.ID + ":" + p.TriggerID + ":" + a.ActionTS, Conversation: conversation,
		Sender: sender(p.User.TeamID, p.User.ID, me), Click: a.Value, Ref: string(ref),
		MessageRef: at.ChannelID + ":" + at.MessageTS,
	}, true
}
