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
	"errors"
	"fmt"
	"log/slog"
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

// callTimeout bounds each call of the Web API, so a server without an answer does not stop the channel.
const callTimeout = 20 * time.Second

// Transport is the connection to one workspace.
type Transport struct {
	api    *slack.Client
	client *http.Client
	log    *slog.Logger
	socket bool
	signed signature.Verifier

	socketPing   time.Duration // interval of Slack's pings on a socket
	pingInterval time.Duration // interval of ping
	noStatus     atomic.Bool   // Slack refused to show that the agent writes an answer

	mu       sync.Mutex
	identity *slack.AuthTestResponse // nil before the first answer
}

// Open opens a transport. It implements [channels.Open].
func Open(c channels.Config) (channels.Transport, error) {
	if missing := map[bool]string{true: "app_token", false: "signing_secret"}[socketMode(c)]; c.Secrets[missing] == "" {
		return nil, fmt.Errorf("%w: the secret %s is not set", channels.ErrMisconfigured, missing)
	}
	client := *cmp.Or(c.Client, http.DefaultClient)
	client.Timeout = callTimeout
	options := []slack.Option{slack.OptionHTTPClient(&client), slack.OptionAppLevelToken(c.Secrets["app_token"])}
	if base := c.Channel.Settings["base_url"]; base != "" {
		options = append(options, slack.OptionAPIURL(strings.TrimSuffix(base, "/")+"/api/"))
	}
	return &Transport{
		api: slack.New(c.Secrets["token"], options...), client: &client, log: c.Logger, socket: socketMode(c),
		signed: signature.Verifier{
			Scheme: signature.HMAC, Secrets: []string{c.Secrets["signing_secret"]},
			Layout: signature.Layout{
				Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
				Signed: "v0:{timestamp}:{body}",
			},
		},
		socketPing: 30 * time.Second, pingInterval: 30 * time.Second,
	}, nil
}

func socketMode(c channels.Config) bool { return c.Channel.Settings["mode"] != "events" }

// Limits implements [channels.Transport]. Slack allows about one edit of a message a second.
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

// self returns the bot's identity, which Slack reports once per transport.
func (t *Transport) self(ctx context.Context) (*slack.AuthTestResponse, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.identity == nil {
		me, err := t.api.AuthTestContext(ctx)
		if err != nil {
			// Not "auth.test: …": package redact would hide the reason.
			return nil, fmt.Errorf("log in at Slack: %w", classify(err))
		}
		t.identity = me
	}
	return t.identity, nil
}

// Fetch implements [channels.Fetcher]. It reads the address of the file from Slack and not from the message, because
// the request has the bot's token.
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

// unavailable reports errors of Slack's service: the call may have succeeded.
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

// classify converts an error of a call to a [channels.SendError].
func classify(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = failed.Err // without the URL: package redact would hide the text after "auth.test:"
	}
	if limit, ok := errors.AsType[*slack.RateLimitedError](err); ok {
		return &channels.SendError{Err: err, RetryAfter: max(limit.RetryAfter, time.Second)}
	}
	if refused, ok := errors.AsType[slack.SlackErrorResponse](err); ok {
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
	if status, ok := errors.AsType[slack.StatusCodeError](err); ok && status.Code < 500 {
		return channels.NotSent(err)
	}
	if dial, ok := errors.AsType[*net.OpError](err); ok && dial.Op == "dial" {
		return channels.NotSent(err)
	}
	return &channels.SendError{Err: err, MaybeSent: true}
}
