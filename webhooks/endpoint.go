package webhooks

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Bounds and defaults of an endpoint.
const (
	defaultMaxBytes = 1 << 20
	MostMaxBytes    = 25 << 20 // bytes; the largest max_bytes
	defaultAttempts = 5
	mostAttempts    = 20
	mostActions     = 32
	maxText         = 8192
	maxTolerance    = time.Hour
)

// Formats of a body.
const (
	FormatJSON = "json"
	FormatText = "text"
)

// Challenges by which a sender verifies the address of an endpoint.
const (
	ChallengeSlack = "slack" // a signed body {"type": "url_verification", "challenge": …}
	ChallengeMeta  = "meta"  // GET with hub.mode, hub.verify_token and hub.challenge
)

var (
	nameForm   = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)
	flowForm   = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.:-]{0,99}$`)
	headerForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,100}$`)
)

// Settings are the details of an endpoint, as stored.
type Settings struct {
	Format           string  `json:"format"` // json, or text: UTF-8, not parsed
	MaxBytes         int64   `json:"max_bytes"`
	ToleranceSeconds float64 `json:"tolerance_seconds"`
	ID               string  `json:"id"` // path of the delivery id, or digest; empty: where the scheme has it
	MaxAttempts      int     `json:"max_attempts"`
	Header           string  `json:"header,omitempty"`
	Encoding         string  `json:"encoding,omitempty"`
	Prefix           string  `json:"prefix,omitempty"`
	TimestampHeader  string  `json:"timestamp_header,omitempty"`
	IDHeader         string  `json:"id_header,omitempty"`
	Signed           string  `json:"signed,omitempty"`
	Challenge        string  `json:"challenge,omitempty"`
	VerifyToken      string  `json:"verify_token,omitempty"` // reference
}

// Digest is the path of a delivery id that selects the SHA-256 of the body.
const Digest = "digest"

// HMAC describes a generic signature.
type HMAC struct {
	Header          string `yaml:"header" json:"header,omitempty"`                     // X-Signature when empty
	Encoding        string `yaml:"encoding" json:"encoding,omitempty"`                 // hex or base64; hex when empty
	Prefix          string `yaml:"prefix" json:"prefix,omitempty"`                     // such as sha256=
	TimestampHeader string `yaml:"timestamp_header" json:"timestamp_header,omitempty"` // of the signed time
	IDHeader        string `yaml:"id_header" json:"id_header,omitempty"`               // of the signed id
	Signed          string `yaml:"signed" json:"signed,omitempty"`                     // default {id}.{timestamp}.{body}
}

// EndpointDefinition declares an endpoint in a workspace file.
type EndpointDefinition struct {
	Name        string           `yaml:"name" json:"name"` // the last segment of /webhooks/{name}
	Description string           `yaml:"description" json:"description,omitempty"`
	Scheme      signature.Scheme `yaml:"scheme" json:"scheme"`
	Secrets     []string         `yaml:"secrets" json:"secrets"` // references; several during a rotation
	HMAC        HMAC             `yaml:"hmac" json:"hmac,omitzero"`
	Tolerance   time.Duration    `yaml:"tolerance" json:"tolerance,omitempty"`       // of its time; 5 minutes when 0
	Format      string           `yaml:"format" json:"format,omitempty"`             // json (when empty) or text
	MaxBytes    int64            `yaml:"max_bytes" json:"max_bytes,omitempty"`       // 1 MiB when 0, at most 25 MiB
	ID          string           `yaml:"id" json:"id,omitempty"`                     // path of the delivery id, or digest
	MaxAttempts int              `yaml:"max_attempts" json:"max_attempts,omitempty"` // 5 when 0, at most 20
	Challenge   string           `yaml:"challenge" json:"challenge,omitempty"`       // slack or meta; none when empty
	VerifyToken string           `yaml:"verify_token" json:"verify_token,omitempty"` // reference, of challenge meta
	Actions     []Action         `yaml:"actions" json:"actions"`
}

