// Package slack is the transport of Slack channels: Socket Mode or Events API in, Web API out.
//
// A message is acknowledged after it is committed. Its id is (team, channel, time stamp): retries of an event, and the
// two events of a mention, have the same. The package does not read the header that counts retries.
//
// The bot answers direct messages, mentions, and replies in the threads that it was brought into. A conversation is a
// thread of Slack, or a direct message outside of threads. It does not answer other bots, so two bots cannot keep each
// other busy.
//
// Slack has no idempotent send. A message carries our id as metadata, and before a repeated send the package reads its
// thread ([Transport.Find]). Text is rendered as mrkdwn with all foreign text escaped: it has no mention and no hidden
// link. Links are not unfurled.
//
// A person is a user id of the app's workspace. A user of another workspace, in a shared channel, has that workspace in
// front (T2/U1), and so never equals a linked one.
package slack

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/slack-go/slack"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/signature"
)

// metadataType marks the metadata of our messages.
const metadataType = "lanekeeper_message"

// Transport is the connection to one workspace.
type Transport struct {
	api    *slack.Client
	client *http.Client
	log    logger
	socket bool
	signed signature.Verifier

	mu        sync.Mutex
	identity  *slack.AuthTestResponse
	noStatus  atomic.Bool // Slack refused to show that the agent writes an answer
	pingEvery time.Duration
	probe     time.Duration
}

// Open opens a transport. It implements [channels.Open].
func Open(c channels.Config) (channels.Transport, error) {
	if missing := map[bool]string{true: "app_token", false: "signing_secret"}[socketMode(c)]; c.Secrets[missing] == "" {
		return nil, fmt.Errorf("%w: the secret %s is not set", channels.ErrMisconfigured, missing)
	}
	client := cmp.Or(c.Client, http.DefaultClient)
	options := []slack.Option{slack.OptionHTTPClient(client), slack.OptionAppLevelToken(c.Secrets["app_token"])}
	if base := c.Channel.Settings["base_url"]; base != "" {
		options = append(options, slack.OptionAPIURL(strings.TrimSuffix(base, "/")+"/api/"))
	}
	return &Transport{
		api: slack.New(c.Secrets["token"], options...), client: client, log: logger{c.Logger}, socket: socketMode(c),
		signed: signature.Verifier{
			Scheme: signature.HMAC, Secrets: []string{c.Secrets["signing_secret"]},
			Layout: signature.Layout{
				Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
				Signed: "v0:{timestamp}:{body}",
			},
		},
		pingEvery: 30 * time.Second, probe: 30 * time.Second,
	}, nil
}

func socketMode(c channels.Config) bool { return c.Channel.Settings["mode"] != "events" }

// Limits implements [channels.Transport]. Slack takes about one change of a message a second.
func (t *Transport) Limits() channels.Limits {
	return channels.Limits{Text: maxPart, Length: length, Edits: 1500 * time.Millisecond, Buttons: true}
}

// Issuer implements [channels.Transport].
func (t *Transport) Issuer(ctx context.Context) (string, error) {
	me, err := t.self(ctx)
	if err != nil {
		return "", err
	}
	return "slack:" + me.TeamID, nil
}

// self returns the bot's identity. It asks Slack once.
func (t *Transport) self(ctx context.Context) (*slack.AuthTestResponse, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.identity == nil {
		me, err := t.api.AuthTestContext(ctx)
		if err != nil {
			return nil, fmt.Errorf("log in at Slack: %w", classify(err)) // not "auth.test:", whose value is redacted
		}
		t.identity = me
	}
	return t.identity, nil
}

// place is the place of a conversation.
type place struct{ channel, thread string }

func placeOf(conversation string) place {
	channel, thread, _ := strings.Cut(conversation, ":")
	return place{channel, thread}
}

// Send implements [channels.Transport].
func (t *Transport) Send(ctx context.Context, m channels.Message) (string, error) {
	to := placeOf(m.Conversation)
	options := content(m)
	if to.thread != "" {
		options = append(options, slack.MsgOptionTS(to.thread))
	}
	channel, ts, err := t.api.PostMessageContext(ctx, to.channel, options...)
	if err != nil {
		return "", classify(err)
	}
	return channel + ":" + ts, nil
}

