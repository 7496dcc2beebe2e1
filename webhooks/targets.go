package webhooks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	defaultMaxFailures = 20
	maxMaxFailures     = 1000
	maxURL             = 2048
)

var eventRegexp = regexp.MustCompile(`^(\*|[a-z_]+\.(\*|[a-z_]+))$`)

// EventTypes are the agent's own events.
func EventTypes() []string {
	return []string{
		"approval.requested", "budget.reached", "execution.cancelled", "execution.completed", "execution.failed",
		"objective.completed", "skill.disabled", "verdict.changed", "webhook.dead",
	}
}

// TargetDefinition declares a target in a workspace file.
type TargetDefinition struct {
	Name        string   `yaml:"name" json:"name"`
	Description string   `yaml:"description" json:"description,omitempty"`
	URL         string   `yaml:"url" json:"url"`                 // a URL, or a reference to a secret URL
	Secrets     []string `yaml:"secrets" json:"secrets"`         // references; each secret signs, so one can be rotated
	Format      string   `yaml:"format" json:"format,omitempty"` // FormatSlack, which needs no secrets; else empty
	Events      []string `yaml:"events" json:"events"`           // execution.failed, execution.*, *
	MaxFailures int      `yaml:"max_failures" json:"max_failures,omitempty"`
}

// ValidateTarget returns all problems of d, each as "field path: problem", joined as by [errors.Join].
func ValidateTarget(d TargetDefinition) error {
	problems := checkName(d.Name, d.Description)
	if d.Format != FormatSlack || len(d.Secrets) > 0 {
		problems = append(problems, checkSecrets(d.Secrets)...)
	}
	if d.Format != "" && d.Format != FormatSlack {
		problems.Add("format", "is %q; leave it out, or write %s", d.Format, FormatSlack)
	}
	switch u, err := url.Parse(d.URL); {
	case isReference(d.URL):
	case err != nil, u.Host == "", u.Scheme != "https" && u.Scheme != "http", len(d.URL) > maxURL:
		problems.Add("url", "must be an https:// or http:// address, or ${NAME} or file:/path of one")
	case u.User != nil:
		problems.Add("url", "contains a user or a password; messages are signed with the secrets instead")
	}
	if len(d.Events) == 0 {
		problems.Add("events", "is empty; name types such as execution.failed, families such as execution.*, or *")
	}
	for i, e := range d.Events {
		if !eventRegexp.MatchString(e) || !matchesAny(e) {
			problems.Add(fmt.Sprintf("events[%d]", i), "%q is not an event of the agent; known are %v", e, EventTypes())
		}
	}
	if d.MaxFailures < 0 || d.MaxFailures > maxMaxFailures {
		problems.Add("max_failures", "must be between 1 and %d", maxMaxFailures)
	}
	return errors.Join(problems...)
}

// matchesAny reports whether a pattern can match an event.
func matchesAny(pattern string) bool {
	for _, e := range EventTypes() {
		if pattern == "*" || pattern == e || pattern == family(e) {
			return true
		}
	}
	return false
}

// family returns the pattern of an event's family: execution.* for execution.failed.
func family(event string) string {
	name, _, _ := strings.Cut(event, ".")
	return name + ".*"
}

// PutTarget stores the declaration d and reports whether it changed anything. The target's state and failures stay.
func PutTarget(ctx context.Context, db postgres.DB, d TargetDefinition) (changed bool, err error) {
	if err := ValidateTarget(d); err != nil {
		return false, fmt.Errorf("put webhook target %q: %w", d.Name, err)
	}
	verb := fmt.Sprintf("put webhook target %q", d.Name)
	return postgres.Upsert(ctx, db, verb, "agent_webhook_targets", "name", postgres.Strict{
		"name": d.Name, "description": d.Description, "url": d.URL, "secrets": append([]string{}, d.Secrets...),
		"events": d.Events, "format": d.Format,
		"max_failures": cmp.Or(d.MaxFailures, defaultMaxFailures), "source": postgres.SourceWorkspace,
	})
}

// Targets lists all targets by name, with their pending messages.
func Targets(ctx context.Context, db postgres.DB) ([]Target, error) {
	return targets(ctx, db, "")
}

// GetTarget reads a target by name, or returns [ErrNotFound].
func GetTarget(ctx context.Context, db postgres.DB, name string) (Target, error) {
	found, err := targets(ctx, db, name)
	if err == nil && (len(found) == 0 || name == "") { // an empty name selects all targets
		err = fmt.Errorf("webhook target %q: %w", name, ErrNotFound)
	}
	if err != nil {
		return Target{}, err
	}
	return found[0], nil
}

// targets reads the target of a name, or all targets if name is empty.
func targets(ctx context.Context, db postgres.DB, name string) ([]Target, error) {
	return postgres.Rows[Target](ctx, db, "list webhook targets", `
		select t.id::text, t.name, t.description, t.url, t.secrets, t.events, t.format, t.max_failures, t.enabled,
		       t.disabled_reason, t.disabled_by, t.disabled_at, t.failures, t.failing_since, t.blocked_until, t.source,
		       t.created_at, t.updated_at,
		       (select count(*) from agent_webhook_outbox o where o.target_id = t.id and o.status = 'pending') as pending,
		       (select count(*) from agent_webhook_outbox o where o.target_id = t.id and o.status = 'dead') as dead
		  from agent_webhook_targets t where @name = '' or t.name = @name order by t.name`, postgres.Strict{"name": name})
}

// RemoveTargets deletes the workspace's targets except keep, with their pending messages, and returns their names.
func RemoveTargets(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.DeleteOthers(ctx, db, "webhook targets", "agent_webhook_targets", keep)
}

// SetTarget enables or disables a target for an admin. An enabled target receives its pending messages. It returns
// false if nothing changed.
func SetTarget(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error) {
	tag, err := db.Exec(ctx, `
		with changed as (
		  update agent_webhook_targets
		     set enabled = @enabled, disabled_by = case when @enabled then '' else @by end,
		         disabled_reason = case when @enabled then '' else @reason end,
		         disabled_at = case when @enabled then null else clock_timestamp() end, updated_at = clock_timestamp(),
		         failures = 0, failing_since = null, blocked_until = 'epoch'
		   where name = @name and enabled <> @enabled returning id)
		select pg_notify('agent_webhooks', '') from changed`,
		postgres.Strict{"name": name, "enabled": enabled, "by": by, "reason": reason})
	if err != nil {
		return false, fmt.Errorf("change webhook target %q: %w", name, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	_, err = GetTarget(ctx, db, name)
	return false, err
}