// Action is a reaction to a delivery. It has exactly one of Event, Resume, Automation, Flow and Prompt. Event and
// Resume need Key and may have Data. Flow may have Data, its input, and Thread, its conversation. Every action with a
// true When runs, in order.
type Action struct {
	When       map[string]any `yaml:"when" json:"when,omitempty"`             // path: value or values; all must match
	Event      string         `yaml:"event" json:"event,omitempty"`           // such as EVENT_COMPLETED
	Resume     string         `yaml:"resume" json:"resume,omitempty"`         // kind of wait, a key of events
	Key        string         `yaml:"key" json:"key,omitempty"`               // template
	Data       map[string]any `yaml:"data" json:"data,omitempty"`             // field: path; the body when empty
	Automation string         `yaml:"automation" json:"automation,omitempty"` // name
	Flow       string         `yaml:"flow" json:"flow,omitempty"`             // name; starts once per delivery
	Thread     string         `yaml:"thread" json:"thread,omitempty"`         // template; created if missing
	Prompt     string         `yaml:"prompt" json:"prompt,omitempty"`         // template, for the model
	Scopes     []string       `yaml:"scopes" json:"scopes,omitempty"`         // of the model's skills; external when empty
}

// events maps each kind of wait to the event that ends it. Other events are missing: external senders must not decide
// approvals, end executions or fire timers.
func events() map[string]string {
	return map[string]string{
		"response": "MESSAGE_RECEIVED", "document": "DOCUMENT_UPLOADED", "signature": "SIGNATURE_COMPLETED",
		"test": "TEST_COMPLETED", "event": "EVENT_COMPLETED",
	}
}

// EventName returns the event that the action emits; empty for none.
func (a Action) EventName() string {
	if a.Resume != "" {
		return events()[a.Resume]
	}
	return a.Event
}

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
	if len(d.Actions) == 0 || len(d.Actions) > mostActions {
		problems = append(problems, fmt.Errorf("actions: must have 1 to %d entries", mostActions))
	}
	for i, a := range d.Actions {
		for _, err := range a.check() {
			problems = append(problems, fmt.Errorf("actions[%d].%w", i, err))
		}
	}
	return e, errors.Join(problems...)
}

func checkName(name, description string) []error {
	var problems []error
	if !nameForm.MatchString(name) {
		problems = append(problems,
			errors.New("name: must be 1 to 64 of the characters a-z 0-9 _ -, the first a letter or a digit"))
	}
	if len(description) > maxText || strings.ContainsRune(description, 0) {
		problems = append(problems, fmt.Errorf("description: must have at most %d bytes and no NUL character", maxText))
	}
	return problems
}

func (d EndpointDefinition) checkScheme() []error {
	var problems []error
	if !slices.Contains(signature.Schemes(), d.Scheme) {
		problems = append(problems, fmt.Errorf("scheme: %q is not one of standard, github, stripe, hmac, bearer",
			string(d.Scheme)))
	}
	if d.Scheme != signature.HMAC && d.HMAC != (HMAC{}) {
		problems = append(problems, fmt.Errorf("hmac: is only for scheme hmac, not %s", d.Scheme))
	}
	for _, h := range []struct{ field, name string }{
		{"header", d.HMAC.Header}, {"timestamp_header", d.HMAC.TimestampHeader}, {"id_header", d.HMAC.IDHeader},
	} {
		if h.name != "" && !headerForm.MatchString(h.name) {
			problems = append(problems, fmt.Errorf("hmac.%s: %q is no name of a header", h.field, h.name))
		}
	}
	if d.HMAC.Encoding != "" && d.HMAC.Encoding != "hex" && d.HMAC.Encoding != "base64" {
		problems = append(problems, errors.New("hmac.encoding: must be hex or base64"))
	}
	if !d.HMAC.signsAll() {
		problems = append(problems, errors.New("hmac.signed: needs timestamp_header or id_header, and {body}, {timestamp} "+
			"and {id} once each, the last two where their header is set"))
	}
	if d.Tolerance < 0 || d.Tolerance > maxTolerance {
		problems = append(problems, fmt.Errorf("tolerance: must be at most %s", maxTolerance))
	}
	return problems
}

// signsAll reports whether the signed text has the body, and the time and id if they have a header, exactly once.
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

