package engineroom

import (
	"context"

	"github.com/lanekeeper/lanekeeper/prompts"
)

// tracedPrompt is the prompt of a model call, its parts in their order.
type tracedPrompt struct {
	prompts.Call

	List []tracedPart
}

// tracedPart is a message of a prompt, or the definitions of the tools.
type tracedPart struct {
	Digest, Role, Text        string
	Bytes                     int64
	Found, Truncated, TextCut bool
}

// promptOf reads the prompt of a model call. Its texts have at most traceAllText characters together.
func (room *Room) promptOf(ctx context.Context, id, row string) (*tracedPrompt, error) {
	page, err := prompts.Of(ctx, room.Read, id, prompts.Filter{ActivityID: row})
	if err != nil || len(page.Calls) == 0 {
		return nil, err
	}
	p := &tracedPrompt{Call: page.Calls[0]}
	digests := p.Messages
	if p.Tools != nil {
		digests = append([]string{*p.Tools}, digests...)
	}
	left := traceAllText
	for _, digest := range digests {
		part, found := page.Parts[digest]
		shown := tracedPart{Digest: digest, Role: cut(40, part.Role), Found: found, Bytes: int64(part.Bytes), Truncated: part.Truncated}
		if found && part.Role == "" {
			shown.Role = "tools"
		}
		whole := setOut(string(part.Body))
		shown.Text = cut(min(left, traceWhole), whole)
		shown.TextCut = shown.Text != whole
		left = max(left-len(shown.Text), 0)
		p.List = append(p.List, shown)
	}
	return p, nil
}
