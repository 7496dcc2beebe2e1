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

// approvalRequest is a call that needs an approval.
type approvalRequest struct {
	skill skills.Skill
	key   string // skill and arguments
	row   approvals.Approval
}

// requireApproval defers a call until the turn has made the reply's other calls, or only records the request.
func (w *turn) requireApproval(ctx context.Context, c *call, s skills.Skill) error {
	hash, err := approvals.Hash(c.args)
	if err != nil {
		return err // the schema's check parsed them
	}
	c.approval = &approvalRequest{skill: s, key: s.Name + " " + hash}
	if w.Sandbox != nil {
		return w.decideSandboxed(ctx, c, s)
	}
	if w.Approvals == Park {
		return nil
	}
	if err := w.requestApproval(ctx, c); err != nil || c.result != "" {
		return err
	}
	w.outcome.Calls = append(w.outcome.Calls, s.Name+" (awaits approval)")
	c.result = encode(map[string]string{
		"status": "pending_approval", "approval_id": c.approval.row.ID,
		"note": "An admin must approve this call. It runs later, if approved; do not ask again.",
	})
	return w.notifyOnce(ctx, c, "deferred", string(activity.PendingApproval), "")
}

// awaitApprovals requests the approvals of a reply and makes each approved call. It requests one of several equal calls
// at a time, because a denial holds for all of them.
func (w *turn) awaitApprovals(ctx context.Context, calls []*call) error {
	for {
		round, err := w.requestApprovals(ctx, calls)
		if err != nil || len(round) == 0 {
			return err
		}
		if err := w.notifyApprovals(ctx, round); err != nil {
			return err
		}
		for _, c := range round {
			if err := w.followDecision(ctx, c); err != nil {
				return err
			}
		}
	}
}

// requestApprovals requests approvals of the calls without a result, and returns the waiting ones.
func (w *turn) requestApprovals(ctx context.Context, calls []*call) (waiting []*call, err error) {
	taken := map[string]bool{}
	for _, c := range calls {
		if c.approval == nil || c.result != "" || taken[c.approval.key] {
			continue
		}
		if why, denied := w.denied[c.approval.key]; denied {
			if err := w.denyAgain(ctx, c, why); err != nil {
				return nil, err
			}
			continue
		}
		if err := w.requestApproval(ctx, c); err != nil {
			return nil, err
		}
		if c.result == "" {
			taken[c.approval.key] = true
			waiting = append(waiting, c)
		}
	}
	return waiting, nil
}

// requestApproval requests one approval. If the database cannot store the request, the failure is the call's result.
func (w *turn) requestApproval(ctx context.Context, c *call) error {
	s := c.approval.skill
	args := c.args
	if w.Approvals == Defer { // the later run does not know the read revisions
		args = builtins.WithRevisions(s, args, w.seen)
	}
	asked, err := approvals.Ask(ctx, approvals.Request{
		Skill: s.Name, SkillID: s.ID, Revision: s.Revision, Args: args, Park: w.Approvals == Park,
	})
	if failure, ok := errors.AsType[*executions.StepError](err); ok {
		c.result = w.bound(failed(failure))
		return nil
	}
	c.approval.row = asked
	return err
}

// notifyApprovals reports each waiting approval once.
func (w *turn) notifyApprovals(ctx context.Context, round []*call) error {
	if w.OnApproval == nil {
		return nil
	}
	first, err := w.firstTime(ctx, "approvals")
	if err != nil || !first {
		return err
	}
	for _, c := range round {
		w.OnApproval(c.approval.row)
	}
	w.view.flush(ctx)
	return nil
}

// followDecision waits for the decision on a call, and makes or denies it.
func (w *turn) followDecision(ctx context.Context, c *call) error {
	id := c.approval.row.ID
	if w.OnWait != nil {
		w.OnWait()
	}
	d, err := approvals.Await(ctx, "decision on "+id, id)
	switch {
	case err != nil:
		return err
	case d.Status != "approved":
		return w.deny(ctx, c, d.Reason)
	}
	step, use := approvals.Grant(ctx, id)
	err = w.invokeSkill(ctx, c, c.approval.skill, step, use)
	if approvals.IsUsed(err) {
		return w.deny(ctx, c, "the approval has expired, or the skill has changed since it was given")
	}
	return err
}

// deny denies a call for the rest of the turn.
func (w *turn) deny(ctx context.Context, c *call, why string) error {
	w.denied[c.approval.key] = why
	w.outcome.Calls = append(w.outcome.Calls, c.name+" (denied)")
	c.result = denial(why)
	return w.notifyOnce(ctx, c, "denied "+c.approval.row.ID, classDenied, why)
}

// denyAgain refuses a call that was denied earlier in the turn, without another request.
func (w *turn) denyAgain(ctx context.Context, c *call, why string) error {
	c.result = denial(why)
	return w.recordRefusal(ctx, c, c.approval.skill.ID, classDenied, "denied before in this turn: "+why)
}

func denial(why string) string {
	return encode(map[string]string{"error": "DENIED", "reason": why, "note": "Do not ask for this call again."})
}

// rankedSkills orders all skills by their similarity to a text. Equally similar skills keep their order.
func rankedSkills(list []skills.Skill, text string) []skills.Skill {
	return rank(list, text, false)
}

// rank scores skills by words shared with a text. Words of the name, whole words and rare words weigh more.
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
			points[i] = 3*similarity(word, words(s.Name)) + similarity(word, words(s.Description))
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

// similarity is 1 for a word among others, and less for a word with the same beginning.
func similarity(word string, others []string) float64 {
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

// words splits a text at characters other than letters and digits, and at camelCase humps. It returns distinct words
// in lower case.
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