// checkChallenge reports a challenge that cannot be answered.
func (s Settings) checkChallenge() []error {
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

func (s Settings) check() []error {
	problems := s.checkChallenge()
	if s.Format != FormatJSON && s.Format != FormatText {
		problems = append(problems, errors.New("format: must be json or text"))
	}
	if s.MaxBytes < 1 || s.MaxBytes > MostMaxBytes {
		problems = append(problems, fmt.Errorf("max_bytes: must be between 1 and %d", MostMaxBytes))
	}
	if s.MaxAttempts < 1 || s.MaxAttempts > mostAttempts {
		problems = append(problems, fmt.Errorf("max_attempts: must be between 1 and %d", mostAttempts))
	}
	if s.ID != "" && s.ID != Digest {
		switch err := checkPath(s.ID); {
		case err != nil:
			problems = append(problems, fmt.Errorf("id: %w", err))
		case !strings.HasPrefix(s.ID, "header.") && (!strings.HasPrefix(s.ID, "body.") || s.Format != FormatJSON):
			problems = append(problems, errors.New("id: must be a header, a field of a JSON body, or digest"))
		}
	}
	return problems
}

// check returns the problems of an action, each as "field: problem".
func (a Action) check() []error {
	var problems []error
	chosen := 0
	for _, what := range []string{a.Event, a.Resume, a.Automation, a.Flow, a.Prompt} {
		if what != "" {
			chosen++
		}
	}
	if chosen != 1 {
		problems = append(problems, errors.New("event: have exactly one of event, resume, automation, flow and prompt"))
	}
	for path, want := range a.When {
		if err := checkPath(path); err != nil {
			problems = append(problems, fmt.Errorf("when: %w", err))
		}
		options, isList := want.([]any)
		if !isList {
			options = []any{want}
		}
		if len(options) == 0 || slices.ContainsFunc(options, isNoScalar) {
			problems = append(problems, fmt.Errorf("when: %s must be a text, a number, a truth value, or a list of those", path))
		}
	}
	return append(append(problems, a.checkEvent()...), a.checkPrompt()...)
}

func isNoScalar(v any) bool {
	_, is := scalar(v)
	return !is
}

func (a Action) checkEvent() []error {
	var problems []error
	if a.EventName() == "" && a.Resume != "" {
		problems = append(problems, fmt.Errorf("resume: %q is not one of document, event, response, signature, test",
			a.Resume))
	}
	if raised := slices.Collect(maps.Values(events())); a.Event != "" && !slices.Contains(raised, a.Event) {
		slices.Sort(raised)
		problems = append(problems, fmt.Errorf("event: %q is not one that a webhook may raise: %s", a.Event,
			strings.Join(raised, ", ")))
	}
	raises := a.Event != "" || a.Resume != ""
	switch err := checkTemplate(a.Key); {
	case raises && strings.TrimSpace(a.Key) == "":
		problems = append(problems, errors.New("key: is empty; write which wait the event is for, such as "+
			"order-{body.order.id}"))
	case !raises && (a.Key != "" || a.Flow == "" && len(a.Data) > 0):
		problems = append(problems, errors.New("key: only event and resume have a key and data, and a flow has data"))
	case a.Flow != "" && !flowForm.MatchString(a.Flow):
		problems = append(problems, fmt.Errorf("flow: %q must be a letter, then letters, digits and _ . : -", a.Flow))
	case err != nil:
		problems = append(problems, fmt.Errorf("key: %w", err))
	}
	if err := checkTemplate(a.Thread); err != nil {
		problems = append(problems, fmt.Errorf("thread: %w", err))
	} else if a.Thread != "" && a.Flow == "" {
		problems = append(problems, errors.New("thread: only a flow has one"))
	}
	for field, path := range a.Data {
		text, _ := path.(string)
		if err := checkPath(text); err != nil {
			problems = append(problems, fmt.Errorf("data: %s: %w", field, err))
		}
	}
	return problems
}

func (a Action) checkPrompt() []error {
	var problems []error
	if len(a.Prompt) > maxText || strings.ContainsRune(a.Prompt, 0) {
		problems = append(problems, fmt.Errorf("prompt: must have at most %d bytes and no NUL character", maxText))
	}
	if err := checkTemplate(a.Prompt); err != nil {
		problems = append(problems, fmt.Errorf("prompt: %w", err))
	}
	if a.Prompt == "" && len(a.Scopes) > 0 {
		problems = append(problems, errors.New("scopes: only a prompt has them"))
	}
	for _, s := range a.Scopes {
		if s != skills.ScopeExternal && s != skills.ScopeInternal && s != skills.ScopeBoth {
			problems = append(problems, fmt.Errorf("scopes: %q is not one of internal, external, both", s))
		}
	}
	return problems
}

// Verifier returns the verifier of requests to the endpoint, with its secrets resolved.
func (e Endpoint) Verifier(secrets []string) signature.Verifier {
	return signature.Verifier{
		Scheme: e.Scheme, Secrets: secrets, Tolerance: time.Duration(e.Settings.ToleranceSeconds * float64(time.Second)),
		Layout: signature.Layout{
			Header: e.Settings.Header, Encoding: e.Settings.Encoding, Prefix: e.Settings.Prefix,
			TimestampHeader: e.Settings.TimestampHeader, IDHeader: e.Settings.IDHeader, Signed: e.Settings.Signed,
		},
	}
}

// SecretHeaders are the headers that authenticate a delivery. They are not stored.
func (e Endpoint) SecretHeaders() []string {
	return []string{
		"Authorization", "Proxy-Authorization", "Cookie", "X-Hub-Signature", "X-Hub-Signature-256", "Stripe-Signature",
		signature.HeaderSignature, "Svix-Signature", http.CanonicalHeaderKey(cmp.Or(e.Settings.Header, "X-Signature")),
	}
}

// PutEndpoint stores the declaration d and reports whether it changed anything. It does not enable or disable.
func PutEndpoint(ctx context.Context, db postgres.DB, d EndpointDefinition, source string) (changed bool, err error) {
	verb := fmt.Sprintf("put webhook %q", d.Name)
	e, invalid := d.resolve()
	settings, settingsErr := json.Marshal(e.Settings)
	actions, actionsErr := json.Marshal(e.Actions)
	if err := cmp.Or(invalid, settingsErr, actionsErr); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.Upsert(ctx, db, verb, "agent_webhook_endpoints", "name", postgres.Strict{
		"name": e.Name, "description": e.Description, "scheme": string(e.Scheme), "secrets": e.Secrets,
		"settings": settings, "actions": actions, "source": source,
	})
}

// GetEndpoint reads an endpoint by name; [ErrNotFound] for none.
func GetEndpoint(ctx context.Context, db postgres.DB, name string) (Endpoint, error) {
	if !postgres.IsText(name) {
		return Endpoint{}, fmt.Errorf("read webhook %q: %w", name, ErrNotFound)
	}
	rows, err := db.Query(ctx, `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by,
		       disabled_at, source, created_at, updated_at
		  from agent_webhook_endpoints where name = @name`, postgres.Strict{"name": name})
	return postgres.CollectOne(rows, err, ErrNotFound, fmt.Sprintf("read webhook %q", name),
		pgx.RowToStructByName[Endpoint])
}

// Endpoints lists all endpoints by name.
func Endpoints(ctx context.Context, db postgres.DB) ([]Endpoint, error) {
	return postgres.Rows[Endpoint](ctx, db, "list webhooks", `
		select id::text, name, description, scheme, secrets, settings, actions, enabled, disabled_reason, disabled_by,
		       disabled_at, source, created_at, updated_at
		  from agent_webhook_endpoints order by name`)
}

// RemoveEndpoints deletes the endpoints of source except keep, and returns their names. Their deliveries stay.
func RemoveEndpoints(ctx context.Context, db postgres.DB, source string, keep []string) ([]string, error) {
	return postgres.Names(ctx, db, "remove webhooks of source "+source, `
		delete from agent_webhook_endpoints where source = @source and name <> all(@keep::text[]) returning name`,
		postgres.Strict{"source": source, "keep": append([]string{}, keep...)})
}

// SetEndpoint enables or disables an endpoint for an admin. It returns false if nothing changed.
func SetEndpoint(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_webhook_endpoints
		   set enabled = @enabled, disabled_by = case when @enabled then '' else @by end,
		       disabled_reason = case when @enabled then '' else @reason end,
		       disabled_at = case when @enabled then null else clock_timestamp() end, updated_at = clock_timestamp()
		 where name = @name and enabled <> @enabled`,
		postgres.Strict{"name": name, "enabled": enabled, "by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("change webhook %q: %w", name, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	_, err = GetEndpoint(ctx, db, name)
	return false, err
}
