package mcp

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Report is the outcome of a sync. Its lists name the tools with a changed state.
type Report struct {
	Server      string   `json:"server"`
	About       string   `json:"about"`
	Tools       int      `json:"tools"` // listed by the server
	Mounted     []string `json:"mounted"`
	Quarantined []string `json:"quarantined"`
	Gone        []string `json:"gone"`
	Excluded    []string `json:"excluded"`
	Refused     []string `json:"refused"`
	Error       string   `json:"error,omitempty"` // why the sync failed
}

// changed reports whether any tool changed.
func (r Report) changed() bool {
	return len(r.Mounted)+len(r.Quarantined)+len(r.Gone)+len(r.Excluded)+len(r.Refused) > 0
}

// count counts a tool with a changed state.
func (r *Report) count(t Tool) {
	switch t.State {
	case Mounted:
		r.Mounted = append(r.Mounted, t.Tool)
	case Quarantined:
		r.Quarantined = append(r.Quarantined, t.Tool)
	case Gone:
		r.Gone = append(r.Gone, t.Tool)
	case Excluded:
		r.Excluded = append(r.Excluded, t.Tool)
	case Refused:
		r.Refused = append(r.Refused, t.Tool)
	}
}

// reconcile updates the rows and skills of a server's tools to match its list, and records the changes.
func reconcile(ctx context.Context, tx pgx.Tx, server, agent string, listed map[string]snapshot) (Report, error) {
	report := Report{
		Server: server, Tools: len(listed), Mounted: []string{}, Quarantined: []string{}, Gone: []string{},
		Excluded: []string{},
		Refused:  []string{},
	}
	r, err := lock(ctx, tx, server)
	if err != nil {
		return report, err
	}
	known, err := Tools(ctx, tx, server)
	if err != nil {
		return report, err
	}
	rows := make(map[string]Tool, len(known))
	for _, t := range known {
		rows[t.Tool] = t
	}
	for name := range listed {
		if _, ok := rows[name]; !ok {
			rows[name] = Tool{Server: server, Tool: name, Skill: skillName(server, name), Definition: json.RawMessage(`{}`)}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) { // a fixed lock order avoids deadlocks
		old := rows[name]
		var now *snapshot
		if s, ok := listed[name]; ok {
			now = &s
		}
		next, err := writeState(ctx, tx, r, nextState(r, old, now))
		if err != nil {
			return report, err
		}
		if next.State != old.State || next.SeenPin != old.SeenPin {
			report.count(next)
		}
	}
	if !report.changed() {
		return report, nil
	}
	return report, record(ctx, tx, agent, "mcp_sync", map[string]any{"server": server}, report)
}

// lock reads and locks a server's row.
func lock(ctx context.Context, tx pgx.Tx, server string) (Remote, error) {
	if _, err := tx.Exec(ctx, `select from agent_mcp_servers where name = @name for update`,
		postgres.Strict{"name": server}); err != nil {
		return Remote{}, fmt.Errorf("lock MCP server %q: %w", server, err)
	}
	return Get(ctx, tx, server)
}

// writeState writes a tool's row and updates its skill accordingly.
func writeState(ctx context.Context, tx pgx.Tx, r Remote, t Tool) (Tool, error) {
	if t.State == Mounted {
		if problem, err := mountable(ctx, tx, r, t); err != nil {
			return t, err
		} else if problem != "" {
			t.State, t.Reason = Refused, problem
		}
	}
	if err := writeTool(ctx, tx, t); err != nil {
		return t, err
	}
	switch t.State {
	case Mounted:
		return t, mount(ctx, tx, r, t)
	case Quarantined, Gone:
		return t, unmount(ctx, tx, t)
	}
	_, err := skills.Delete(ctx, tx, Source, t.Skill)
	return t, err
}

// mountable returns why a tool cannot become a skill; empty if it can.
func mountable(ctx context.Context, tx pgx.Tx, r Remote, t Tool) (string, error) {
	d, err := t.accepted(r)
	if err != nil {
		return cleanText(err.Error(), 500), nil
	}
	if err := skills.Validate(d); err != nil {
		return cleanText(err.Error(), 500), nil
	}
	switch s, err := skills.Get(ctx, tx, t.Skill); {
	case errors.Is(err, skills.ErrNotFound):
		return "", nil
	case err != nil:
		return "", err
	case s.Source != Source:
		return fmt.Sprintf("there is a skill %s of another source", t.Skill), nil
	}
	return "", nil
}

func (t Tool) accepted(r Remote) (skills.Definition, error) {
	var d definition
	if err := json.Unmarshal(t.Definition, &d); err != nil {
		return skills.Definition{}, fmt.Errorf("read the definition of %s: %w", t.Tool, err)
	}
	return r.skill(t.Tool, t.Skill, t.Pin, d), nil
}

// mount stores the skill, and enables it if this package had disabled it.
func mount(ctx context.Context, tx pgx.Tx, r Remote, t Tool) error {
	d, err := t.accepted(r)
	if err != nil {
		return err
	}
	if _, err := skills.Put(ctx, tx, d, Source); err != nil {
		return err
	}
	s, err := skills.Get(ctx, tx, t.Skill)
	if err != nil || s.Enabled || s.DisabledBy != By {
		return err
	}
	_, err = skills.Enable(ctx, tx, t.Skill, By, "the tool is as it was accepted")
	return err
}

// unmount disables a skill and records both versions as evidence.
func unmount(ctx context.Context, tx pgx.Tx, t Tool) error {
	reason := fmt.Sprintf("tool %s of the MCP server %s: %s", t.Tool, t.Server, t.Reason)
	if t.State == Quarantined {
		reason += fmt.Sprintf("; see agent mcp show %s %s", t.Server, t.Tool)
	}
	_, err := skills.Disable(ctx, tx, t.Skill, By, reason, map[string]any{
		"state": t.State, "pin": t.Pin, "accepted": t.Definition, "seen_pin": t.SeenPin, "seen": t.Seen,
	})
	if errors.Is(err, skills.ErrNotFound) {
		return nil
	}
	return err
}

func writeTool(ctx context.Context, tx pgx.Tx, t Tool) error {
	verb := fmt.Sprintf("write MCP tool %s/%s", t.Server, t.Tool)
	_, err := postgres.Upsert(ctx, tx, verb, "agent_mcp_tools", "server, tool", postgres.Strict{
		"server": t.Server, "tool": t.Tool, "skill_name": t.Skill, "state": t.State, "reason": t.Reason, "pin": t.Pin,
		"definition": t.Definition, "seen_pin": t.SeenPin, "seen": t.Seen,
	})
	return err
}

// remount applies a changed declaration's scope, trust and timeout to a server's tools. A newly included tool without
// an accepted version waits for the next sync.
func remount(ctx context.Context, tx pgx.Tx, server string) error {
	r, err := lock(ctx, tx, server)
	if err != nil {
		return err
	}
	all, err := Tools(ctx, tx, server)
	if err != nil {
		return err
	}
	for _, t := range all {
		switch included := r.includes(t.Tool); {
		case !included && t.State != Excluded:
			t = nextState(r, t, nil)
		case included && t.State == Mounted, included && t.State == Excluded && t.Pin != "":
			t.State, t.Reason = Mounted, ""
		default:
			continue
		}
		if _, err := writeState(ctx, tx, r, t); err != nil {
			return err
		}
	}
	return nil
}

// Accept accepts the current version of a quarantined tool and enables its skill. pin, if not empty, is the hash of
// the version that the admin read. It returns [ErrNothingToAccept] if the hash differs or the tool is not in
// quarantine, and [ErrNotFound] for an unknown tool. It records an activity.
func Accept(ctx context.Context, db postgres.Beginner, server, tool, pin, agent string) (Tool, error) {
	var accepted Tool
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		r, err := lock(ctx, tx, server)
		if err != nil {
			return err
		}
		all, err := Tools(ctx, tx, server)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(t Tool) bool { return t.Tool == tool || t.Skill == tool })
		if i < 0 {
			return ErrNotFound
		}
		old := all[i]
		if old.State != Quarantined || old.SeenPin == "" || pin != "" && pin != old.SeenPin {
			return ErrNothingToAccept
		}
		next := old
		next.State, next.Reason, next.Pin, next.Definition = Mounted, "", old.SeenPin, old.Seen
		next.SeenPin, next.Seen = "", json.RawMessage(`{}`)
		if problem, err := mountable(ctx, tx, r, next); err != nil || problem != "" {
			return errors.Join(err, fmt.Errorf("it cannot be a skill: %s", problem))
		}
		if accepted, err = writeState(ctx, tx, r, next); err != nil {
			return err
		}
		return record(ctx, tx, agent, "mcp_accept",
			map[string]any{"server": server, "tool": old.Tool, "pin": old.Pin, "accepted": next.Pin},
			map[string]any{"was": old.Reason})
	})
	if err != nil {
		return Tool{}, fmt.Errorf("accept MCP tool %s/%s: %w", server, tool, err)
	}
	return accepted, nil
}

