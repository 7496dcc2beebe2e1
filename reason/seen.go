package reason

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/skills"
)

// answer is what a skill has said and the model is about to see.
type answer struct {
	skill skills.Skill
	text  string
	long  *longResult // nil when all of it is shown
	piece string      // what is shown, where the model reads on in a long one
	upto  int         // and where that ends
}

// shownFirst is a skill's answer as the model gets it with its next request. What that shows of the memory counts as
// read from then on, not before: a call of the same reply was decided on without it.
func (w *turn) shownFirst(s skills.Skill, value json.RawMessage) string {
	a := answer{skill: s, text: encode(value)}
	shown := w.bound(a.text)
	a.long = w.longOf(shown)
	w.unseen = append(w.unseen, a)
	return shown
}

// see takes in what the next request shows of the memory, once it fits.
func (w *turn) see() {
	for _, a := range w.unseen {
		long, upto := a.long, len(a.text)
		if long == nil {
			long = w.longText(a.text) // cut since, for want of room
		}
		if long != nil {
			long.skill = a.skill
			if a.piece == "" {
				long.seen = max(long.seen, long.kept)
			} else if w.longText(a.piece) == nil && long.seen < a.upto { // and not cut itself
				long.seen = a.upto
			}
			upto = long.seen
		}
		w.seen.Add(builtins.Sights(a.skill, []byte(a.text), upto)...)
	}
	w.unseen = nil
}

// longOf is the long result that is shown as a text; nil when there is none.
func (w *turn) longOf(shown string) *longResult {
	for _, r := range w.results {
		if r.shown == shown {
			return r
		}
	}
	return nil
}

// longText is the long result of a text; nil when there is none.
func (w *turn) longText(text string) *longResult {
	for _, r := range w.results {
		if r.full == text {
			return r
		}
	}
	return nil
}
