package slack

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/slack-go/slack"

	"github.com/lanekeeper/lanekeeper/channels"
)

// metadataType marks the metadata of our messages.
const metadataType = "lanekeeper_message"

// Send implements [channels.Transport].
func (t *Transport) Send(ctx context.Context, m channels.Message) (string, error) {
	to := parseAddress(m.Conversation)
	var channel, ts string
	err := withFallback(m, func(options []slack.MsgOption) (err error) {
		if to.thread != "" {
			options = append(options, slack.MsgOptionTS(to.thread))
		}
		channel, ts, err = t.api.PostMessageContext(ctx, to.channel, options...)
		return err
	})
	if err != nil {
		return "", classify(err)
	}
	return channel + ":" + ts, nil
}

// Edit implements [channels.Editor].
func (t *Transport) Edit(ctx context.Context, externalID string, m channels.Message) error {
	channel, ts, _ := strings.Cut(externalID, ":")
	err := withFallback(m, func(options []slack.MsgOption) error {
		_, _, _, err := t.api.UpdateMessageContext(ctx, channel, ts, options...)
		return err
	})
	if err != nil {
		return classify(err)
	}
	return nil
}

// withFallback sends a message without its blocks if Slack refuses these. Buttons are blocks, so a message with buttons
// has no fallback.
func withFallback(m channels.Message, send func(options []slack.MsgOption) error) error {
	err := send(content(m))
	refused, ok := errors.AsType[slack.SlackErrorResponse](err)
	if ok && len(m.Buttons) == 0 && slices.Contains(blockErrors, refused.Err) {
		err = send(append(content(m), slack.MsgOptionBlocks()))
	}
	return err
}

// blockErrors are the errors that a message without blocks may avoid.
var blockErrors = []string{"invalid_blocks", "invalid_blocks_format", "msg_blocks_too_long", "msg_too_long"}

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

// address is the channel of a conversation, and its thread or "".
type address struct{ channel, thread string }

func parseAddress(conversation string) address {
	channel, thread, _ := strings.Cut(conversation, ":")
	return address{channel, thread}
}

// Find implements [channels.Finder]: it reads up to 1,000 messages of the thread, or of the channel outside of threads.
// In a longer conversation it fails. Only messages of the bot count, because others could copy the metadata.
func (t *Transport) Find(ctx context.Context, m channels.Message) (string, bool, error) {
	me, err := t.self(ctx)
	if err != nil {
		return "", false, err
	}
	const pages, size = 5, 200
	from, cursor := parseAddress(m.Conversation), ""
	for range pages {
		list, next, err := t.readPage(ctx, from, cursor, size)
		if err != nil {
			return "", false, err
		}
		for _, one := range list {
			id, part := one.Metadata.EventPayload["id"], fmt.Sprint(one.Metadata.EventPayload["part"])
			ours := one.User == me.UserID || one.BotID != "" && one.BotID == me.BotID
			if ours && one.Metadata.EventType == metadataType && id == m.ID && part == fmt.Sprint(m.Part) {
				return from.channel + ":" + one.Timestamp, true, nil
			}
		}
		if cursor = next; cursor == "" {
			return "", false, nil
		}
	}
	return "", false, errors.New("the conversation is too long to be read back")
}

// readPage returns a page of a conversation, and the cursor of the next page; "" on the last.
func (t *Transport) readPage(
	ctx context.Context, from address, cursor string, size int,
) (list []slack.Message, next string, err error) {
	if from.thread != "" {
		list, _, next, err = t.api.GetConversationRepliesContext(ctx, &slack.GetConversationRepliesParameters{
			ChannelID: from.channel, Timestamp: from.thread, Cursor: cursor, Limit: size, IncludeAllMetadata: true,
		})
		if err != nil {
			return nil, "", classify(err)
		}
		return list, next, nil
	}
	page, err := t.api.GetConversationHistoryContext(ctx, &slack.GetConversationHistoryParameters{
		ChannelID: from.channel, Cursor: cursor, Limit: size, IncludeAllMetadata: true,
	})
	if err != nil {
		return nil, "", classify(err)
	}
	return page.Messages, page.ResponseMetaData.NextCursor, nil
}

// Typing implements [channels.Typist]. Slack shows the status only in threads, and only for some apps. After a refusal,
// Typing does nothing.
func (t *Transport) Typing(ctx context.Context, conversation string) error {
	to := parseAddress(conversation)
	if to.thread == "" || t.statusRefused.Load() {
		return nil
	}
	err := t.api.SetAssistantThreadsStatusContext(ctx, slack.AssistantThreadsSetStatusParameters{
		ChannelID: to.channel, ThreadTS: to.thread, Status: "is writing…",
	})
	if err == nil {
		return nil
	}
	if respErr, ok := errors.AsType[slack.SlackErrorResponse](err); ok && !isServiceError(respErr.Err) {
		t.statusRefused.Store(true)
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
