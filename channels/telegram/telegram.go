// Package telegram is the transport of Telegram bots, over the Bot API. It polls, which needs no public address, or
// receives Telegram's webhook requests. It acknowledges an update after it has committed the update. Each URL contains
// the token, so the package removes URLs from errors.
package telegram

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	apiURL       = "https://api.telegram.org"
	pollSeconds  = 25 // time that Telegram may hold a poll without updates
	callTimeout  = 20 * time.Second
	maxAnswer    = 8 << 20 // bytes of a response
	maxUpdate    = 1 << 20 // bytes of a webhook request
	textLimit    = 4000    // Telegram accepts 4096; markup may add line breaks
	cursorTTL    = 6 * 24 * time.Hour
	hookInterval = time.Minute
	errorMaxAge  = 5 * time.Minute // Telegram repeats a failed request within it
)

// transport is a bot.
type transport struct {
	config channels.Config
	token  string
	base   string
	name   atomic.Pointer[string] // the bot's @name; nil before Telegram's first answer
}

// Open opens a bot.
func Open(c channels.Config) (channels.Transport, error) {
	t := &transport{config: c, token: c.Secrets["token"], base: cmp.Or(c.Channel.Settings["base_url"], apiURL)}
	t.base = strings.TrimRight(t.base, "/")
	if id, _, ok := strings.Cut(t.token, ":"); !ok || id == "" || strings.ContainsAny(t.token, "/?# \n") {
		return nil, fmt.Errorf("%w: the token does not have the form 4711:text that BotFather gives",
			channels.ErrMisconfigured)
	}
	return t, nil
}

func (t *transport) Limits() channels.Limits {
	return channels.Limits{Text: textLimit, Length: channels.UTF16, Edits: 2 * time.Second, Buttons: true}
}

// Issuer names the bot by its id, the public part of the token.
func (t *transport) Issuer(context.Context) (string, error) {
	return "telegram:" + t.bot(), nil
}

func (t *transport) bot() string {
	id, _, _ := strings.Cut(t.token, ":")
	return id
}

// Run polls, or watches the webhook.
func (t *transport) Run(ctx context.Context, in channels.Inbox) error {
	if t.config.Channel.Settings["mode"] == "webhook" {
		return t.watchHook(ctx, in)
	}
	if err := t.call(ctx, "deleteWebhook", map[string]any{"drop_pending_updates": false}, nil); err != nil {
		return err
	}
	cursor, age, err := in.Cursor(ctx)
	if err != nil {
		return err
	}
	offset := t.offset(cursor)
	in.Connected(ctx)
	received := time.Now().Add(-age)
	for ctx.Err() == nil {
		// After a week without updates, Telegram continues with a random id, which may be below the offset.
		if time.Since(received) > cursorTTL {
			offset = 0
		}
		next, err := t.poll(ctx, in, offset)
		if err != nil {
			return err
		}
		if next != offset {
			offset, received = next, time.Now()
		}
		in.Connected(ctx)
	}
	return nil
}

// offset returns the id of the next update, or 0 for a cursor of another bot: each bot counts its own updates. A cursor
// of an earlier release names no bot.
func (t *transport) offset(cursor string) int64 {
	bot, next, named := strings.Cut(cursor, ":")
	if !named {
		next = cursor
	}
	n, err := strconv.ParseInt(next, 10, 64)
	if err != nil || named && bot != t.bot() {
		return 0
	}
	return n
}

// poll gets the next updates. It commits them with the next offset; the request for that offset acknowledges them.
func (t *transport) poll(ctx context.Context, in channels.Inbox, offset int64) (int64, error) {
	parameters := map[string]any{
		"timeout": pollSeconds, "limit": 100, "allowed_updates": []string{"message", "callback_query"},
	}
	if offset > 0 {
		parameters["offset"] = offset
	}
	var updates []update
	if err := t.call(ctx, "getUpdates", parameters, &updates); err != nil {
		return offset, err
	}
	if len(updates) == 0 {
		return offset, nil
	}
	slices.SortStableFunc(updates, func(a, b update) int { return cmp.Compare(a.ID, b.ID) })
	messages, err := t.incoming(ctx, updates...)
	if err != nil {
		return offset, err
	}
	offset = updates[len(updates)-1].ID + 1
	return offset, in.Receive(ctx, t.bot()+":"+id(offset), messages...)
}

// watchHook reads the state of the webhook from Telegram, once in hookInterval.
func (t *transport) watchHook(ctx context.Context, in channels.Inbox) error {
	for ctx.Err() == nil {
		var info struct {
			URL     string `json:"url"`
			Pending int    `json:"pending_update_count"`
			Error   string `json:"last_error_message"` // stays after later successes
			ErrorAt int64  `json:"last_error_date"`
		}
		if err := t.call(ctx, "getWebhookInfo", map[string]any{}, &info); err != nil {
			return err
		}
		switch {
		case info.URL == "":
			return fmt.Errorf("%w: the bot has no webhook; set one for /channels/%s with setWebhook and the secret_token",
				channels.ErrMisconfigured, t.config.Channel.Name)
		case info.Pending > 0 && time.Since(time.Unix(info.ErrorAt, 0)) < errorMaxAge:
			return fmt.Errorf("%d updates wait at Telegram, which says: %s", info.Pending, info.Error)
		}
		in.Connected(ctx)
		select {
		case <-ctx.Done():
		case <-time.After(hookInterval):
		}
	}
	return nil
}

// Hook receives an update from Telegram.
func (t *transport) Hook(w http.ResponseWriter, r *http.Request, in channels.Inbox) {
	secret := t.config.Secrets["webhook"]
	// A comparison of digests takes the same time for secrets of any length.
	got, want := sha256.Sum256([]byte(r.Header.Get("X-Telegram-Bot-Api-Secret-Token"))), sha256.Sum256([]byte(secret))
	if secret == "" || t.config.Channel.Settings["mode"] != "webhook" ||
		subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
		http.Error(w, "the secret token is wrong", http.StatusUnauthorized)
		return
	}
	var u update
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxUpdate)).Decode(&u); err != nil {
		http.Error(w, "the body is no update", http.StatusBadRequest)
		return
	}
	messages, err := t.incoming(r.Context(), u)
	if err == nil {
		err = in.Receive(r.Context(), "", messages...)
	}
	if err != nil {
		t.config.Logger.WarnContext(r.Context(), "update not stored, Telegram sends it again", "channel",
			t.config.Channel.Name, "error", err)
		http.Error(w, "not stored", http.StatusServiceUnavailable)
		return
	}
	in.Connected(r.Context())
}
