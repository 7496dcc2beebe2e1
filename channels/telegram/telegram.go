// Package telegram is the transport of Telegram bots, over the Bot API. It polls, which needs no public address, or
// receives requests of Telegram. An update is acknowledged after it was committed. The token is part of each URL, so no
// error shows a URL.
package telegram

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

const (
	apiURL       = "https://api.telegram.org"
	pollSeconds  = 25
	callTimeout  = 20 * time.Second
	maxAnswer    = 8 << 20
	maxUpdate    = 1 << 20
	textLimit    = 4000 // Telegram accepts 4096; markup may add line breaks
	cursorLife   = 6 * 24 * time.Hour
	hookInterval = time.Minute
)

// transport is a bot.
type transport struct {
	config channels.Config
	token  string
	base   string
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
	id, _, _ := strings.Cut(t.token, ":")
	return "telegram:" + id, nil
}

// update is an update of the Bot API, with the fields that this package reads.
type update struct {
	ID      int64     `json:"update_id"`
	Message *message  `json:"message"`
	Click   *callback `json:"callback_query"`
}

type message struct {
	ID       int64  `json:"message_id"`
	Topic    int64  `json:"message_thread_id"`
	IsTopic  bool   `json:"is_topic_message"`
	From     *user  `json:"from"`
	Chat     chat   `json:"chat"`
	Text     string `json:"text"`
	Caption  string `json:"caption"`
	Photo    []file `json:"photo"` // sizes of one photo, the largest last
	Document *file  `json:"document"`
}

type user struct {
	ID       int64  `json:"id"`
	IsBot    bool   `json:"is_bot"`
	First    string `json:"first_name"`
	Last     string `json:"last_name"`
	Username string `json:"username"`
}

type chat struct {
	ID int64 `json:"id"`
}

type file struct {
	ID   string `json:"file_id"`
	Name string `json:"file_name"`
	Type string `json:"mime_type"`
	Size int64  `json:"file_size"`
	Path string `json:"file_path"`
}

