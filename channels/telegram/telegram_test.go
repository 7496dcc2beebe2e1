package telegram_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/telegram"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// api answers calls of the Bot API.
type api func(method string, parameters map[string]any) string

func (a api) RoundTrip(r *http.Request) (*http.Response, error) {
	var parameters map[string]any
	if err := json.NewDecoder(r.Body).Decode(&parameters); err != nil {
		return nil, err
	}
	body := a(r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:], parameters)
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body))}, nil
}

func open(t *testing.T, a api) channels.Transport {
	t.Helper()
	transport, err := telegram.Open(channels.Config{
		Secrets: map[string]string{"token": "4711:secret"}, Client: &http.Client{Transport: a},
	})
	require.NoError(t, err)
	return transport
}

// cursors is an inbox with a new cursor.
type cursors struct {
	channels.Inbox
	cursor string
}

func (cursors) Connected(context.Context) {}

func (c cursors) Cursor(context.Context) (string, time.Duration, error) { return c.cursor, 0, nil }

// Telegram drops updates below the offset. After an idle week it starts at a random id. Another bot has other ids.
func TestAnIdleWeekForgetsTheOffset(t *testing.T) {
	t.Parallel()
	for cursor, want := range map[string]string{
		"4711:900": "[900 <nil>]", "900": "[900 <nil>]", "4712:900": "[<nil>]", "": "[<nil>]",
	} {
		t.Run(cursor, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, want, fmt.Sprint(askedOffsets(t, cursor)))
		})
	}
}

// askedOffsets returns the different offsets that a bot asks for in a week without updates.
func askedOffsets(t *testing.T, cursor string) (asked []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithTimeout(t.Context(), 7*24*time.Hour)
		defer stop()
		transport := open(t, func(method string, p map[string]any) string {
			if method != "getUpdates" {
				return `{"ok": true, "result": true}`
			}
			if offset := fmt.Sprint(p["offset"]); len(asked) == 0 || asked[len(asked)-1] != offset {
				asked = append(asked, offset)
			}
			time.Sleep(time.Hour)
			return `{"ok": true, "result": []}`
		})
		require.NoError(t, transport.Run(ctx, cursors{cursor: cursor}))
	})
	return asked
}

// received is an inbox that keeps its messages.
type received struct {
	cursors
	messages *[]channels.Incoming
}

func (r received) Receive(_ context.Context, cursor string, messages ...channels.Incoming) error {
	for _, m := range messages {
		*r.messages = append(*r.messages, channels.Incoming{
			ExternalID: m.ExternalID, Text: m.Text, Ignored: m.Ignored, Raw: m.Raw,
		})
	}
	return errors.New(cursor) // ends the test
}

// An update with an unknown type of a field does not stop the others.
func TestUnreadableUpdateIsIgnored(t *testing.T) {
	t.Parallel()
	const bad, good = `{"update_id": 8, "message": {"message_id": "str"}}`,
		`{"update_id": 9, "message": {"message_id": 2, "from": {"id": 5}, "chat": {"id": 5}, "text": "hello"}}`
	client := &http.Client{Transport: api(func(method string, _ map[string]any) string {
		if method != "getUpdates" {
			return `{"ok": true, "result": true}`
		}
		return `{"ok": true, "result": [` + bad + `, ` + good + `]}`
	})}
	config := channels.Config{
		Secrets: map[string]string{"token": "4711:secret", "webhook": "hook"}, Client: client,
		Logger: slog.New(slog.DiscardHandler),
	}
	transport, err := telegram.Open(config)
	require.NoError(t, err)
	var got []channels.Incoming
	err = transport.Run(t.Context(), received{messages: &got})
	require.Truef(t, err != nil && err.Error() == "4711:10" && len(got) == 2, "cursor %v, %+v", err, got)
	assert.Contains(t, got[0].Ignored, "it cannot be read")
	assert.Equal(t, "update 4711 8", got[0].ExternalID)
	assert.Equal(t, bad, string(got[0].Raw))
	assert.Equal(t, "hello", got[1].Text)

	config.Channel.Settings = map[string]string{"mode": "webhook"}
	transport, err = telegram.Open(config)
	require.NoError(t, err)
	w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "POST", "/", strings.NewReader(bad))
	r.Header.Set("X-Telegram-Bot-Api-Secret-Token", "hook")
	got = nil
	transport.(channels.Hook).Hook(w, r, received{messages: &got})
	require.Truef(t, len(got) == 1, "%d %s %+v", w.Code, w.Body, got)
	assert.Contains(t, got[0].Ignored, "it cannot be read")
}

// The agent gets a line for content that it does not read, so it can tell the sender.
func TestUnreadContentIsNamed(t *testing.T) {
	t.Parallel()
	const from = `"from": {"id": 5}, "chat": {"id": 5}`
	const note = "is missing: the agent reads only text, photos and documents.]"
	transport, err := telegram.Open(channels.Config{
		Secrets: map[string]string{"token": "4711:secret"}, Logger: slog.New(slog.DiscardHandler),
		Client: &http.Client{Transport: api(func(string, map[string]any) string {
			return `{"ok": true, "result": [
				{"update_id": 1, "message": {"message_id": 1, ` + from + `, "voice": {"file_id": "v", "duration": 3}}},
				{"update_id": 2, "message": {"message_id": 2, ` + from + `, "video": {"file_id": "w"}, "caption": "see"}},
				{"update_id": 3, "message": {"message_id": 3, ` + from + `, "pinned_message": {"message_id": 1}}}]}`
		})},
	})
	require.NoError(t, err)
	var got []channels.Incoming
	err = transport.Run(t.Context(), received{messages: &got})
	require.Truef(t, err != nil && err.Error() == "4711:4" && len(got) == 3, "cursor %v, %+v", err, got)
	assert.Equal(t, "[The voice message "+note, got[0].Text)
	assert.Equal(t, "see\n[The video "+note, got[1].Text)
	assert.Equal(t, "", got[2].Text)
}

