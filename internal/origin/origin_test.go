package origin_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/origin"
)

func TestPath(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"/":                         "/",
		"/traces?status=error&x=1":  "/traces?status=error&x=1",
		"/memory/a%2Fb#notes":       "/memory/a%2Fb",
		"":                          "/",
		"traces":                    "/",
		"https://evil.example/":     "/",
		"//evil.example/":           "/",
		"/\\evil.example":           "/",
		"/\t/evil.example":          "/",
		"/ /evil.example":           "/",
		"/%zz":                      "/",
		"javascript:alert(1)":       "/",
		"/a?next=https://b.example": "/a?next=https://b.example",
	} {
		assert.Equal(t, want, origin.Path(given), given)
	}
}
