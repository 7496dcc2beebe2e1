package webhooks

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Bounds and defaults of an endpoint.
const (
	defaultMaxBytes = 1 << 20
	MaxBodyBytes    = 25 << 20 // bytes; the largest max_bytes
	defaultAttempts = 5
	maxAttempts     = 20
	maxActions      = 32
	maxText         = 8192
	maxTolerance    = time.Hour
)

var (
	nameRegexp   = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	headerRegexp = regexp.MustCompile(`^[A-Za-z0-9-]{1,100}$`)
)

// ValidateEndpoint returns all problems of d, each as "field path: problem", joined as by [errors.Join].
func ValidateEndpoint(d EndpointDefinition) error {
	_, err := d.resolve()
	return err
}

// resolve applies the defaults to a definition and validates it.
func (d EndpointDefinition) resolve() (Endpoint, error) {
	e := Endpoint{
		Name: d.Name, Description: d.Description, Scheme: d.Scheme, Secrets: d.Secrets, Actions: d.Actions,
		Settings: Settings{
			Format: cmp.Or(d.Format, FormatJSON), MaxBytes: cmp.Or(d.MaxBytes, defaultMaxBytes), ID: d.ID,
			ToleranceSeconds: cmp.Or(d.Tolerance, signature.DefaultTolerance).Seconds(),
			MaxAttempts:      cmp.Or(d.MaxAttempts, defaultAttempts),
			Header:           d.HMAC.Header, Encoding: d.HMAC.Encoding, Prefix: d.HMAC.Prefix,
			TimestampHeader: d.HMAC.TimestampHeader, Signed: d.HMAC.Signed, IDHeader: d.HMAC.IDHeader,
			Challenge: d.Challenge, VerifyToken: d.VerifyToken,
		},
	}
	problems := checkName(d.Name, d.Description)
	problems = append(problems, checkSecrets(d.Secrets)...)
	problems = append(problems, d.checkScheme()...)
	problems = append(problems, e.Settings.check()...)
	if len(d.Actions) == 0 || len(d.Actions) > maxActions {
		problems.Add("actions", "must have 1 to %d entries", maxActions)
	}
	for i, a := range d.Actions {
		for _, err := range a.check() {
			problems = append(problems, fmt.Errorf("actions[%d].%w", i, err))
		}
	}
	return e, errors.Join(problems...)
}

func checkName(name, description string) fielderr.List {
	var problems fielderr.List
	if !nameRegexp.MatchString(name) {
		problems.Add("name", "must be 1 to 64 of the characters a-z 0-9 _ -, the first a letter or a digit")
	}
	if len(description) > maxText || strings.ContainsRune(description, 0) {
		problems.Add("description", "must have at most %d bytes and no NUL character", maxText)
	}
	return problems
}

// checkScheme checks the signature scheme and its settings.
func (d EndpointDefinition) checkScheme() fielderr.List {
	var problems fielderr.List
	if !slices.Contains(signature.Schemes(), d.Scheme) {
		problems.Add("scheme", "%q is not one of standard, github, stripe, hmac, bearer", string(d.Scheme))
	}
	if d.Scheme != signature.HMAC && d.HMAC != (HMAC{}) {
		problems.Add("hmac", "is only for scheme hmac, not %s", d.Scheme)
	}
	for _, h := range []struct{ field, name string }{
		{"header", d.HMAC.Header}, {"timestamp_header", d.HMAC.TimestampHeader}, {"id_header", d.HMAC.IDHeader},
	} {
		if h.name != "" && !headerRegexp.MatchString(h.name) {
			problems.Add("hmac."+h.field, "%q is not a header name", h.name)
		}
	}
	if d.HMAC.Encoding != "" && d.HMAC.Encoding != "hex" && d.HMAC.Encoding != "base64" {
		problems.Add("hmac.encoding", "must be hex or base64")
	}
	if !d.HMAC.signsAll() {
		problems.Add("hmac.signed", "needs timestamp_header or id_header, and {body}, {timestamp} and {id} once each, "+
			"the last two where their header is set")
	}
	if d.Tolerance < 0 || d.Tolerance > maxTolerance {
		problems.Add("tolerance", "must be between 0 and %s", maxTolerance)
	}
	return problems
}

// signsAll reports whether the signed text contains the body exactly once, and the time and the id exactly if each has
// a header.
func (h HMAC) signsAll() bool {
	if h.Signed == "" {
		return true
	}
	count := func(part string) int { return strings.Count(h.Signed, part) }
	hasTime, hasID := h.TimestampHeader != "", h.IDHeader != ""
	return (hasTime || hasID) && count("{body}") == 1 &&
		count("{timestamp}") <= 1 && (count("{timestamp}") == 1) == hasTime &&
		count("{id}") <= 1 && (count("{id}") == 1) == hasID
}

