package redact_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

func TestAKnownSecretIsHiddenAtAnyDepth(t *testing.T) {
	hide := strings.NewReplacer("s3cret", "[secret]").Replace
	got := redact.Known(map[string]any{
		"a s3cret key": 1.5, "list": []any{"the s3cret", nil, map[string]any{"deep": "s3crets3cret"}}, "true": true,
	}, hide)
	want := map[string]any{
		"a [secret] key": 1.5, "list": []any{"the [secret]", nil, map[string]any{"deep": "[secret][secret]"}}, "true": true,
	}
	if diff := cmp.Diff(any(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
