package telegram

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/channels"
)

// update is an update of the Bot API, with the fields that this package reads.
type update struct {
	ID      int64     `json:"update_id"`
	Message *message  `json:"message"`
	Click   *callback `json:"callback_query"`
	err     error     // why the rest is not known
	raw     []byte    // the source of an update with an err
}

// UnmarshalJSON reads an update. One with an unknown type of a field has its id, its source and an error, because it
// must not stop the updates after it.
func (u *update) UnmarshalJSON(b []byte) error {
	type fields update
	var id struct {
		ID int64 `json:"update_id"`
	}
	if err := json.Unmarshal(b, &id); err != nil {
		return err
	}
	if err := json.Unmarshal(b, (*fields)(u)); err != nil {
		*u = update{ID: id.ID, err: err, raw: bytes.Clone(b)}
	}
	return nil
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
	Replied  *struct {
		From *user `json:"from"`
	} `json:"reply_to_message"`

	// This package does not read these.
	Voice     json.RawMessage `json:"voice"`
	Audio     json.RawMessage `json:"audio"`
	Video     json.RawMessage `json:"video"`
	VideoNote json.RawMessage `json:"video_note"`
	Sticker   json.RawMessage `json:"sticker"`
	Location  json.RawMessage `json:"location"`
	Contact   json.RawMessage `json:"contact"`
	Poll      json.RawMessage `json:"poll"`
}

// content returns the text, with a line for content that this package does not read.
func (m *message) content() string {
	text := cmp.Or(m.Text, m.Caption)
	for _, unread := range []struct {
		name string
		raw  json.RawMessage
	}{
		{"voice message", m.Voice},
		{"audio file", m.Audio},
		{"video", m.Video},
		{"video message", m.VideoNote},
		{"sticker", m.Sticker},
		{"location", m.Location},
		{"contact", m.Contact},
		{"poll", m.Poll},
	} {
		if len(unread.raw) > 0 {
			line := "[The " + unread.name + " is missing: the agent reads only text, photos and documents.]"
			return strings.TrimSpace(text + "\n" + line)
		}
	}
	return text
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

// incoming converts updates. It ignores those that cannot be read. It omits messages of bots, messages without a
// sender, messages of groups that do not address the bot, and clicks on messages that Telegram no longer has. Each bot
// counts its messages, and a person's chat has the same id with every bot.
func (t *transport) incoming(ctx context.Context, updates ...update) (list []channels.Incoming, err error) {
	for _, u := range updates {
		switch {
		case u.err != nil:
			t.config.Logger.WarnContext(ctx, "update of Telegram ignored",
				"channel", t.config.Channel.Name, "update", u.ID, "error", u.err)
			list = append(list, channels.Incoming{
				ExternalID: "update " + t.bot() + " " + id(u.ID), Ignored: "it cannot be read: " + u.err.Error(), Raw: u.raw,
			})
		case u.Click != nil && u.Click.Message != nil:
			m := u.Click.Message
			list = append(list, channels.Incoming{
				ExternalID: "click " + u.Click.ID, Conversation: m.conversation(), Sender: id(u.Click.From.ID),
				SenderName: u.Click.From.name(), Click: u.Click.Data, Ref: u.Click.ID, MessageRef: id(m.ID),
			})
		case u.Message != nil && u.Message.From != nil && !u.Message.From.IsBot:
			m := u.Message
			if addressed, err := t.addressed(ctx, m); err != nil {
				return nil, err
			} else if !addressed {
				continue
			}
			in := channels.Incoming{
				ExternalID: "message " + t.bot() + " " + id(m.Chat.ID) + ":" + id(m.ID), Conversation: m.conversation(),
				Sender: id(m.From.ID), SenderName: m.From.name(), Text: m.content(), MessageRef: id(m.ID),
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
	return list, nil
}

// addressed reports whether a message is for the bot. In a group, whose id is negative, these are replies to the bot,
// mentions of it, and commands without the name of another bot.
func (t *transport) addressed(ctx context.Context, m *message) (bool, error) {
	if m.Chat.ID > 0 || m.Replied != nil && m.Replied.From != nil && id(m.Replied.From.ID) == t.bot() {
		return true, nil
	}
	text := strings.ToLower(cmp.Or(m.Text, m.Caption))
	name, err := t.username(ctx)
	if err != nil {
		return false, err
	}
	word, _, _ := strings.Cut(strings.Join(strings.Fields(text), " "), " ")
	if command, bot, named := strings.Cut(word, "@"); strings.HasPrefix(command, "/") {
		return !named || bot == name, nil
	}
	for _, after := range strings.Split(text, "@"+name)[1:] {
		if strings.TrimLeft(after, "abcdefghijklmnopqrstuvwxyz0123456789_") == after {
			return true, nil
		}
	}
	return false, nil
}

// username returns the bot's @name in lower case, without the @. It asks Telegram until it has answered once.
func (t *transport) username(ctx context.Context) (string, error) {
	if name := t.name.Load(); name != nil {
		return *name, nil
	}
	var me user
	if err := t.call(ctx, "getMe", map[string]any{}, &me); err != nil {
		return "", err
	}
	name := strings.ToLower(me.Username)
	t.name.Store(&name)
	return name, nil
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
