package agents

import (
	"errors"
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/text/language"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// Validate returns all problems of d, each as "field path: problem", joined by [errors.Join]. It does not check that
// the named skills, agents and keys exist.
func Validate(d Definition) error {
	v := &validator{}
	v.name(d)
	v.texts(d)
	v.model(d)
	v.lists(d)
	v.limits(d.Limits)
	v.schedule(d)
	return errors.Join(v.List...)
}

// Bounds of a definition.
const (
	maxInstructions = 64 << 10 // bytes
	maxText         = 8192     // bytes of a description, greeting or heartbeat prompt
	maxList         = 100      // entries of any list
)

var (
	validName  = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
	validModel = regexp.MustCompile(`^[!-~]{1,200}$`)
)

type validator struct{ fielderr.List }

func (v *validator) name(d Definition) {
	switch {
	case d.Name == "":
		v.Add("name", "is empty")
	case !validName.MatchString(d.Name):
		v.Add("name", "%q must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name)
	case d.Name == Alias && !d.Default:
		v.Add("name", "%q is the name of the default agent for clients; choose another name, or add default: true", d.Name)
	}
}

func (v *validator) texts(d Definition) {
	if d.Instructions != "" && d.InstructionsFile != "" {
		v.Add("instructions_file", "there are instructions, too; keep one of the two")
	}
	v.text("instructions", d.Instructions, maxInstructions)
	v.text("description", d.Description, maxText)
	v.text("greeting", d.Greeting, maxText)
}

func (v *validator) text(field, text string, maxBytes int) {
	if len(text) > maxBytes || strings.ContainsRune(text, 0) {
		v.Add(field, "must have at most %d bytes and no NUL character", maxBytes)
	}
}

func (v *validator) model(d Definition) {
	for i, name := range append([]string{d.Model}, d.Fallback...) {
		field := "model"
		if i > 0 {
			field = fmt.Sprintf("fallback[%d]", i-1)
		}
		if (name != "" || i > 0) && !validModel.MatchString(name) {
			v.Add(field, "%q is not the name of a model: printable characters without blanks", name)
		}
	}
	if d.Effort != "" && !slices.Contains(config.Efforts(), d.Effort) {
		v.Add("effort", "%q is none of %s", d.Effort, strings.Join(config.Efforts(), ", "))
	}
	if t := d.Temperature; t != nil && !(*t >= 0 && *t <= 2) { // also rejects NaN
		v.Add("temperature", "must be between 0 and 2")
	}
	if d.Temperature != nil && d.Effort != "" && d.Effort != "none" {
		v.Add("temperature", "models that reason take none; keep effort or temperature")
	}
}

func (v *validator) lists(d Definition) {
	v.list("skills", d.Skills, "a name of a skill, or a pattern such as memory_*", func(s string) bool {
		_, err := path.Match(s, "x")
		return s != "" && err == nil
	})
	v.list("pinned", d.Pinned, "category/key", func(s string) bool {
		category, key, ok := strings.Cut(s, "/")
		return ok && category != "" && key != "" && !strings.ContainsFunc(s, unicode.IsControl)
	})
	v.list("delegates", d.Delegates, "a name of another agent", func(s string) bool {
		return validName.MatchString(s) && s != d.Name
	})
	v.list("keys", d.Keys, "a name of a chat key", func(s string) bool { return strings.TrimSpace(s) == s && s != "" })
	v.list("languages", d.Languages, "a language tag such as es or pt-BR", func(s string) bool {
		_, err := language.Parse(s)
		return err == nil
	})
	if d.Memory != "" && !slices.Contains([]string{MemoryShared, MemoryOwn, MemoryNone}, d.Memory) {
		v.Add("memory", "%q is none of %s, %s, %s", d.Memory, MemoryShared, MemoryOwn, MemoryNone)
	}
	if d.Memory == MemoryNone && len(d.Pinned) > 0 {
		v.Add("pinned", "an agent without memory has nothing to pin")
	}
}

func (v *validator) list(field string, values []string, wanted string, ok func(string) bool) {
	if len(values) > maxList {
		v.Add(field, "has %d entries; at most %d are taken", len(values), maxList)
	}
	for i, s := range values {
		switch {
		case len(s) > 600 || !ok(s):
			v.Add(fmt.Sprintf("%s[%d]", field, i), "%.60q is not %s", s, wanted)
		case slices.Contains(values[:i], s):
			v.Add(fmt.Sprintf("%s[%d]", field, i), "%q is there twice", s)
		}
	}
}

func (v *validator) limits(l Limits) {
	for _, limit := range []struct {
		field string
		value float64
	}{
		{"iterations", float64(l.Iterations)},
		{"tokens", float64(l.Tokens)},
		{"cost_usd", l.CostUSD},
		{"day_usd", l.DayUSD},
	} {
		if limit.value < 0 || math.IsNaN(limit.value) || math.IsInf(limit.value, 1) {
			v.Add("limits."+limit.field, "must be a number and not negative; leave it out for no limit of the agent's own")
		}
	}
}

func (v *validator) schedule(d Definition) {
	zone, err := schedule.Location(d.Timezone)
	if err != nil {
		v.Add("timezone", "%s", err)
	}
	if d.Heartbeat == nil {
		return
	}
	v.text("heartbeat.prompt", d.Heartbeat.Prompt, maxText)
	if d.Heartbeat.Cron == "" || err != nil {
		return
	}
	if _, err := schedule.Parse(d.Heartbeat.Cron, zone); err != nil {
		v.Add("heartbeat.cron", "%s", err)
	}
}