// record writes the activity of a change to mounted tools, under the trace of ctx or a new one.
func record(ctx context.Context, db postgres.DB, agent, skill string, input, output any) error {
	e := activity.Entry{Skill: skill, Input: input}
	if x, inside := executions.Current(ctx); inside {
		e.Claim = x.Claim
	}
	span, _ := trace.From(ctx)
	e.Agent = cmp.Or(span.Agent, agent)
	if span.TraceID == "" {
		e.TraceID, e.Surface = string(trace.New(trace.Operate)), string(trace.Operate)
	}
	_, err := activity.Note(ctx, db, e, activity.Outcome{Output: output})
	return err
}

// Offer is a row of agent_mcp_offers: a skill that external clients may call over MCP.
type Offer struct {
	Skill     string    `json:"skill"`
	OfferedBy string    `json:"offered_by"`
	CreatedAt time.Time `json:"created_at"`
}

// Grant offers a skill over MCP. It returns false if the skill is offered already, and [skills.ErrNotFound] for an
// unknown one. by is the admin. It records an activity.
func Grant(ctx context.Context, db postgres.Beginner, skill, by, agent string) (bool, error) {
	return change(ctx, db, "mcp_offer", skill, by, agent, func(tx pgx.Tx) (int64, error) {
		tag, err := tx.Exec(ctx, `
			insert into agent_mcp_offers (skill_name, offered_by) values (@skill, @by) on conflict (skill_name) do nothing`,
			postgres.Strict{"skill": skill, "by": by})
		return tag.RowsAffected(), err
	})
}

