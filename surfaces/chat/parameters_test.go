package chat

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/responses"
)

// namesIn lists the JSON names of a struct's fields.
func namesIn(t reflect.Type) (names []string) {
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			names = append(names, name)
		} else if f.Type.Kind() == reflect.Struct && f.Anonymous && !strings.Contains(f.Type.PkgPath(), "openai-go") {
			names = append(names, namesIn(f.Type)...)
		}
	}
	return names
}

func TestEveryDocumentedParameterIsHonouredRefusedOrTheAgents(t *testing.T) {
	t.Parallel()
	decided(t, slices.Concat(namesIn(reflect.TypeFor[request]()), agentParameters()),
		namesIn(reflect.TypeFor[openai.ChatCompletionNewParams]()))
	decided(t, slices.Concat(namesIn(reflect.TypeFor[responseRequest]()), agentResponseParameters()),
		namesIn(reflect.TypeFor[responses.ResponseNewParams]()))
}

// decided compares what the surface knows with what a library documents.
func decided(t *testing.T, known, documented []string) {
	t.Helper()
	if len(documented) < 20 {
		t.Fatalf("the library documents %v", documented)
	}
	for _, name := range documented {
		if !slices.Contains(known, name) {
			t.Errorf("nobody has decided about %s", name)
		}
	}
}
