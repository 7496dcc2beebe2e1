package executions

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// Labels name the subject of an execution, such as order: A-1001. A listing finds executions by a label; see
// [Filter.Label].
type Labels map[string]string

// MaxLabels bounds the labels of an execution, and maxLabelValue the characters of a value.
const (
	MaxLabels     = 8
	maxLabelValue = 200
)

// LabelNamePattern is the syntax of a label's name.
const LabelNamePattern = `^[a-z][a-z0-9_]{0,31}$`

// ErrLabels reports invalid labels.
var ErrLabels = errors.New("labels not valid")

var (
	labelName  = regexp.MustCompile(LabelNamePattern)
	labelValue = regexp.MustCompile(`^[^\x00-\x1f\x7f-\x9f]{1,200}$`)
)

// Validate returns an error that wraps ErrLabels and names the first problem.
func (l Labels) Validate() error {
	if len(l) > MaxLabels {
		return fmt.Errorf("%w: there are %d; an execution has at most %d", ErrLabels, len(l), MaxLabels)
	}
	for _, name := range slices.Sorted(maps.Keys(l)) {
		if err := CheckLabelName(name); err != nil {
			return err
		}
		if !labelValue.MatchString(l[name]) {
			return fmt.Errorf("%w: the value of %s must have 1 to 200 printable characters", ErrLabels, name)
		}
	}
	return nil
}

// CheckLabelName returns an error that wraps ErrLabels for a name that no label can have.
func CheckLabelName(name string) error {
	if !labelName.MatchString(name) {
		return fmt.Errorf("%w: %.60q must begin with a letter and have 1 to 32 of the characters a-z 0-9 _", ErrLabels, name)
	}
	return nil
}

// SetLabels sets labels of the running execution, as a step. It replaces labels with the same names and keeps all
// others.
func SetLabels(ctx context.Context, step string, labels Labels) error {
	return labelStep(ctx, step, labels, true)
}

// SetDefaultLabels is [SetLabels] that keeps labels which the execution has already. Of the others, it sets the first
// by name, up to MaxLabels.
func SetDefaultLabels(ctx context.Context, step string, labels Labels) error {
	return labelStep(ctx, step, labels, false)
}

func labelStep(ctx context.Context, step string, labels Labels, replace bool) error {
	x, running := Current(ctx)
	if !running {
		return ErrNotInExecution
	}
	_, err := StepTx(ctx, step, func(ctx context.Context, tx pgx.Tx) (Labels, error) {
		return labels, setLabels(ctx, tx, x.ID, labels, replace)
	})
	return err
}

// setLabels adds labels to an execution, up to MaxLabels. With replace, it replaces labels of the same name.
func setLabels(ctx context.Context, tx pgx.Tx, id string, labels Labels, replace bool) error {
	if err := labels.Validate(); err != nil {
		return err
	}
	names := slices.Sorted(maps.Keys(labels))
	values := make([]string, len(names))
	for i, name := range names {
		values[i] = labels[name]
	}
	_, err := tx.Exec(ctx, `
		insert into agent_execution_labels (execution_id, name, value)
		select @id, l.name, l.value from unnest(@names::text[], @values::text[]) l (name, value)
		 where @replace or l.name not in (select name from agent_execution_labels where execution_id = @id)
		 order by l.name
		 limit case when not @replace
		            then @max - (select count(*) from agent_execution_labels where execution_id = @id) end
		on conflict (execution_id, name) do update set value = excluded.value where @replace`,
		postgres.Strict{"id": id, "names": names, "values": values, "replace": replace, "max": MaxLabels})
	if err != nil {
		return fmt.Errorf("set labels of execution %s: %w", id, err)
	}
	var n int
	err = tx.QueryRow(ctx, `select count(*) from agent_execution_labels where execution_id = @id`,
		postgres.Strict{"id": id}).Scan(&n)
	if err != nil {
		return fmt.Errorf("count labels of execution %s: %w", id, err)
	}
	if n > MaxLabels {
		return fmt.Errorf("%w: there would be %d; an execution has at most %d", ErrLabels, n, MaxLabels)
	}
	return nil
}

// Redacted returns the labels without secrets. Show users only this form.
func (l Labels) Redacted() Labels {
	redacted := Labels{}
	for name, value := range l {
		redacted[name] = redact.Text(value, 1000)
	}
	return redacted
}

// LabelValue converts a text to the value of a label: one line of at most 200 characters. An empty result is not a
// valid value.
func LabelValue(text string) string {
	text = strings.Join(strings.FieldsFunc(text, unicode.IsControl), " ")
	if runes := []rune(text); len(runes) > maxLabelValue {
		text = string(runes[:maxLabelValue])
	}
	return strings.TrimSpace(strings.ToValidUTF8(text, ""))
}

// LabelsOf reads the labels of executions. It returns them by execution id.
func LabelsOf(ctx context.Context, db postgres.DB, ids []string) (map[string]Labels, error) {
	labels := map[string]Labels{}
	rows, err := db.Query(ctx, `
		select execution_id::text, name, value
		  from agent_execution_labels where execution_id = any (@ids::text[]::uuid[])`,
		postgres.Strict{"ids": ids})
	if err == nil {
		var id, name, value string
		_, err = pgx.ForEachRow(rows, []any{&id, &name, &value}, func() error {
			if labels[id] == nil {
				labels[id] = Labels{}
			}
			labels[id][name] = value
			return nil
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read labels: %w", err)
	}
	return labels, nil
}

// ParseLabel parses a filter by label: name=value, or a value alone. If the text before "=" is not a valid name, or no
// text follows "=", the whole text is the value.
func ParseLabel(text string) (name, value string) {
	if before, after, ok := strings.Cut(text, "="); ok && after != "" && labelName.MatchString(before) {
		return before, after
	}
	return "", text
}