type callback struct {
	ID      string   `json:"id"`
	From    user     `json:"from"`
	Message *message `json:"message"`
	Data    string   `json:"data"`
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
	offset, err := strconv.ParseInt(cmp.Or(cursor, "0"), 10, 64)
	if err != nil {
		offset = 0
	}
	in.Connected(ctx)
	received := time.Now().Add(-age)
	for ctx.Err() == nil {
		if time.Since(received) > cursorLife { // ids are random after an idle week
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

// poll gets the next updates. It commits them with the next offset; the request for that offset acknowledges them.
func (t *transport) poll(ctx context.Context, in channels.Inbox, offset int64) (int64, error) {
	ask := map[string]any{"timeout": pollSeconds, "limit": 100, "allowed_updates": []string{"message", "callback_query"}}
	if offset > 0 {
		ask["offset"] = offset
	}
	var updates []update
	if err := t.call(ctx, "getUpdates", ask, &updates); err != nil {
		return offset, err
	}
	if len(updates) == 0 {
		return offset, nil
	}
	slices.SortStableFunc(updates, func(a, b update) int { return cmp.Compare(a.ID, b.ID) })
	offset = updates[len(updates)-1].ID + 1
	return offset, in.Receive(ctx, strconv.FormatInt(offset, 10), incoming(updates...)...)
}

// watchHook asks Telegram whether its requests arrive.
func (t *transport) watchHook(ctx context.Context, in channels.Inbox) error {
	for ctx.Err() == nil {
		var info struct {
			URL     string `json:"url"`
			Pending int    `json:"pending_update_count"`
			ErrorAt int64  `json:"last_error_date"`
			Error   string `json:"last_error_message"`
		}
		if err := t.call(ctx, "getWebhookInfo", map[string]any{}, &info); err != nil {
			return err
		}
		switch {
		case info.URL == "":
			return fmt.Errorf("%w: the bot has no webhook; set one for /channels/%s with setWebhook and the secret_token",
				channels.ErrMisconfigured, t.config.Channel.Name)
		case info.Pending > 0 && info.Error != "":
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
	given, want := sha256.Sum256([]byte(r.Header.Get("X-Telegram-Bot-Api-Secret-Token"))), sha256.Sum256([]byte(secret))
	if secret == "" || t.config.Channel.Settings["mode"] != "webhook" ||
		subtle.ConstantTimeCompare(given[:], want[:]) != 1 {
		http.Error(w, "the secret token is wrong", http.StatusUnauthorized)
		return
	}
	var u update
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxUpdate)).Decode(&u); err != nil {
		http.Error(w, "the body is no update", http.StatusBadRequest)
		return
	}
	if err := in.Receive(r.Context(), "", incoming(u)...); err != nil {
		t.config.Logger.WarnContext(r.Context(), "update not stored, Telegram sends it again", "channel",
			t.config.Channel.Name, "error", err)
		http.Error(w, "not stored", http.StatusServiceUnavailable)
		return
	}
	in.Connected(r.Context())
}

// incoming converts updates. It omits messages of bots and messages without a sender.
func incoming(updates ...update) (list []channels.Incoming) {
	for _, u := range updates {
		switch {
		case u.Click != nil && u.Click.Message != nil:
			m := u.Click.Message
			list = append(list, channels.Incoming{
				ExternalID: "click " + u.Click.ID, Conversation: m.conversation(), Sender: id(u.Click.From.ID),
				SenderName: u.Click.From.name(), Click: u.Click.Data, Ref: u.Click.ID, MessageRef: id(m.ID),
			})
		case u.Message != nil && u.Message.From != nil && !u.Message.From.IsBot:
			m := u.Message
			in := channels.Incoming{
				ExternalID: "message " + id(m.Chat.ID) + ":" + id(m.ID), Conversation: m.conversation(), Sender: id(m.From.ID),
				SenderName: m.From.name(), Text: cmp.Or(m.Text, m.Caption), MessageRef: id(m.ID),
			}
			if n := len(m.Photo); n > 0 {
				p := m.Photo[n-1]
				in.Files = append(in.Files, channels.File{ID: p.ID, Name: "photo.jpg", Type: "image/jpeg", Size: p.Size})
			}
			if d := m.Document; d != nil {
				in.Files = append(in.Files, channels.File{ID: d.ID, Name: cmp.Or(d.Name, "document"), Type: d.Type, Size: d.Size})
			}
			list = append(list, in)
		}
	}
	return list
}

func id(n int64) string { return strconv.FormatInt(n, 10) }

// conversation is the chat, with its topic in a forum.
func (m *message) conversation() string {
	if m.IsTopic {
		return id(m.Chat.ID) + "/" + id(m.Topic)
	}
	return id(m.Chat.ID)
}

func (u user) name() string {
	return cmp.Or(strings.TrimSpace(u.First+" "+u.Last), u.Username)
}

// address returns the parameters that name a conversation.
func address(conversation string) map[string]any {
	chat, topic, isTopic := strings.Cut(conversation, "/")
	p := map[string]any{"chat_id": json.Number(chat)}
	if _, err := strconv.ParseInt(chat, 10, 64); err != nil {
		p["chat_id"] = chat // @channelusername
	}
	if n, err := strconv.ParseInt(topic, 10, 64); isTopic && err == nil {
		p["message_thread_id"] = n
	}
	return p
}

// content adds the text of a message as HTML, and its buttons.
func content(p map[string]any, m channels.Message) {
	p["text"], p["parse_mode"] = HTML(m.Markdown), "HTML"
	p["link_preview_options"] = map[string]bool{"is_disabled": true}
	row := []map[string]string{}
	for _, b := range m.Buttons {
		row = append(row, map[string]string{"text": b.Label, "callback_data": b.Nonce})
	}
	if len(row) > 0 {
		p["reply_markup"] = map[string]any{"inline_keyboard": [][]map[string]string{row}}
	}
}

// Send sends a message.
func (t *transport) Send(ctx context.Context, m channels.Message) (string, error) {
	p := address(m.Conversation)
	content(p, m)
	if n, err := strconv.ParseInt(m.ReplyTo, 10, 64); err == nil && m.Part == 0 && strings.HasPrefix(m.Conversation, "-") {
		p["reply_parameters"] = map[string]any{"message_id": n, "allow_sending_without_reply": true}
	}
	var sent message
	if err := t.callText(ctx, "sendMessage", p, m, &sent); err != nil {
		return "", err
	}
	return id(sent.ID), nil
}

// Edit replaces the text of a message, and removes its buttons.
func (t *transport) Edit(ctx context.Context, externalID string, m channels.Message) error {
	p := address(m.Conversation)
	delete(p, "message_thread_id")
	content(p, m)
	p["message_id"] = json.Number(externalID)
	err := t.callText(ctx, "editMessageText", p, m, nil)
	if refused, is := errors.AsType[*apiError](err); is && strings.Contains(refused.Description, "is not modified") {
		return nil
	}
	return err
}

// callText is call with two retries: as plain text if Telegram cannot parse the markup, and to the supergroup that a
// group has become. Buttons do not move, because they work in the conversation for reports only.
func (t *transport) callText(ctx context.Context, method string, p map[string]any, m channels.Message, into any) error {
	err := t.call(ctx, method, p, into)
	if refused, is := errors.AsType[*apiError](err); is && refused.MovedTo != 0 && len(m.Buttons) == 0 {
		p["chat_id"] = refused.MovedTo
		err = t.call(ctx, method, p, into)
	}
	if refused, is := errors.AsType[*apiError](err); is && strings.Contains(refused.Description, "can't parse entities") {
		delete(p, "parse_mode")
		p["text"] = m.Markdown
		err = t.call(ctx, method, p, into)
	}
	return err
}

// Typing shows that the bot types.
func (t *transport) Typing(ctx context.Context, conversation string) error {
	p := address(conversation)
	p["action"] = "typing"
	return t.call(ctx, "sendChatAction", p, nil)
}

// maxNotice bounds the answer to a click, in characters.
const maxNotice = 190

// Acknowledge answers a click with a notice.
func (t *transport) Acknowledge(ctx context.Context, click channels.Incoming, text string) error {
	if letters := []rune(text); len(letters) > maxNotice {
		text = string(letters[:maxNotice]) + "…"
	}
	return t.call(ctx, "answerCallbackQuery", map[string]any{
		"callback_query_id": click.Ref, "text": text, "show_alert": true,
	}, nil)
}

// Fetch reads a file.
func (t *transport) Fetch(ctx context.Context, f channels.File, limit int64) ([]byte, error) {
	if f.Size > limit {
		return nil, fmt.Errorf("the file has %d bytes, more than %d", f.Size, limit)
	}
	var found file
	if err := t.call(ctx, "getFile", map[string]any{"file_id": f.ID}, &found); err != nil {
		return nil, err
	}
	if found.Path == "" || strings.Contains(found.Path, "..") {
		return nil, errors.New("telegram names no file")
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, t.base+"/file/bot"+t.token+"/"+found.Path, http.NoBody)
	if err != nil {
		return nil, t.hide(err)
	}
	answer, err := t.config.Client.Do(r)
	if err != nil {
		return nil, t.hide(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("telegram answered %d for the file", answer.StatusCode)
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("the file has more than %d bytes", limit)
	}
	return data, t.hide(err)
}

// apiError is a refusal of the Bot API.
type apiError struct {
	Code        int
	Description string
	MovedTo     int64 // the supergroup that a group has become
}

func (e *apiError) Error() string {
	text := fmt.Sprintf("telegram answered %d: %s", e.Code, e.Description)
	if e.MovedTo != 0 {
		text += fmt.Sprintf("; its id is %d now: write that into report_to", e.MovedTo)
	}
	return text
}

// hide removes the URL, which has the token, from an error.
func (t *transport) hide(err error) error {
	if err == nil {
		return nil
	}
	if u, is := errors.AsType[*url.Error](err); is {
		err = u.Err
	}
	if strings.Contains(err.Error(), t.token) {
		return errors.New(strings.ReplaceAll(err.Error(), t.token, "TOKEN"))
	}
	return err
}

// call calls a method. Its error is a [channels.SendError] with the fate of the request.
func (t *transport) call(ctx context.Context, method string, parameters map[string]any, into any) error {
	timeout := callTimeout
	if method == "getUpdates" {
		timeout += pollSeconds * time.Second
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := json.Marshal(parameters)
	if err != nil {
		return channels.NotSent(fmt.Errorf("encode %s: %w", method, err))
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, t.base+"/bot"+t.token+"/"+method, bytes.NewReader(body))
	if err != nil {
		return channels.NotSent(t.hide(err))
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := t.config.Client.Do(r)
	if err != nil {
		dial, is := errors.AsType[*net.OpError](err)
		return &channels.SendError{
			Err: fmt.Errorf("call %s: %w", method, t.hide(err)), MaybeSent: !is || dial.Op != "dial",
		}
	}
	defer answer.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return &channels.SendError{Err: fmt.Errorf("read answer to %s: %w", method, t.hide(err)), MaybeSent: true}
	}
	var got struct {
		OK          bool            `json:"ok"`
		Result      json.RawMessage `json:"result"`
		Code        int             `json:"error_code"`
		Description string          `json:"description"`
		Parameters  struct {
			RetryAfter int   `json:"retry_after"`
			MovedTo    int64 `json:"migrate_to_chat_id"`
		} `json:"parameters"`
	}
	if err := json.Unmarshal(raw, &got); err != nil {
		return &channels.SendError{
			Err: fmt.Errorf("telegram answered %d to %s, and no JSON", answer.StatusCode, method), MaybeSent: true,
		}
	}
	if !got.OK {
		refused := &apiError{cmp.Or(got.Code, answer.StatusCode), got.Description, got.Parameters.MovedTo}
		return refusal(refused, got.Parameters.RetryAfter)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(got.Result, into); err != nil {
		return &channels.SendError{Err: fmt.Errorf("read result of %s: %w", method, err), MaybeSent: true}
	}
	return nil
}

// refusal converts a refusal of the Bot API.
func refusal(refused *apiError, retryAfter int) error {
	e, code := &channels.SendError{Err: refused}, refused.Code
	switch {
	case code == http.StatusTooManyRequests:
		e.RetryAfter = time.Duration(max(retryAfter, 1)) * time.Second
	case code == http.StatusUnauthorized || code == http.StatusNotFound && refused.Description == "Not Found":
		e.Err = fmt.Errorf("%w: Telegram does not know this token (%w)", channels.ErrMisconfigured, e.Err) // no "token:"
	case code == http.StatusConflict:
		e.Err = fmt.Errorf("%w: another program polls this bot, or has set a webhook: %w", channels.ErrMisconfigured, e.Err)
	case code >= http.StatusInternalServerError:
		e.MaybeSent = true
	default:
		e.Permanent = true
	}
	return e
}