// Edit implements [channels.Editor].
func (t *Transport) Edit(ctx context.Context, externalID string, m channels.Message) error {
	channel, ts, _ := strings.Cut(externalID, ":")
	if _, _, _, err := t.api.UpdateMessageContext(ctx, channel, ts, content(m)...); err != nil {
		return classify(err)
	}
	return nil
}

// content renders a message: blocks, and a plain text for notifications and clients without blocks.
func content(m channels.Message) []slack.MsgOption {
	var blocks []slack.Block
	texts := sections(m.Markdown)
	for _, text := range texts {
		blocks = append(blocks, slack.NewSectionBlock(slack.NewTextBlockObject(slack.MarkdownType, text, false, false),
			nil, nil, slack.SectionBlockOptionExpand(true)))
	}
	if len(m.Buttons) > 0 {
		var elements []slack.BlockElement
		for i, b := range m.Buttons {
			elements = append(elements, slack.NewButtonBlockElement(fmt.Sprintf("lanekeeper:%d", i), b.Nonce,
				slack.NewTextBlockObject(slack.PlainTextType, short(b.Label, 75), false, false)))
		}
		blocks = append(blocks, slack.NewActionBlock("lanekeeper", elements...))
	}
	return []slack.MsgOption{
		slack.MsgOptionText(cmp.Or(strings.Join(texts, "\n"), "…"), false), slack.MsgOptionBlocks(blocks...),
		slack.MsgOptionDisableLinkUnfurl(), slack.MsgOptionDisableMediaUnfurl(),
		slack.MsgOptionMetadata(slack.SlackMetadata{
			EventType: metadataType, EventPayload: map[string]any{"id": m.ID, "part": m.Part},
		}),
	}
}

func short(text string, n int) string {
	if runes := []rune(text); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return text
}

// Find implements [channels.Finder]: it reads the thread, or the latest messages outside of threads. Only messages of
// the bot count, because others could copy the metadata.
func (t *Transport) Find(ctx context.Context, m channels.Message) (string, bool, error) {
	me, err := t.self(ctx)
	if err != nil {
		return "", false, err
	}
	const pages, size = 5, 200
	at, cursor := placeOf(m.Conversation), ""
	for range pages {
		got, next, err := t.read(ctx, at, cursor, size)
		if err != nil {
			return "", false, err
		}
		for _, one := range got {
			id, part := one.Metadata.EventPayload["id"], fmt.Sprint(one.Metadata.EventPayload["part"])
			ours := one.User == me.UserID || one.BotID != "" && one.BotID == me.BotID
			if ours && one.Metadata.EventType == metadataType && id == m.ID && part == fmt.Sprint(m.Part) {
				return at.channel + ":" + one.Timestamp, true, nil
			}
		}
		if cursor = next; cursor == "" {
			return "", false, nil
		}
	}
	return "", false, errors.New("the conversation is too long to be read back")
}

// read reads a page of a conversation.
func (t *Transport) read(ctx context.Context, at place, cursor string, size int) ([]slack.Message, string, error) {
	if at.thread != "" {
		got, _, next, err := t.api.GetConversationRepliesContext(ctx, &slack.GetConversationRepliesParameters{
			ChannelID: at.channel, Timestamp: at.thread, Cursor: cursor, Limit: size, IncludeAllMetadata: true,
		})
		if err != nil {
			return nil, "", classify(err)
		}
		return got, next, nil
	}
	got, err := t.api.GetConversationHistoryContext(ctx, &slack.GetConversationHistoryParameters{
		ChannelID: at.channel, Cursor: cursor, Limit: size, IncludeAllMetadata: true,
	})
	if err != nil {
		return nil, "", classify(err)
	}
	return got.Messages, got.ResponseMetaData.NextCursor, nil
}

