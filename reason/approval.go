package reason

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/skills"
)

// leave is what a call needs of an admin.
type leave struct {
	skill skills.Skill
	key   string // skill and arguments
	asked approvals.Approval
}

// needLeave handles a call that only an admin can allow: it is set aside until the reply's other calls are
// made, or only recorded.
func (w *turn) needLeave(ctx context.Context, c *call, s skills.Skill) error {
	hash, err := approvals.Hash(c.args)
	if err != nil {
		return err // the schema's check has read them
	}
	c.leave = &leave{skill: s, key: s.Name + " " + hash}
	if w.Approvals == Park {
		return nil
	}
	if err := w.request(ctx, c); err != nil || c.result != "" {
		return err
	}
	w.outcome.Calls = append(w.outcome.Calls, s.Name+" (awaits approval)")
	c.result = encode(map[string]string{
		"status": "pending_approval", "approval_id": c.leave.asked.ID,
		"note": "An admin must approve this call. It runs later, if approved; do not ask again.",
	})
	return w.showOnce(ctx, c, "deferred", string(activity.PendingApproval), "")
}

// await asks for all the leave that a reply's calls need, and then makes each call when it is decided. Of equal
// calls only one is asked for at a time: one denial is for all.
func (w *turn) await(ctx context.Context, calls []*call) error {
	for {
		round, err := w.round(ctx, calls)
		if err != nil || len(round) == 0 {
			return err
		}
		if err := w.announce(ctx, round); err != nil {
			return err
		}
		for _, c := range round {
			if err := w.follow(ctx, c); err != nil {
				return err
			}
		}
	}
}

// round asks for the calls that have no result yet, and returns those that now wait.
func (w *turn) round(ctx context.Context, calls []*call) (waiting []*call, err error) {
	taken := map[string]bool{}
	for _, c := range calls {
		if c.leave == nil || c.result != "" || taken[c.leave.key] {
			continue
		}
		if why, denied := w.denied[c.leave.key]; denied {
			if err := w.denyAgain(ctx, c, why); err != nil {
				return nil, err
			}
			continue
		}
		if err := w.request(ctx, c); err != nil {
			return nil, err
		}
		if c.result == "" {
			taken[c.leave.key] = true
			waiting = append(waiting, c)
		}
	}
	return waiting, nil
}

// request records that one call wants leave. A request that cannot be stored is the call's result.
func (w *turn) request(ctx context.Context, c *call) error {
	s := c.leave.skill
	args := c.args
	if w.Approvals == Defer { // what was read by now is not known to who makes the call later
		args = builtins.WithRevisions(s, args, w.seen)
	}
	asked, err := approvals.Ask(ctx, approvals.Request{
		Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: args, Park: w.Approvals == Park,
	})
	if failure, ok := errors.AsType[*executions.StepError](err); ok {
		c.result = w.bound(failed(failure))
		return nil
	}
	c.leave.asked = asked
	return err
}

// announce shows, once, what waits for a decision.
func (w *turn) announce(ctx context.Context, round []*call) error {
	if w.OnApproval == nil {
		return nil
	}
	first, err := w.news(ctx, "approvals")
	if err != nil || !first {
		return err
	}
	for _, c := range round {
		w.OnApproval(c.leave.asked)
	}
	w.view.catchUp(ctx)
	return nil
}

// follow waits for the decision on a call, and does what it says.
func (w *turn) follow(ctx context.Context, c *call) error {
	id := c.leave.asked.ID
	d, err := approvals.Await(ctx, "decision on "+id, id)
	switch {
	case err != nil:
		return err
	case d.Status != "approved":
		return w.deny(ctx, c, d.Reason)
	}
	step, use := approvals.Grant(ctx, id)
	err = w.invokeSkill(ctx, c, c.leave.skill, step, use)
	if approvals.IsUsed(err) {
		return w.deny(ctx, c, "the approval has expired, or the skill has changed since it was given")
	}
	return err
}

// deny tells the model that a call is not allowed, and remembers it for the rest of the turn.
func (w *turn) deny(ctx context.Context, c *call, why string) error {
	w.denied[c.leave.key] = why
	w.outcome.Calls = append(w.outcome.Calls, c.name+" (denied)")
	c.result = denial(why)
	return w.showOnce(ctx, c, "denied "+c.leave.asked.ID, classDenied, why)
}

// denyAgain refuses a call that was denied before in this turn. No admin is asked again.
func (w *turn) denyAgain(ctx context.Context, c *call, why string) error {
	c.result = denial(why)
	return w.refuse(ctx, c, c.leave.skill.ID, classDenied, "denied before in this turn: "+why)
}

func denial(why string) string {
	return encode(map[string]string{"error": "DENIED", "reason": why, "note": "Do not ask for this call again."})
}

// matching returns the skills that have to do with a query, best first.
func matching(list []skills.Skill, query string) []skills.Skill {
	return rank(list, query, true)
}

// nearestSkills orders all skills by how much they have to do with a text; equals stay in order.
func nearestSkills(list []skills.Skill, text string) []skills.Skill {
	return rank(list, text, false)
}

// rank scores skills by the words they share with a text: those of the name count more than those of the
// description, whole words more than beginnings, and rare words more than common ones.
func rank(list []skills.Skill, text string, onlyHits bool) []skills.Skill {
	type scored struct {
		skill skills.Skill
		score float64
	}
	query := words(text)
	all := make([]scored, len(list))
	for i, s := range list {
		all[i].skill = s
	}
	for _, word := range query {
		points := make([]float64, len(list))
		hits := 0
		for i, s := range list {
			points[i] = 3*likeness(word, words(s.Name)) + likeness(word, words(s.Description))
			if points[i] > 0 {
				hits++
			}
		}
		rarity := math.Log(1 + float64(len(list))/float64(max(hits, 1)))
		for i := range all {
			all[i].score += points[i] * rarity
		}
	}
	slices.SortStableFunc(all, func(a, b scored) int { return cmp.Compare(b.score, a.score) })
	var ranked []skills.Skill
	for _, a := range all {
		if a.score > 0 || !onlyHits {
			ranked = append(ranked, a.skill)
		}
	}
	return ranked
}

// likeness is 1 for a word that is among others, and less for one that begins alike.
func likeness(word string, others []string) float64 {
	best := 0.0
	for _, other := range others {
		switch short, long := min(len(word), len(other)), max(len(word), len(other)); {
		case word == other:
			return 1
		case short >= 3 && word[:short] == other[:short] && long-short <= 4:
			best = 0.6
		}
	}
	return best
}

// words splits a text at everything that is neither letter nor digit, and at the humps of camelCase. Each word is
// there once, in lower case.
func words(text string) []string {
	var spaced strings.Builder
	var before rune
	for _, r := range text {
		if unicode.IsUpper(r) && unicode.IsLower(before) {
			spaced.WriteByte(' ')
		}
		spaced.WriteRune(r)
		before = r
	}
	var list []string
	for word := range strings.FieldsFuncSeq(strings.ToLower(spaced.String()), func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		if !slices.Contains(list, word) {
			list = append(list, word)
		}
	}
	return list
}