// Withdraw ends an offer. It returns false if there is none, and [skills.ErrNotFound] for an unknown skill. Pending
// calls continue. It records an activity.
func Withdraw(ctx context.Context, db postgres.Beginner, skill, by, agent string) (bool, error) {
	return change(ctx, db, "mcp_withdraw", skill, by, agent, func(tx pgx.Tx) (int64, error) {
		tag, err := tx.Exec(ctx, `delete from agent_mcp_offers where skill_name = @skill`, postgres.Strict{"skill": skill})
		return tag.RowsAffected(), err
	})
}

func change(
	ctx context.Context, db postgres.Beginner, act, skill, by, agent string, write func(tx pgx.Tx) (int64, error),
) (changed bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if _, err := skills.Get(ctx, tx, skill); err != nil {
			return err
		}
		n, err := write(tx)
		if changed = n > 0; err != nil || !changed {
			return err
		}
		return record(ctx, tx, agent, act, map[string]any{"skill": skill, "by": by}, nil)
	})
	if err != nil {
		return false, fmt.Errorf("change the offer of skill %q: %w", skill, err)
	}
	return changed, nil
}

// Offers lists the offered skills by name.
func Offers(ctx context.Context, db postgres.DB) ([]Offer, error) {
	rows, err := db.Query(ctx, `select skill_name, offered_by, created_at from agent_mcp_offers order by skill_name`)
	return postgres.Collect(rows, err, "list offered skills", pgx.RowToStructByPos[Offer])
}

// offered returns the offered and enabled skills that the registry can run.
func (s *Server) offered(ctx context.Context) ([]skills.Skill, error) {
	offers, err := Offers(ctx, s.Pool)
	if err != nil || len(offers) == 0 {
		return nil, err
	}
	all, err := s.Skills.Available(ctx, s.Pool)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(skill skills.Skill) bool {
		return !slices.ContainsFunc(offers, func(o Offer) bool { return o.Skill == skill.Name })
	}), nil
}

// definition is a tool as stored: cleaned for display.
type definition struct {
	Description string         `json:"description"`
	InputSchema map[string]any `json:"input_schema"`
	Annotations *annotations   `json:"annotations,omitempty"`
}