// Typing implements [channels.Typist], in threads of an app that Slack permits to show it.
func (t *Transport) Typing(ctx context.Context, conversation string) error {
	at := placeOf(conversation)
	if at.thread == "" || t.noStatus.Load() {
		return nil
	}
	err := t.api.SetAssistantThreadsStatusContext(ctx, slack.AssistantThreadsSetStatusParameters{
		ChannelID: at.channel, ThreadTS: at.thread, Status: "is writing…",
	})
	if err == nil {
		return nil
	}
	if refused, is := errors.AsType[slack.SlackErrorResponse](err); is && !unavailable(refused.Err) {
		t.noStatus.Store(true)
	}
	return classify(err)
}

// Acknowledge implements [channels.Acknowledger]: a line that only the person who pressed the button sees.
func (t *Transport) Acknowledge(ctx context.Context, click channels.Incoming, text string) error {
	var ref clickRef
	if err := json.Unmarshal([]byte(click.Ref), &ref); err != nil {
		return fmt.Errorf("acknowledge click: %w", err)
	}
	options := []slack.MsgOption{slack.MsgOptionText(escape(text), false)}
	if ref.Thread != "" {
		options = append(options, slack.MsgOptionTS(ref.Thread))
	}
	if _, err := t.api.PostEphemeralContext(ctx, ref.Channel, ref.User, options...); err != nil {
		return classify(err)
	}
	return nil
}

// Fetch implements [channels.Fetcher]. The address is read now: the token goes to Slack's own hosts only.
func (t *Transport) Fetch(ctx context.Context, f channels.File, limit int64) ([]byte, error) {
	info, _, _, err := t.api.GetFileInfoContext(ctx, f.ID, 0, 0)
	if err != nil {
		return nil, classify(err)
	}
	if info.IsExternal || int64(info.Size) > limit {
		return nil, fmt.Errorf("file %s is stored elsewhere, or has more than %d bytes", f.ID, limit)
	}
	into := &limited{left: limit}
	if err := t.api.GetFileContext(ctx, info.URLPrivate, into); err != nil {
		return nil, fmt.Errorf("read file %s: %w", f.ID, err)
	}
	return into.data, nil
}

// limited reads at most a number of bytes.
type limited struct {
	data []byte
	left int64
}

func (l *limited) Write(p []byte) (int, error) {
	if l.left -= int64(len(p)); l.left < 0 {
		return 0, errors.New("it is too large")
	}
	l.data = append(l.data, p...)
	return len(p), nil
}

// unavailable reports Slack's errors about the service, not the call: the call may have succeeded.
func unavailable(why string) bool {
	return slices.Contains([]string{"internal_error", "fatal_error", "service_unavailable", "request_timeout"}, why)
}

// unauthorized reports errors that an admin must correct.
func unauthorized(why string) bool {
	return slices.Contains([]string{
		"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "missing_scope",
		"not_allowed_token_type", "app_not_installed", "no_permission",
	}, why)
}

// classify describes the outcome of a call.
func classify(err error) error {
	if failed, is := errors.AsType[*url.Error](err); is {
		err = failed.Err // the URL, and "auth.test:" in it, adds nothing
	}
	if limit, is := errors.AsType[*slack.RateLimitedError](err); is {
		return &channels.SendError{Err: err, RetryAfter: max(limit.RetryAfter, time.Second)}
	}
	if refused, is := errors.AsType[slack.SlackErrorResponse](err); is {
		switch {
		case unavailable(refused.Err):
			return &channels.SendError{Err: err, MaybeSent: true}
		case unauthorized(refused.Err):
			return channels.NotSent(fmt.Errorf("%w: Slack answers %s", channels.ErrMisconfigured, refused.Err))
		case refused.Err == "ratelimited" || refused.Err == "rate_limited":
			return &channels.SendError{Err: err, RetryAfter: 30 * time.Second}
		}
		return &channels.SendError{Err: fmt.Errorf("answer of Slack: %s", refused.Err), Permanent: true}
	}
	if status, is := errors.AsType[slack.StatusCodeError](err); is && status.Code < 500 {
		return channels.NotSent(err)
	}
	if dial, is := errors.AsType[*net.OpError](err); is && dial.Op == "dial" {
		return channels.NotSent(err)
	}
	return &channels.SendError{Err: err, MaybeSent: true}
}
