// Package slack is the transport of Slack channels: Socket Mode or Events API in, Web API out.
//
// A message is acknowledged after it is committed. Its id is (team, channel, time stamp). Retries of an event have the
// same id, and so do the message and app_mention events of one mention. So the header X-Slack-Retry-Num is not needed.
//
// The bot answers direct messages, mentions, and replies in the threads that it was brought into. A conversation is a
// thread of Slack, or a direct message outside of threads. It does not answer other bots, so two bots cannot keep each
// other busy.
//
// Slack has no idempotent send. A message carries our id as metadata, and before a repeated send the package reads its
// thread ([Transport.Find]). Text is rendered as mrkdwn with all foreign text escaped: it has no mention and no hidden
// link. Links are not unfurled.
//
// A sender is a user id of the app's workspace. In a shared channel, the sender id of a user of another workspace
// begins with that workspace's id (T2/U1), so it never matches an account of the app's workspace.
package slack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
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
	api        *slack.Client
	client     *http.Client
	log        *slog.Logger
	socketMode bool
	verifier   signature.Verifier // of requests of the Events API

	socketPing    time.Duration // a socket without a ping of Slack for longer is replaced
	pingInterval  time.Duration // pause between calls of auth.test ([Transport.ping])
	statusRefused atomic.Bool   // Slack has refused assistant.threads.setStatus

	identity atomic.Pointer[slack.AuthTestResponse] // nil before the first response
}

// Open opens a transport. It implements [channels.Open].
func Open(c channels.Config) (channels.Transport, error) {
	socketMode, required := true, "app_token"
	if c.Channel.Settings["mode"] == "events" {
		socketMode, required = false, "signing_secret"
	}
	if c.Secrets[required] == "" {
		return nil, fmt.Errorf("%w: the secret %s is not set", channels.ErrMisconfigured, required)
	}
	client := *cmp.Or(c.Client, http.DefaultClient)
	client.Timeout = callTimeout
	options := []slack.Option{slack.OptionHTTPClient(doer{&client}), slack.OptionAppLevelToken(c.Secrets["app_token"])}
	if base := c.Channel.Settings["base_url"]; base != "" {
		options = append(options, slack.OptionAPIURL(strings.TrimSuffix(base, "/")+"/api/"))
	}
	return &Transport{
		api: slack.New(c.Secrets["token"], options...), client: &client, log: c.Logger, socketMode: socketMode,
		verifier: signature.Verifier{
			Scheme: signature.HMAC, Secrets: []string{c.Secrets["signing_secret"]},
			Layout: signature.Layout{
				Header: "X-Slack-Signature", Prefix: "v0=", TimestampHeader: "X-Slack-Request-Timestamp",
				Signed: "v0:{timestamp}:{body}",
			},
		},
		socketPing: 30 * time.Second, pingInterval: 30 * time.Second,
	}, nil
}

// Limits implements [channels.Transport]. Slack allows about one edit of a message a second.
func (t *Transport) Limits() channels.Limits {
	return channels.Limits{Text: maxPart, Length: length, Edits: 1500 * time.Millisecond, Buttons: true}
}

// Issuer implements [channels.Transport].
func (t *Transport) Issuer(ctx context.Context) (string, error) {
	identity, err := t.self(ctx)
	if err != nil {
		return "", err
	}
	return "slack:" + identity.TeamID, nil
}

// self returns the bot's identity. It requests the identity until Slack responds once.
func (t *Transport) self(ctx context.Context) (*slack.AuthTestResponse, error) {
	if identity := t.identity.Load(); identity != nil {
		return identity, nil
	}
	identity, err := t.api.AuthTestContext(ctx)
	if err != nil {
		return nil, fmt.Errorf("log in at Slack: %w", classify(err))
	}
	t.identity.Store(identity)
	return identity, nil
}

// Fetch implements [channels.Fetcher]. It reads the address of the file from Slack and not from the message, because
// the request has the bot's token.
func (t *Transport) Fetch(ctx context.Context, f channels.File, limit int64) ([]byte, error) {
	info, _, _, err := t.api.GetFileInfoContext(ctx, f.ID, 0, 0)
	if err != nil {
		return nil, fmt.Errorf("read file %s: %w", f.ID, classify(err))
	}
	switch {
	case info.IsExternal:
		return nil, fmt.Errorf("file %s is not stored at Slack", f.ID)
	case int64(info.Size) > limit:
		return nil, fmt.Errorf("file %s has more than %d bytes", f.ID, limit)
	}
	buf := &limitedBuffer{left: limit}
	if err := t.api.GetFileContext(ctx, info.URLPrivate, buf); err != nil {
		return nil, fmt.Errorf("read file %s: %w", f.ID, err)
	}
	return buf.data, nil
}

// limitedBuffer collects writes, and fails above a limit of bytes.
type limitedBuffer struct {
	data []byte
	left int64
}

func (b *limitedBuffer) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, errors.New("the file exceeds the limit")
	}
	b.data = append(b.data, p...)
	return len(p), nil
}

// doer sends requests with [channels.Do].
type doer struct{ client *http.Client }

func (c doer) Do(r *http.Request) (*http.Response, error) { return channels.Do(c.client, r) }

// isServiceError reports errors of Slack's service: the call may have succeeded.
func isServiceError(code string) bool {
	return slices.Contains([]string{"internal_error", "fatal_error", "service_unavailable", "request_timeout"}, code)
}

// isConfigError reports errors that an admin must correct.
func isConfigError(code string) bool {
	return slices.Contains([]string{
		"invalid_auth", "not_authed", "account_inactive", "token_revoked", "token_expired", "missing_scope",
		"not_allowed_token_type", "app_not_installed", "no_permission",
	}, code)
}

// classify converts an error of a call to a [channels.SendError]. Its text has neither the URL nor the method's name:
// log redaction takes the text after "auth.test:" for a secret.
func classify(err error) error {
	_, unsent := errors.AsType[*channels.SendError](err) // from doer
	if urlErr, ok := errors.AsType[*url.Error](err); ok {
		err = urlErr.Err
	}
	if limit, ok := errors.AsType[*slack.RateLimitedError](err); ok {
		return &channels.SendError{Err: err, RetryAfter: max(limit.RetryAfter, time.Second)}
	}
	if respErr, ok := errors.AsType[slack.SlackErrorResponse](err); ok {
		switch code := respErr.Err; {
		case isServiceError(code):
			return &channels.SendError{Err: err, MaybeSent: true}
		case isConfigError(code):
			return channels.NotSent(fmt.Errorf("%w: Slack answers %s", channels.ErrMisconfigured, code))
		case code == "ratelimited" || code == "rate_limited":
			return &channels.SendError{Err: err, RetryAfter: 30 * time.Second}
		default:
			return &channels.SendError{Err: fmt.Errorf("answer of Slack: %s", code), Permanent: true}
		}
	}
	if status, ok := errors.AsType[slack.StatusCodeError](err); ok && status.Code < 500 {
		return channels.NotSent(err)
	}
	return &channels.SendError{Err: err, MaybeSent: !unsent}
}
