package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/channels"
)

// maxSenders bounds the senders and the lost messages of the page.
const maxSenders = 100

// channelsPage lists channels, their senders, and messages whose delivery is unknown.
func (room *Room) channelsPage() page {
	return page{
		path: "/channels", name: "channels", navLabel: "Channels", title: "Channels",
		parts: []part{
			{name: "list", interval: 2 * time.Second, load: room.channelList},
			{name: "senders", interval: 5 * time.Second, load: room.channelSenders},
			{name: "lost", interval: 5 * time.Second, load: room.channelLost},
		},
	}
}

func (room *Room) channelList(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := channels.List(ctx, room.Read)
	return map[string]any{"Channels": list}, err
}

func (room *Room) channelSenders(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := channels.Identities(ctx, room.Read, maxSenders+1)
	list, more := firstN(list, maxSenders)
	return map[string]any{"Senders": list, "More": more}, err
}

func (room *Room) channelLost(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := channels.Sends(ctx, room.Read, channels.SendFilter{Limit: maxSenders + 1})
	list, more := firstN(list, maxSenders)
	return map[string]any{"Sends": list, "More": more}, err
}
