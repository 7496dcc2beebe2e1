package telegram

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/channels"
)

// Send sends a message. In groups, whose ids begin with -, it is a reply: several people may have written.
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

// Edit replaces the text and the buttons of a message. Without buttons in m, the message has none afterwards.
func (t *transport) Edit(ctx context.Context, externalID string, m channels.Message) error {
	p := address(m.Conversation)
	delete(p, "message_thread_id")
	content(p, m)
	p["message_id"] = json.Number(externalID)
	err := t.callText(ctx, "editMessageText", p, m, nil)
	if refused, ok := errors.AsType[*apiError](err); ok && strings.Contains(refused.Description, "is not modified") {
		return nil // a repeated edit
	}
	return err
}

// callText is call with two fallbacks. It follows a group that has become a supergroup. It sends plain text if Telegram
// cannot parse the markup, or if the markup leaves no text or makes it too long. A message with buttons does not move:
// its buttons are valid only in the declared conversation.
func (t *transport) callText(ctx context.Context, method string, p map[string]any, m channels.Message, into any) error {
	err := t.call(ctx, method, p, into)
	if refused, ok := errors.AsType[*apiError](err); ok && refused.MovedTo != 0 && len(m.Buttons) == 0 {
		p["chat_id"] = refused.MovedTo
		err = t.call(ctx, method, p, into)
	}
	if refused, ok := errors.AsType[*apiError](err); ok && plainFits(refused) {
		delete(p, "parse_mode")
		p["text"] = m.Markdown
		err = t.call(ctx, method, p, into)
	}
	return err
}

// plainFits reports an error that the text without markup avoids.
func plainFits(refused *apiError) bool {
	return slices.ContainsFunc([]string{"can't parse entities", "text is empty", "is too long"},
		func(reason string) bool { return strings.Contains(refused.Description, reason) })
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

// Typing shows that the bot is typing, for about five seconds.
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