// checkChallenge returns the problems of a challenge that cannot be answered.
func (s Settings) checkChallenge() fielderr.List {
	switch {
	case s.Challenge != "" && s.Challenge != ChallengeSlack && s.Challenge != ChallengeMeta:
		return []error{errors.New("challenge: must be slack or meta")}
	case s.Challenge == ChallengeSlack && s.Format != FormatJSON:
		return []error{errors.New("challenge: slack sends JSON, so the format must be json")}
	case s.Challenge != ChallengeMeta && s.VerifyToken != "":
		return []error{errors.New("verify_token: is only for challenge meta")}
	case s.Challenge == ChallengeMeta && len(checkSecrets([]string{s.VerifyToken})) > 0:
		return []error{errors.New("verify_token: must be a reference, ${NAME} of the environment or file:/absolute/path")}
	}
	return nil
}

// check reports settings outside their limits.
func (s Settings) check() fielderr.List {
	problems := s.checkChallenge()
	if s.Format != FormatJSON && s.Format != FormatText {
		problems.Add("format", "must be json or text")
	}
	if s.MaxBytes < 1 || s.MaxBytes > MaxBodyBytes {
		problems.Add("max_bytes", "must be between 1 and %d", MaxBodyBytes)
	}
	if s.MaxAttempts < 1 || s.MaxAttempts > maxAttempts {
		problems.Add("max_attempts", "must be between 1 and %d", maxAttempts)
	}
	if s.ID != "" && s.ID != Digest {
		switch err := checkPath(s.ID); {
		case err != nil:
			problems.Add("id", "%w", err)
		case !strings.HasPrefix(s.ID, "header.") && (!strings.HasPrefix(s.ID, "body.") || s.Format != FormatJSON):
			problems.Add("id", "must be a header, a field of a JSON body, or digest")
		}
	}
	return problems
}

// check returns the problems of an action, each as "field: problem".
func (a Action) check() fielderr.List {
	var problems fielderr.List
	count := 0
	for _, value := range []string{a.Event, a.Resume, a.Automation, a.Flow, a.Prompt} {
		if value != "" {
			count++
		}
	}
	if count != 1 {
		problems.Add("event", "an action must have exactly one of event, resume, automation, flow and prompt")
	}
	for path, want := range a.When {
		if err := checkPath(path); err != nil {
			problems.Add("when", "%w", err)
		}
		options, isList := want.([]any)
		if !isList {
			options = []any{want}
		}
		if len(options) == 0 || slices.ContainsFunc(options, isNotScalar) {
			problems.Add("when", "%s must be a text, a number, a truth value, or a list of these", path)
		}
	}
	return append(append(problems, a.checkEvent()...), a.checkPrompt()...)
}

func isNotScalar(v any) bool {
	_, is := scalar(v)
	return !is
}

// checkEvent checks the fields of an action that starts a flow or raises an event.
func (a Action) checkEvent() fielderr.List {
	var problems fielderr.List
	if a.EventName() == "" && a.Resume != "" {
		problems.Add("resume", "%q is not one of document, event, response, signature, test", a.Resume)
	}
	if allowed := slices.Collect(maps.Values(events())); a.Event != "" && !slices.Contains(allowed, a.Event) {
		slices.Sort(allowed)
		problems.Add("event", "%q is not an event that a webhook may raise: %s", a.Event, strings.Join(allowed, ", "))
	}
	isEvent := a.Event != "" || a.Resume != ""
	switch err := checkTemplate(a.Key, braceRegexp); {
	case isEvent && strings.TrimSpace(a.Key) == "":
		problems.Add("key", "is empty; write the key of the wait, such as order-{body.order.id}")
	case !isEvent && (a.Key != "" || a.Flow == "" && len(a.Data) > 0):
		problems.Add("key", "only event and resume have key and data; a flow has only data")
	case a.Flow != "" && executions.CheckName(a.Flow) != nil:
		problems.Add("flow", "%w", executions.CheckName(a.Flow))
	case err != nil:
		problems.Add("key", "%w", err)
	}
	if err := checkTemplate(a.Thread, braceRegexp); err != nil {
		problems.Add("thread", "%w", err)
	} else if a.Thread != "" && a.Flow == "" {
		problems.Add("thread", "only a flow has a thread")
	}
	for field, path := range a.Data {
		text, _ := path.(string)
		if err := checkPath(text); err != nil {
			problems.Add("data", "%s: %w", field, err)
		}
	}
	return problems
}

func (a Action) checkPrompt() fielderr.List {
	var problems fielderr.List
	if len(a.Prompt) > maxText || strings.ContainsRune(a.Prompt, 0) {
		problems.Add("prompt", "must have at most %d bytes and no NUL character", maxText)
	}
	if err := checkTemplate(a.Prompt, malformedPlaceholderRegexp); err != nil {
		problems.Add("prompt", "%w", err)
	}
	if a.Prompt == "" && len(a.Scopes) > 0 {
		problems.Add("scopes", "only a prompt has scopes")
	}
	for _, s := range a.Scopes {
		if s != skills.ScopeExternal && s != skills.ScopeInternal && s != skills.ScopeBoth {
			problems.Add("scopes", "%q is not one of internal, external, both", s)
		}
	}
	return problems
}