// annotations are a tool's claims about its behaviour. They are not trusted.
type annotations struct {
	DestructiveHint *bool `json:"destructiveHint,omitempty"`
	OpenWorldHint   *bool `json:"openWorldHint,omitempty"`
	ReadOnlyHint    bool  `json:"readOnlyHint,omitempty"`
	IdempotentHint  bool  `json:"idempotentHint,omitempty"`
}

// snapshot is a tool as the server lists it now.
type snapshot struct {
	pin        string // hash of the raw definition
	definition definition
	problem    string // why it cannot become a skill
}

// newSnapshot takes the snapshot of a tool. The pin covers all bytes that a model or a person can see, before cleaning.
func newSnapshot(t *sdk.Tool) snapshot {
	raw, err := json.Marshal(map[string]any{
		"name": t.Name, "description": t.Description, "inputSchema": t.InputSchema, "annotations": t.Annotations,
	})
	if err != nil {
		return snapshot{problem: "its definition cannot be written as JSON: " + cleanText(err.Error(), 200)}
	}
	sum := sha256.Sum256(raw)
	s := snapshot{pin: hex.EncodeToString(sum[:])}
	switch {
	case len(raw) > maxDefinition:
		s.problem = fmt.Sprintf("its definition has %d bytes; at most %d are taken", len(raw), maxDefinition)
		return s
	case strings.Contains(string(raw), `\u0000`):
		s.problem = "its definition has a NUL character"
		return s
	}
	s.definition.Description = cleanText(t.Description, maxDescription)
	if a := t.Annotations; a != nil {
		s.definition.Annotations = &annotations{a.DestructiveHint, a.OpenWorldHint, a.ReadOnlyHint, a.IdempotentHint}
	}
	s.definition.InputSchema, s.problem = schemaOf(t)
	return s
}

// schemaOf returns a cleaned copy of a tool's schema, or why there is none.
func schemaOf(t *sdk.Tool) (map[string]any, string) {
	raw, err := json.Marshal(t.InputSchema)
	var schema map[string]any
	if err == nil {
		err = json.Unmarshal(raw, &schema)
	}
	if err != nil || schema == nil {
		return nil, "its input schema is no JSON object"
	}
	cleanSchema(schema)
	return schema, ""
}

// parameters returns the skill's schema. A schema without properties accepts any argument; one with properties
// accepts no others by default, as all skills do.
func (d definition) parameters() map[string]any {
	schema := make(map[string]any, len(d.InputSchema)+1)
	maps.Copy(schema, d.InputSchema)
	if schema["type"] == nil {
		schema["type"] = "object"
	}
	properties, _ := schema["properties"].(map[string]any)
	if _, said := schema["additionalProperties"]; !said && len(properties) == 0 {
		schema["additionalProperties"] = true
	}
	return schema
}

// destructive reports whether a tool declares, or by the protocol's default implies, a destructive effect. A tool
// without annotations declares nothing.
func (a *annotations) destructive() bool {
	switch {
	case a == nil:
		return false
	case a.DestructiveHint != nil:
		return *a.DestructiveHint
	}
	return !a.ReadOnlyHint
}

// trustOf returns a tool's trust: the admin's setting, or a stricter one.
func (r Remote) trustOf(tool string, a *annotations) string {
	switch {
	case a.destructive():
		return skills.TrustApprove
	case matches(r.Auto, tool):
		return skills.TrustAuto
	}
	return r.Trust
}

// includes reports whether the workspace includes a tool.
func (r Remote) includes(tool string) bool {
	return (len(r.Include) == 0 || matches(r.Include, tool)) && !matches(r.Exclude, tool)
}

// skill returns the skill declaration of a tool.
func (r Remote) skill(tool, name, pin string, d definition) skills.Definition {
	about := d.Description
	about = cmp.Or(about, "No description.")
	return skills.Definition{
		Name: name, Description: fmt.Sprintf("[tool of the MCP server %s] %s", r.Name, about), Parameters: d.parameters(),
		Handler: "mcp:" + r.Name + "/" + tool, Config: map[string]any{"pin": pin}, Scope: r.Scope,
		Trust: r.trustOf(tool, d.Annotations), Idempotent: matches(r.Idempotent, tool),
		Timeout: fmt.Sprintf("%dms", r.TimeoutMS),
	}
}

// maxSkillName bounds a skill's name.
const maxSkillName = 64