// In a group, the bot receives replies to it, mentions, and commands that are not for another bot.
func TestInAGroupTheBotIsAddressed(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"hi all": false, "/help@other_bot x": false, "ask @shop_bot2": false,
		"/help": true, "/help@Shop_Bot x": true, "Hi @shop_bot, hello": true, "hi @Shop_bot": true, "a reply": true,
	} {
		reply := ""
		if text == "a reply" {
			reply = `"reply_to_message": {"from": {"id": 4711}},`
		}
		transport := open(t, func(method string, _ map[string]any) string {
			switch method {
			case "getUpdates":
				return fmt.Sprintf(`{"ok": true, "result": [{"update_id": 9, "message": {"message_id": 2, "from": {"id": 5}, %s
					"chat": {"id": -1001}, "text": %q}}]}`, reply, text)
			case "getMe":
				return `{"ok": true, "result": {"id": 4711, "username": "Shop_bot"}}`
			}
			return `{"ok": true, "result": true}`
		})
		var got []channels.Incoming
		err := transport.Run(t.Context(), received{messages: &got})
		require.Equal(t, "4711:10", fmt.Sprint(err), text)
		assert.Equal(t, want, len(got) == 1, text)
	}
}

// A message follows a group that has become a supergroup. The error of a request with buttons names the necessary
// change.
func TestAGroupThatBecameASupergroupIsFollowed(t *testing.T) {
	t.Parallel()
	transport := open(t, func(_ string, p map[string]any) string {
		if fmt.Sprint(p["chat_id"]) == "-5" {
			return `{"ok": false, "error_code": 400, "description": "Bad Request: group chat was upgraded to a supergroup chat",
				"parameters": {"migrate_to_chat_id": -1005}}`
		}
		return `{"ok": true, "result": {"message_id": 7}}`
	})
	id, err := transport.Send(t.Context(), channels.Message{Conversation: "-5", Markdown: "hello"})
	require.NoError(t, err)
	assert.Equal(t, "7", id)
	_, err = transport.Send(t.Context(), channels.Message{
		Conversation: "-5", Markdown: "May I?", Buttons: []channels.Button{{Label: "Approve", Nonce: "n"}},
	})
	assert.Contains(t, fmt.Sprint(err), "its id is -1005 now")
}

func TestTextGoesWithoutItsMarkupIfThatLeavesNoneOrTooMuch(t *testing.T) {
	t.Parallel()
	for _, reason := range []string{"message text is empty", "message is too long"} {
		transport := open(t, func(_ string, p map[string]any) string {
			if p["parse_mode"] != nil {
				return `{"ok": false, "error_code": 400, "description": "Bad Request: ` + reason + `"}`
			}
			return `{"ok": true, "result": {"message_id": 7}}`
		})
		_, err := transport.Send(t.Context(), channels.Message{Conversation: "5", Markdown: "[1]: https://example.com"})
		assert.NoError(t, err, reason)
	}
}

// A busy bot often has an update in flight. That and an old error do not make its webhook fail.
func TestAnOldErrorOfTheWebhookIsPast(t *testing.T) {
	t.Parallel()
	for age, want := range map[time.Duration]string{
		24 * time.Hour: "<nil>", time.Minute: "1 updates wait at Telegram, which says: 503",
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, stop := context.WithTimeout(t.Context(), time.Second)
			defer stop()
			transport, err := telegram.Open(channels.Config{
				Channel: channels.Channel{Settings: map[string]string{"mode": "webhook"}},
				Secrets: map[string]string{"token": "4711:secret"},
				Client: &http.Client{Transport: api(func(string, map[string]any) string {
					return fmt.Sprintf(`{"ok": true, "result": {"url": "https://x.example", "pending_update_count": 1,
						"last_error_message": "503", "last_error_date": %d}}`, time.Now().Add(-age).Unix())
				})},
			})
			require.NoError(t, err)
			assert.Equal(t, want, fmt.Sprint(transport.Run(ctx, cursors{})))
		})
	}
}

func TestUnreadableAnswerMayBeSent(t *testing.T) {
	t.Parallel()
	transport := open(t, func(string, map[string]any) string { return `{"ok": true, "result": true}` })
	_, err := transport.Send(t.Context(), channels.Message{Conversation: "5", Markdown: "hello"})
	failure, is := errors.AsType[*channels.SendError](err)
	require.Truef(t, is && failure.MaybeSent, "%+v", err)
	assert.Equal(t, "telegram's answer to sendMessage cannot be read", err.Error())
}

// An answer certainly did not leave if the TLS handshake failed.
func TestAFailedHandshakeSendsNothing(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.NotFoundHandler()) // the client does not trust its certificate
	t.Cleanup(server.Close)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	transport, err := telegram.Open(channels.Config{
		Channel: channels.Channel{Settings: map[string]string{"base_url": server.URL}},
		Secrets: map[string]string{"token": "4711:secret"}, Client: &http.Client{},
	})
	require.NoError(t, err)
	_, err = transport.Send(t.Context(), channels.Message{Conversation: "5", Markdown: "hello"})
	failure, is := errors.AsType[*channels.SendError](err)
	assert.Truef(t, is && !failure.MaybeSent && !failure.Permanent, "%+v", err)
	assert.True(t, !strings.Contains(err.Error(), "secret"), err)
}
