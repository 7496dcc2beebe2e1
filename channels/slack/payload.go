package slack

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"strings"

	"github.com/slack-go/slack"

	"github.com/lanekeeper/lanekeeper/channels"
)

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

// clickRef is the data that [Transport.Acknowledge] needs to answer a click.
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
		m, ok, err := message(ctx, p, me, in)
		if err != nil || !ok {
			return err
		}
		return in.Receive(ctx, "", m)
	case "block_actions":
		if m, ok := click(p, me); ok {
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

// sender names a person. The name of a person of another workspace has that workspace in front.
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
	a, container := p.Actions[0], p.Container
	thread := cmp.Or(container.ThreadTS, p.Message.ThreadTS)
	if thread == container.MessageTS { // the message is the root of a thread, not in one
		thread = ""
	}
	conversation := container.ChannelID
	if thread != "" {
		conversation += ":" + thread
	}
	ref, err := json.Marshal(clickRef{Channel: container.ChannelID, Thread: thread, User: p.User.ID})
	if err != nil {
		return channels.Incoming{}, false
	}
	return channels.Incoming{
		ExternalID: "click:" + p.User.ID + ":" + p.TriggerID + ":" + a.ActionTS, Conversation: conversation,
		Sender: sender(p.User.TeamID, p.User.ID, me), Click: a.Value, Ref: string(ref),
		MessageRef: container.ChannelID + ":" + container.MessageTS,
	}, true
}