// skillName returns the name of a tool's skill. If a character was replaced or the name was cut, a part of the hash
// of the tool's name keeps it unique.
func skillName(server, tool string) string {
	safe := strings.Map(func(r rune) rune {
		if r < 128 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-') {
			return r
		}
		return '_'
	}, tool)
	name := "mcp__" + server + "__" + safe
	if safe == tool && len(name) <= maxSkillName {
		return name
	}
	sum := sha256.Sum256([]byte(tool))
	mark := "_" + hex.EncodeToString(sum[:])[:8]
	return name[:min(len(name), maxSkillName-len(mark))] + mark
}

// nextState decides the state of a tool. old is its row, with only names for a new tool. now is the listed tool, nil if
// the server does not list it. All cases are decided here.
func nextState(r Remote, old Tool, now *snapshot) Tool {
	next := old
	next.Reason, next.SeenPin, next.Seen = "", "", json.RawMessage(`{}`)
	switch {
	case !r.includes(old.Tool):
		next.State, next.Reason = Excluded, "left out by the workspace"
	case now == nil:
		next.State, next.Reason = Gone, "the server no longer lists it"
	case old.Pin == "" && now.problem != "":
		next.State, next.Reason = Refused, now.problem
	case old.Pin == "":
		next.State, next.Pin, next.Definition = Mounted, now.pin, encode(now.definition)
	case now.pin == old.Pin:
		next.State = Mounted
	default:
		next.State, next.SeenPin, next.Seen = Quarantined, now.pin, encode(now.definition)
		next.Reason = difference(old.Definition, now.definition)
		if now.problem != "" {
			next.Reason += "; it can no longer be a skill: " + now.problem
		}
	}
	return next
}

// difference names the changed parts of a tool.
func difference(accepted json.RawMessage, now definition) string {
	var then, current definition
	if json.Unmarshal(accepted, &then) != nil || json.Unmarshal(encode(now), &current) != nil {
		return "it changed since it was accepted"
	}
	var parts []string
	if then.Description != current.Description {
		parts = append(parts, "description")
	}
	if !reflect.DeepEqual(then.InputSchema, current.InputSchema) {
		parts = append(parts, "input schema")
	}
	if !reflect.DeepEqual(then.Annotations, current.Annotations) {
		parts = append(parts, "annotations")
	}
	if len(parts) == 0 {
		return "it changed since it was accepted, in characters that are not shown"
	}
	return "it changed since it was accepted: " + strings.Join(parts, ", ")
}

// encode encodes a definition, which came from JSON.
func encode(d definition) json.RawMessage {
	raw, err := json.Marshal(d)
	if err != nil {
		return json.RawMessage(`{}`)
	}
	return raw
}

// cleanText makes foreign text safe to show to people and models. It removes control characters and invisible
// characters that could hide words or change the writing direction. It cuts at limit characters.
func cleanText(text string, limit int) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return r
		case unicode.IsSpace(r):
			return ' '
		case isInvisible(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(text, "\uFFFD"))
	text = strings.TrimSpace(text)
	if letters := []rune(text); len(letters) > limit {
		return strings.TrimSpace(string(letters[:limit])) + "…"
	}
	return text
}

// isInvisible reports an invisible character: control and format characters (zero width, direction, tags), private use,
// surrogates, and variation selectors.
func isInvisible(r rune) bool {
	return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Cs, unicode.Variation_Selector) ||
		r == '\u115F' || r == '\u1160' ||
		r == '\u3164' || r == '\uFFA0' || r == '\u2028' || r == '\u2029'
}

// cleanSchema cleans the descriptive texts of a JSON Schema. It leaves names, enum, const, default and pattern.
func cleanSchema(value any) any {
	switch v := value.(type) {
	case []any:
		for i := range v {
			v[i] = cleanSchema(v[i])
		}
	case map[string]any:
		for key, item := range v {
			v[key] = cleanKeyword(key, item)
		}
	}
	return value
}

func cleanKeyword(key string, value any) any {
	switch key {
	case "description", "title", "$comment":
		if text, ok := value.(string); ok {
			return cleanText(text, maxSchemaText)
		}
	case "enum", "const", "default", "examples", "pattern", "required":
		return value
	case "properties", "patternProperties", "$defs", "definitions", "dependentSchemas":
		// The keys are names, and each value is a schema.
		if schemas, ok := value.(map[string]any); ok {
			for name, schema := range schemas {
				schemas[name] = cleanSchema(schema)
			}
			return schemas
		}
	}
	return cleanSchema(value)
}
