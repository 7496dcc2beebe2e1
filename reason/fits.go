package reason

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"regexp"

	"github.com/lanekeeper/lanekeeper/skills"
)

// toolName is what servers take as the name of a tool.
var toolName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// fits returns an error for a turn that cannot be taken as it is given. That is a mistake of the program, of which a
// model would be told as its own, or a server would only say that it refuses the request.
func (l *Loop) fits(t Turn) error {
	if l.Pool == nil || l.Model == nil || l.Skills == nil {
		return errors.New("a Loop needs Pool, Model and Skills")
	}
	if limit := t.budget(l.Budget).CostUSD; math.IsNaN(limit) {
		return errors.New("the budget's CostUSD is no amount")
	}
	taken := map[string]bool{}
	for _, tool := range t.Tools {
		if taken[tool.Name] {
			return fmt.Errorf("two tools are named %s", tool.Name)
		}
		taken[tool.Name] = true
		if err := l.usable(tool); err != nil {
			return err
		}
	}
	return nil
}

// usable returns an error for a tool that no model could call.
func (l *Loop) usable(t Tool) error {
	switch {
	case !toolName.MatchString(t.Name):
		return fmt.Errorf("%q is not a tool's name: it is 1 to 64 letters, digits, _ and -", t.Name)
	case t.Do == nil && t.DoSeen == nil && t.within == nil:
		return fmt.Errorf("the tool %s has no Do", t.Name)
	case !json.Valid(t.schema()):
		return fmt.Errorf("the parameters of %s are no JSON", t.Name)
	}
	if wrong, is := errors.AsType[*skills.CallError](l.Skills.Check(t.asSkill(), nil)); is {
		return wrong
	}
	return nil
}

// log is where the loop says what happens.
func (l *Loop) log() *slog.Logger {
	if l.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l.Logger
}
